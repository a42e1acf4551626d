"""Speed of the vLLM rollout engine, beside raw vLLM, the embedded engine and `model.generate`, in one run.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--json] [--repeats 7] [--turns 6]

64 episodes with a growing context: 32 tokens of first prompt, then in every turn sampled tokens and 16 observation
tokens, with a random Qwen3 model of 2.4 million parameters in float32. Two loads:

- equal: 24 new tokens in every turn, an environment that answers at once;
- varied: 8 to 80 new tokens in a turn and 50 to 500 ms in the environment, each drawn anew (a spread of ten).

(a) this project's engine, (b) vLLM's own offline batch per turn over the same prompts and lengths, (c) the embedded
engine, (d) `model.generate` over the whole left-padded context, equal load only. They take turns within each repeat, so
that a busy neighbour slows all; medians over the repeats, and quartiles of the ratios. The overhead of a turn outside
the model is measured with an engine that answers at once: of the engine's front (`VllmEngine`), and of an episode's
whole turn (agent, prompt, environment, bookkeeping).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapes
import torch
from rollout_transformers import N_EPISODES, N_NEW, N_OBSERVATION, N_PROMPT, N_VOCAB, generate, make_model

from rlhf.data import Finish, Prompt, SamplingParams
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import Sampled
from rlhf.inference.vllm.local import LocalInstance
from rlhf.inference.vllm.start import StartOptions, engine_environment

MAX_CONTEXT, KV_BYTES = 2048, 512 * 2**20


@dataclass(frozen=True)
class Sizes:
    """Episodes, and tokens of the first prompt, of what is sampled in a turn and of an observation."""

    episodes: int = N_EPISODES
    prompt: int = N_PROMPT
    new: int = N_NEW
    observation: int = N_OBSERVATION


@dataclass(frozen=True)
class Load:
    """Load of episodes: observations `[E][turns][tokens]`, new tokens and environment seconds `[E, turns]`."""

    said: list[list[list[int]]]
    n_new: Any
    latency_s: Any

    @property
    def n_tokens(self) -> int:
        """Tokens sampled in all."""
        return int(self.n_new.sum())


def make_load(turns: int, varied: bool, sizes: Sizes = Sizes()) -> Load:
    """A load; the varied one has from a third to ten thirds of the tokens."""
    random = np.random.default_rng(0)
    lengths = [sizes.prompt] + [sizes.observation] * (turns - 1)
    said = [[random.integers(1, N_VOCAB, length).tolist() for length in lengths] for _ in range(sizes.episodes)]
    shape = (sizes.episodes, turns)
    if not varied:
        return Load(said, np.full(shape, sizes.new), np.zeros(shape))
    n_new = random.integers(sizes.new // 3, 10 * sizes.new // 3 + 1, shape)
    return Load(said, n_new, random.uniform(0.05, 0.5, shape))


async def play(engine: RolloutEngine, load: Load) -> None:
    """All episodes at once, each at its own pace."""

    async def episode(number: int) -> None:
        ids: tuple[int, ...] = ()
        for turn, observation in enumerate(load.said[number]):
            ids = (*ids, *observation)
            params = SamplingParams(max_tokens=int(load.n_new[number, turn]), seed=1000 * number + turn)
            ids = (await engine.generate(Prompt(ids), params, session=str(number))).full_ids
            if load.latency_s[number, turn]:
                await asyncio.sleep(load.latency_s[number, turn])
        await engine.release(str(number))

    await asyncio.gather(*(episode(i) for i in range(len(load.said))))


def start_options(folder: str, dtype: str) -> StartOptions:
    """How both vLLMs are started; on a GPU there is room for larger keys and values."""
    n_bytes = KV_BYTES * (16 if torch.cuda.is_available() else 1)
    return StartOptions(folder, MAX_CONTEXT, dtype, N_EPISODES, 8192, kv_cache_bytes=n_bytes)


def raw_vllm(pipe: Any, folder: str, dtype: str) -> None:
    """Process of (b): an offline engine that plays a load whenever one arrives, and answers with the seconds."""
    os.environ.update(engine_environment())
    from vllm import LLM

    arguments = start_options(folder, dtype).arguments()
    for ours in ("worker_extension_cls", "weight_transfer_config"):
        arguments.pop(ours)
    llm = LLM(**arguments)
    pipe.send(0.0)
    while (load := pipe.recv()) is not None:
        llm.reset_prefix_cache()
        pipe.send(play_raw(llm, load))


def play_raw(llm: Any, load: Load) -> float:
    """Seconds that an offline engine takes for a load, in batches of one turn of all episodes."""
    from vllm import SamplingParams, TokensPrompt

    begin = time.perf_counter()
    contexts: list[list[int]] = [[] for _ in load.said]
    for turn in range(len(load.said[0])):
        for context, episode in zip(contexts, load.said, strict=True):
            context.extend(episode[turn])
        params = [
            SamplingParams(max_tokens=int(n), seed=1000 * i + turn, logprobs=0, detokenize=False, ignore_eos=True)
            for i, n in enumerate(load.n_new[:, turn])
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(context)) for context in contexts]
        for context, output in zip(contexts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            context.extend(output.outputs[0].token_ids)
        # A batch is one turn of all: the next begins when the slowest environment has answered.
        time.sleep(float(load.latency_s[:, turn].max()))
    return time.perf_counter() - begin


class Instant:
    """An instance that answers at once, to time what is around it."""

    name = "instant"

    async def sample(self, request_id: str, ids: Sequence[int], params: SamplingParams, *_: Any) -> Sampled:
        n = params.max_tokens
        return Sampled((1,) * n, (-1.0,) * n, Finish.LENGTH, (("0", n),))

    async def call(self, method: str, *_: Any) -> list[Any]:
        shape = {"n_vocab": N_VOCAB, "max_context": MAX_CONTEXT, "lora_rank": 0, "shapes": {}}
        return [shape | {"logprobs_mode": "processed_logprobs", "dtype": "float32", "transfer": "rlhf_memory"}]

    async def abort(self, request_ids: Sequence[str]) -> None:
        return None

    async def close(self) -> None:
        return None


def overheads(turns: int) -> dict[str, float]:
    """Microseconds a turn: of the engine's front, and of an episode around an engine that answers at once."""

    async def front() -> float:
        engine = VllmEngine([Instant()])  # type: ignore[list-item]
        await engine.connect(shapes={}, n_vocab=N_VOCAB, max_context=MAX_CONTEXT)
        load = make_load(turns, varied=False)
        begin = time.perf_counter()
        await play(engine, load)
        seconds = time.perf_counter() - begin
        await engine.close()
        return seconds

    return {"front": asyncio.run(front()) / (N_EPISODES * turns) * 1e6, "episode": episode_overhead(turns)}


