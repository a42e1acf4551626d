"""Speed and memory of a training step against bare PyTorch and against TRL's `GRPOTrainer`, measured in the same run.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py [--json] [--repeats 5] [--arms rlhf torch trl] [--vocabulary 4096]

The data: groups of made-up multi-turn trajectories, one row of random ids each, whose lengths spread as those of agents
do: a prompt for each group, a few to a dozen turns, replies and observations of log-normal lengths. The model is a
random Qwen3 of some 4 million parameters in float32. A step is everything from rows with advantages to new weights:

- `rlhf`: rows packed to the budget, the clipped loss, one update of `TorchTrainer`;
- `apart`: the same without computing the prompt of a group once for all of its rows;
- `whole`: as `apart`, with the logits of all policy tokens of a micro-batch at once, not in pieces;
- `torch`: the model, `cross_entropy` of the same policy tokens, `backward` and AdamW on the same packed rows, in a
  plain loop: nothing is padded, and no logits but those needed are computed;
- `trl`: `GRPOTrainer` with the same rows and rewards as its rollouts, padded its way, without a KL term, old log-probs,
  or recomputed activations. Its own time for tokenising, scoring and padding is not counted. It gets as many rows per
  pass as `--trl-rows` says; TRL must be installed (1.16 is what this was written for).

Each has a process of its own and they take turns, so that a busy neighbour slows all. Tokens are those of the rows,
padding left out. Peak memory is the most that was resident while stepping, above what was there after set-up.
Times on the wall and of the process are both compared, for the machine may be busy.
The norm of the first gradient is printed too: all but `torch` must agree, for they compute the same update.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

GROUP, MAX_LENGTH, LR, MARK = 8, 1024, 1e-5, "@@ "
#: Gradients are bounded to this norm, which none of them has: TRL tells it after that.
BOUND = 1e3
ARMS = ("rlhf", "apart", "whole", "torch", "trl")


def lengths(rng: np.random.Generator, median: float, spread: float, size: int) -> Any:
    return np.maximum(rng.lognormal(np.log(median), spread, size).astype(int), 4)


def make_rows(n_groups: int, vocabulary: int) -> list[dict[str, Any]]:
    """Rows of ids, the length of the prompt, which tokens were sampled, and the reward."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(n_groups):
        prompt = rng.integers(10, vocabulary, int(lengths(rng, 120, 0.5, 1)[0])).tolist()
        for attempt in range(GROUP):
            ids, mask, n_turns = list(prompt), [False] * len(prompt), int(min(2 + rng.geometric(0.22), 16))
            for reply, seen in zip(lengths(rng, 28, 0.7, n_turns), lengths(rng, 32, 0.8, n_turns), strict=True):
                ids += rng.integers(10, vocabulary, reply + seen).tolist()
                mask += [True] * int(reply) + [False] * int(seen)
            last = 1 + max(i for i, sampled in enumerate(mask[:MAX_LENGTH]) if sampled)
            reward = float(rng.random() < 0.4) + 0.01 * attempt
            rows.append({"ids": ids[:last], "n_prompt": len(prompt), "mask": mask[:last], "reward": reward})
            rows[-1]["group"] = group
    return rows


def advantages(rows: list[dict[str, Any]]) -> Any:
    """TRL's: the reward less the group's mean, over its standard deviation plus 1e-4."""
    rewards = np.array([row["reward"] for row in rows]).reshape(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdims=True)
    return (centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)).ravel()