def episode_overhead(turns: int) -> float:
    """Microseconds of a whole turn of `run_groups` with an engine and an environment that answer at once."""
    from agents.chat import ChatAgent
    from environments.base import Properties, StepResult
    from rlhf.data import Message, Role, Task
    from rlhf.inference.scripted import ScriptedEngine
    from rlhf.rollout.group import run_groups
    from rlhf.rollout.limits import Limits
    from rlhf.rollout.renderer import Renderer
    from rlhf.training.policy.tokenizer import train_tokenizer

    class Walk:
        n, opening = 0, StepResult("you see a door, a key and a ball")

        async def step(self, action: str) -> StepResult:
            self.n += 1
            return StepResult("you see a door, a key and a ball", terminated=self.n == turns, success=True)

        async def close(self) -> None:
            return None

    class Corridor:
        properties = Properties(deterministic=True, thread_safe=True, inline=True)

        def tasks(self, split: str) -> list[Task]:
            return [Task(str(i), (Message(Role.USER, "walk"),)) for i in range(N_EPISODES)]

        def start(self, task: Task) -> Walk:
            return Walk()

    tokenizer = train_tokenizer(["you see a door, a key and a ball. go forward"] * 8, vocab_size=320, max_context=2048)
    engine = ScriptedEngine(lambda prompt: "go forward", tokenizer=tokenizer)
    environment: Any = Corridor()
    limits = Limits(max_turns=turns, max_tokens=24, max_concurrent=N_EPISODES)

    async def run() -> float:
        parts = (environment, ChatAgent(), engine, Renderer(tokenizer), limits, SamplingParams())
        begin = time.perf_counter()
        groups = await run_groups(environment.tasks("train"), *parts, group_size=1, seed=0)
        seconds = time.perf_counter() - begin
        wrong = [t for group in groups for t in group if not t.solved or len(t.turns) != turns]
        assert not wrong, wrong[0].detail
        return seconds

    asyncio.run(run())
    return asyncio.run(run()) / (N_EPISODES * turns) * 1e6


def measure(turns: int, repeats: int, name: str | None, device: str) -> dict[str, Any]:
    """Tokens per second of every engine under every load: medians over the repeats."""
    loads = {"equal": make_load(turns, varied=False), "varied": make_load(turns, varied=True)}
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = (shapes.make_model(name, device).eval() if name else make_model("sdpa") for _ in range(2))
        dtype = str(plain.dtype).removeprefix("torch.")
        plain.save_pretrained(folder)
        save_tokenizer(Path(folder))
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=raw_vllm, args=(theirs, folder, dtype), daemon=True)
        process.start()
        pipe.recv()
        with asyncio.Runner() as runner:
            instance = LocalInstance.start(start_options(folder, dtype))
            ours = VllmEngine([instance], dtype=plain.dtype)
            runner.run(ours.connect(shapes={}, n_vocab=plain.config.vocab_size, max_context=MAX_CONTEXT))
            embedded = TransformersEngine(packed, max_context=MAX_CONTEXT, max_sessions=N_EPISODES)

            def record(load: str, name: str, seconds: float) -> None:
                rates.setdefault((load, name), []).append(loads[load].n_tokens / seconds)

            def timed(engine: RolloutEngine, load: str) -> float:
                begin = time.perf_counter()
                runner.run(play(engine, loads[load]))
                return time.perf_counter() - begin

            for repeat in range(-1, repeats):  # the first warms up
                for load in loads:
                    runner.run(instance.drop_cache())
                    seconds = {"a": timed(ours, load)}
                    pipe.send(loads[load])
                    seconds["b"] = pipe.recv()
                    seconds["c"] = timed(embedded, load)
                    if load == "equal":
                        begin = time.perf_counter()
                        generate(plain, loads[load].said)
                        seconds["d"] = time.perf_counter() - begin
                    if repeat >= 0:
                        for name, value in seconds.items():
                            record(load, name, value)
            runner.run(ours.close())
        pipe.send(None)
        process.join(10)
    found = {f"{load}_{name}": statistics.median(values) for (load, name), values in rates.items()}
    for load, name in rates:
        if name != "a":
            low, middle, high = ratio(rates, load, name)
            key = f"{load}_a_over_{name}"
            found |= {key: middle, f"{key}_low": low, f"{key}_high": high}
    return found


def ratio(rates: dict[tuple[str, str], list[float]], load: str, name: str) -> tuple[float, float, float]:
    """Quartiles over the repeats of (a)'s rate over `name`'s in the same repeat."""
    found = [a / b for a, b in zip(rates[load, "a"], rates[load, name], strict=True)]
    low, middle, high = np.quantile(found, [0.25, 0.5, 0.75]).tolist()
    return low, middle, high


def save_tokenizer(folder: Path) -> None:
    """VLLM wants a tokenizer beside the model, though only ids go in and out."""
    from rlhf.training.policy.tokenizer import train_tokenizer

    train_tokenizer(["a b c"], vocab_size=300, max_context=MAX_CONTEXT).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--model", choices=shapes.SHAPES, help="in the place of one of 2.4 million parameters")
    parser.add_argument("--device", choices=shapes.DEVICES, default=shapes.here(), help="of --model")
    args = parser.parse_args()
    found = {f"{k}_us": v for k, v in overheads(args.turns).items()}
    found |= measure(args.turns, args.repeats, args.model, args.device)
    if args.json:
        about = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}
        print(json.dumps(about | found))
        return
    names = {"a": "this engine", "b": "raw vLLM, a batch a turn", "c": "embedded engine", "d": "model.generate"}
    print(f"{N_EPISODES} episodes, {args.turns} turns, {torch.get_num_threads()} thread(s), tokens/s")
    for load in ("equal", "varied"):
        for name, text in names.items():
            if (key := f"{load}_{name}") in found:
                low, middle, high = (found.get(f"{load}_a_over_{name}{end}", 0.0) for end in ("_low", "", "_high"))
                tail = "" if name == "a" else f"   (a) is {middle:.2f} x this, quartiles {low:.2f} and {high:.2f}"
                print(f"  {load:7s} ({name}) {text:26s} {found[key]:7.0f}{tail}")
    print(f"outside the model: {found['front_us']:.0f} us a call in the engine's front, ", end="")
    print(f"{found['episode_us']:.0f} us a turn of a whole episode")


if __name__ == "__main__":
    sys.exit(main())