def make_policy(vocabulary: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlhf.training.policy.model import FromScratch, Policy

    tokenizer = FromScratch(vocab_size=300).build(0, ["a few words"]).tokenizer
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Policy.of(Qwen3ForCausalLM(config), tokenizer, None)  # type: ignore[no-untyped-call]


class Clock:
    """Seconds since it was made: on the wall, and of this process's work."""

    def __init__(self) -> None:
        self._begun = np.array(self._now())

    def seconds(self) -> Any:
        return np.array(self._now()) - self._begun

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


# --- the ways to make a step: each sets up, then yields the seconds and the gradient's norm of step after step ---

Steps = Iterator[tuple[Any, float]]


def samples_of(rows: list[dict[str, Any]]) -> list[Any]:
    from rlhf.batching.samples import Sample

    samples = []
    for number, (row, advantage) in enumerate(zip(rows, advantages(rows), strict=True)):
        mask = np.array(row["mask"])
        nothing = np.zeros(len(mask), np.float32)
        given = np.where(mask, advantage, 0).astype(np.float32)
        samples.append(Sample(np.array(row["ids"], np.int64), mask, nothing, given, number, row["group"]))
    return samples


def scored(trainer: Any, samples: list[Any], budget: int) -> list[Any]:
    """The rows with the policy's own log-probs, as an engine that shares its weights would have reported them."""
    from dataclasses import replace

    found = []
    for sample, values in zip(
        samples, trainer.compute_logprobs(samples, temperature=1.0, max_tokens=budget), strict=True
    ):
        logprobs = np.zeros(len(sample), np.float32)
        logprobs[sample.mask] = values
        found.append(replace(sample, sampler_logprobs=logprobs))
    return found


def rlhf_steps(args: argparse.Namespace, rows: list[dict[str, Any]]) -> Steps:
    from rlhf.batching.pack import pack_minibatches
    from rlhf.losses.ppo_clip import PPOClip
    from rlhf.losses.reduction import Reduction
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.torch import TorchTrainer

    trainer = TorchTrainer(make_policy(args.vocabulary), AdamW(lr=LR, max_grad_norm=BOUND), total_updates=100)
    samples, rng = scored(trainer, samples_of(rows), args.budget), np.random.default_rng(0)

    def steps() -> Steps:
        while True:
            clock = Clock()
            [batches] = pack_minibatches(samples, 1, Reduction(), args.budget, rng)
            norm = trainer.update(batches, PPOClip())["optimizer/grad_norm"]
            yield clock.seconds(), norm

    return steps()


def torch_steps(args: argparse.Namespace, rows: list[dict[str, Any]]) -> Steps:
    import torch
    import torch.nn.functional as F

    from rlhf.batching.pack import collate, pack
    from rlhf.inference.embedded.attention import packed_forward

    model, samples = make_policy(args.vocabulary).model.train(), samples_of(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, foreach=True)
    packs = [[samples[i] for i in members] for members in pack(samples, args.budget)]
    batches = [collate(members, np.ones(len(members))) for members in packs]
    n_tokens = sum(s.n_policy_tokens for s in samples)

    def steps() -> Steps:
        while True:
            clock = Clock()
            optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                logits = packed_forward(model, batch.token_ids, batch.lengths.tolist(), batch.select)
                (F.cross_entropy(logits, batch.targets, reduction="sum") / n_tokens).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            optimizer.step()
            yield clock.seconds(), float(norm)

    return steps()


def trl_steps(args: argparse.Namespace, rows: list[dict[str, Any]], wait: Callable[[], None]) -> None:
    """TRL has a loop of its own: it waits before each step and reports after it."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import tempfile

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    firsts = rows[::GROUP]
    members = {f"task {row['group']}": rows[i * GROUP : (i + 1) * GROUP] for i, row in enumerate(firsts)}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        taken: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            chosen.append(members[prompt][taken.get(prompt, 0)])
            taken[prompt] = taken.get(prompt, 0) + 1
        completions = [row["ids"][row["n_prompt"] :] for row in chosen]
        return {
            "prompt_ids": [row["ids"][: row["n_prompt"]] for row in chosen],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
            "env_mask": [[int(m) for m in row["mask"][row["n_prompt"] :]] for row in chosen],
            "score": [row["reward"] for row in chosen],
        }

    def reward(score: list[float], **_: Any) -> list[float]:
        return score

    class Timed(GRPOTrainer):  # type: ignore[misc]
        apart = np.zeros(2)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            clock = Clock()
            found = super()._generate_and_score_completions(inputs)
            self.apart = clock.seconds()
            return found

    class Turns(TrainerCallback):
        norm = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait()
            self.clock = Clock()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gradients = (p.grad for p in trainer.model.parameters() if p.grad is not None)
            self.norm = sum(float(g.norm()) ** 2 for g in gradients) ** 0.5

        def on_step_end(self, *_: Any, **__: Any) -> None:
            report(self.clock.seconds() - trainer.apart, self.norm)

    policy = make_policy(args.vocabulary)
    policy.model.set_attn_implementation("sdpa")
    passes = len(rows) // args.trl_rows
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=args.trl_rows, gradient_accumulation_steps=passes,
            steps_per_generation=passes, num_generations=GROUP, max_completion_length=MAX_LENGTH, beta=0.0,
            loss_type="dapo", learning_rate=LR, adam_beta2=0.99, lr_scheduler_type="constant", max_grad_norm=BOUND,
            bf16=False, gradient_checkpointing=False, use_cpu=True, max_steps=args.repeats + 1, save_strategy="no",
            report_to="none", disable_tqdm=True, shuffle_dataset=False, logging_strategy="no",
        )  # fmt: skip
        trainer = Timed(
            model=policy.model,
            args=settings,
            processing_class=policy.tokenizer,
            reward_funcs=reward,
            rollout_func=rollout,
            train_dataset=Dataset.from_dict({"prompt": list(members)}),
            callbacks=[Turns()],
        )
        trainer.train()


# --- one process for each ---


def memory(field: str) -> float:
    """MB, of the resident memory of this process: `VmRSS` is now, `VmHWM` the most."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024 / 1e6


def report(seconds: Any, norm: float) -> None:
    wall, cpu = seconds.tolist()
    print(MARK + json.dumps({"s": wall, "cpu_s": cpu, "norm": norm, "peak": memory("VmHWM")}), flush=True)


def work(args: argparse.Namespace) -> None:
    """Make a step for every line that comes in."""
    import torch

    from rlhf.inference.embedded import attention
    from rlhf.training.backends import token_stats

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = make_rows(args.groups, min(args.vocabulary, 300))
    is_ready = False

    def wait() -> None:
        nonlocal is_ready
        if not is_ready:
            ctypes.CDLL(None).malloc_trim(0)  # what set-up has freed would be room for a step
            Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
            print(MARK + json.dumps({"before": memory("VmRSS")}), flush=True)
            is_ready = True
        if not sys.stdin.readline():
            raise SystemExit

    if args.work == "trl":
        trl_steps(args, rows, wait)
        return
    if args.work != "rlhf":
        attention.SHORTEST_SHARED = MAX_LENGTH + 1
    if args.work == "whole":
        token_stats._head = lambda model: None
    steps = torch_steps(args, rows) if args.work == "torch" else rlhf_steps(args, rows)
    while True:
        wait()
        report(*next(steps))


class Arm:
    """A process that steps when it is told to."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--work", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.before = self._heard()["before"]

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line.removeprefix(MARK))
                return found
        raise SystemExit("a process ended without an answer; see above")

    def close(self) -> None:
        self.process.communicate()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = make_rows(args.groups, min(args.vocabulary, 300))
    sizes = np.array([len(row["ids"]) for row in rows])
    arms = {name: Arm(name) for name in args.arms}
    norms = {name: arm.step()["norm"] for name, arm in arms.items()}  # the first one allocates
    load = [os.getloadavg()[0]]
    found = [{name: arm.step() for name, arm in arms.items()} for _ in range(args.repeats)]
    load.append(os.getloadavg()[0])
    for arm in arms.values():
        arm.close()
    others = [name for name in arms if name != "rlhf"] if "rlhf" in arms else []
    ratios = {
        kind: {name: [once[name][kind] / once["rlhf"][kind] for once in found] for name in others}
        for kind in ("s", "cpu_s")
    }
    return {
        "n_rows": len(rows),
        "n_tokens": int(sizes.sum()),
        "n_policy_tokens": sum(sum(row["mask"]) for row in rows),
        "lengths": [int(x) for x in np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1])],
        "tokens_per_s": {n: int(sizes.sum()) / statistics.median(once[n]["s"] for once in found) for n in arms},
        "peak_mb": {name: max(once[name]["peak"] for once in found) - arm.before for name, arm in arms.items()},
        "first_norm": norms,
        "speed_against": {
            kind: {name: statistics.median(values) for name, values in all_of.items()}
            for kind, all_of in ratios.items()
        },
        "quartiles": {
            kind: {name: np.quantile(values, [0.25, 0.75]).tolist() for name, values in all_of.items()}
            for kind, all_of in ratios.items()
        },
        "ratios": ratios,
        "load": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4, help=f"of {GROUP} rows each")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["rlhf", "apart", "torch", "trl"])
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--trl-rows", type=int, default=8, help="rows of a micro-batch of TRL")
    parser.add_argument("--work", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    if "trl" in args.arms and importlib.util.find_spec("trl") is None:
        print("TRL is not installed and left out; pip install trl", file=sys.stderr)
        args.arms.remove("trl")
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    least, low, middle, high, most = found["lengths"]
    before, after = found["load"]
    print(
        f"{found['n_rows']} rows of {least} to {most} tokens (quartiles {low}, {middle}, {high}), "
        f"{found['n_tokens']:,} in all, {found['n_policy_tokens']:,} trained on; load {before:.1f} to {after:.1f}\n"
    )
    print(f"{'':<8}{'tokens/s':>10}{'its time / rlhf':>17}{'CPU time':>10}{'peak memory':>13}{'first gradient':>16}")
    for name in args.arms:
        ratios = [f"{against[name]:.2f}" if name in against else "" for against in found["speed_against"].values()]
        line = f"{name:<8}{found['tokens_per_s'][name]:>10,.0f}{ratios[0]:>17}{ratios[1]:>10}"
        low, high = found["quartiles"]["s"].get(name, (0, 0))
        spread = f"   quartiles {low:.2f} and {high:.2f}" if high else ""
        print(f"{line}{found['peak_mb'][name]:>10,.0f} MB{found['first_norm'][name]:>16.6f}{spread}")


if __name__ == "__main__":
    main()
