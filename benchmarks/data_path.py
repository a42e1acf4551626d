"""Memory and time of the path from finished rollouts to the first micro-batch, and of a step whose scoring is slow.

    OMP_NUM_THREADS=1 python benchmarks/data_path.py HEAD~1                # a revision, against the tree of this file
    python benchmarks/data_path.py main ../other --repeats 5 --json
    python benchmarks/data_path.py main --only path --trajectories 256

Both trees are measured in the same run, each in child processes of its own that take turns, and the ratios to the base
are printed.

`path`: 1,024 trajectories of 50 turns, whose prompts grow by prefix, are played through the episode loop, the chat
agent and the renderer of the tree, with an engine that answers at once; a turn is some 25 tokens read and 25 sampled.
Measured is what follows: credit (GRPO), rows, packing, the first micro-batch. Seconds are those of the processor,
medians over the repeats. Memory is the peak of what Python and NumPy hold, by tracemalloc, the finished trajectories
included: it is the same in every run, and free of what the allocator keeps and of what loading the libraries took. It
is measured in a child of its own, because tracing slows everything down. Both are given per million tokens of the rows
that are trained on.

`step`: 16 tasks of 2 attempts are collected with an engine and a reward that only wait, and that need as long for all
tasks: wall clock of the collection.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frozen import ROOT, tree_of

GROUP, SAMPLED, WORDS, BUDGET = 8, 24, 24, 16384
N_TASKS, N_ATTEMPTS, N_TURNS, WAIT_S = 16, 2, 2, 0.5


def part(*names: str) -> Any:
    """The first of these, each `module:name`, that the tree of this process has."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return vars(importlib.import_module(module))[attribute]
        except ModuleNotFoundError:
            continue
    sys.exit(f"data_path: this tree has none of {', '.join(names)}")


# --- what is played --------------------------------------------------------------------------------------------------


class Walk:
    """An episode whose observations are words of its own."""

    def __init__(self, number: int, n_turns: int) -> None:
        import numpy as np

        self.words = np.random.default_rng(number).integers(0, 200, (n_turns + 1, WORDS)).tolist()
        self.k = 0
        self.opening = self._said(False)

    def _said(self, is_over: bool) -> Any:
        from environments.base import StepResult

        text = " ".join(f"w{i}" for i in self.words[self.k])
        return StepResult(text, terminated=is_over, success=True if is_over else None)

    async def step(self, action: str) -> Any:
        self.k += 1
        return self._said(self.k + 1 == len(self.words))

    async def close(self) -> None:
        return None


class Walks:
    """Episodes of so many turns, each told another story."""

    def __init__(self, n_turns: int) -> None:
        from environments.base import Properties

        self.n_turns, self.n_begun = n_turns, 0
        self.properties = Properties(deterministic=True, thread_safe=True, inline=True)

    def start(self, task: Any) -> Walk:
        self.n_begun += 1
        return Walk(self.n_begun, self.n_turns)


class Answers:
    """An engine that says random ids, with log-probs as a model's are, after `wait_s`."""

    policy_version, shares_policy, max_context = 0, False, 10**6

    def __init__(self, wait_s: float = 0.0) -> None:
        import numpy as np

        self.rng, self.wait_s = np.random.default_rng(0), wait_s

    async def generate(self, prompt: Any, params: Any, session: str = "") -> Any:
        import numpy as np

        from rlhf.data import Finish, Generation

        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        ids = (*self.rng.integers(300, 400, SAMPLED - 1).tolist(), prompt.stop_ids[0])
        logprobs = (-self.rng.exponential(1.0, SAMPLED)).astype(np.float32).tolist()
        return Generation(prompt, ids, tuple(logprobs), Finish.STOP, 0)

    async def release(self, session: str) -> None:
        return None


def tools(n_turns: int) -> tuple[Any, Any, Any]:
    """Agent, renderer and limits."""
    from agents.chat import ChatAgent

    words = " ".join(f"w{i}" for i in range(200))
    train = part("rlhf.training.policy.tokenizer:train_tokenizer", "rlhf.trainers.tokenizer:train_tokenizer")
    renderer = part("rlhf.rollout.renderer:Renderer")
    limits = part("rlhf.rollout.limits:Limits")
    tokenizer = train([words] * 4, vocab_size=512, max_context=10**6)
    return ChatAgent(format="text"), renderer(tokenizer), limits(max_turns=n_turns + 1, max_tokens=SAMPLED)


# --- from finished rollouts to the first micro-batch -----------------------------------------------------------------


def finished(n_trajectories: int, n_turns: int) -> list[Any]:
    """The scored groups of a step."""
    groups: list[Any] = []
    asyncio.run(_play(groups, n_trajectories, n_turns))  # which writes out what a task returns, so it returns nothing
    return groups


async def _play(groups: list[Any], n_trajectories: int, n_turns: int) -> None:
    from rlhf.data import SamplingParams, Score, ScoredGroup, Task, Verdict

    run_episode = part("rlhf.rollout.episode:run_episode")
    agent, renderer, limits = tools(n_turns)
    shared = (Walks(n_turns), agent, Answers(), renderer, limits, SamplingParams())
    for number in range(n_trajectories // GROUP):
        task = Task(f"walk/{number}")
        played = [
            await run_episode(task, *shared, attempt=i, seed=number, session=f"{number}/{i}") for i in range(GROUP)
        ]
        wrong = [t.detail for t in played if len(t.turns) != n_turns]
        assert not wrong, wrong[0]
        rewards = [((number + i) % 3) / 3 for i in range(GROUP)]
        scores = [Score({"r": Verdict(r)}, (0.0,) * (n_turns - 1) + (r,), r) for r in rewards]
        groups.append(ScoredGroup(task.id, tuple(played), tuple(scores)))


def first_micro_batch(groups: Sequence[Any]) -> float:
    """Go the path once; tokens of all rows."""
    credit_of = part("rlhf.credit.estimator:credit_of")
    make_samples = part("rlhf.batching.samples:make_samples")
    pack = part("rlhf.batching.pack:pack_minibatches")
    reduction = part("rlhf.losses.reduction:Reduction")
    samples, counters = make_samples(groups, credit_of(part("rlhf.credit.grpo:GRPO")(), groups))
    batches = next(iter(pack(samples, 1, reduction(), max_tokens=BUDGET)))
    assert 0 < len(batches[0].token_ids) <= BUDGET
    return float(counters["batch/n_tokens"])


def path(args: argparse.Namespace) -> dict[str, float]:
    """Figures of the path in the tree of this process."""
    first_micro_batch(finished(GROUP, 2))  # loads, and remembers, what is needed once
    if args.child == "memory":
        tracemalloc.start()
        groups = finished(args.trajectories, args.turns)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        n_tokens = first_micro_batch(groups)
        peak = tracemalloc.get_traced_memory()[1]
        return {"peak_bytes": peak * 1e6 / n_tokens, "held_bytes": held * 1e6 / n_tokens, "n_tokens": n_tokens}
    groups, found, n_tokens = finished(args.trajectories, args.turns), [], 0.0
    for _ in range(args.repeats):
        begun = time.process_time()
        n_tokens = first_micro_batch(groups)
        found.append(time.process_time() - begun)
    return {"seconds": statistics.median(found) * 1e6 / n_tokens}


# --- a step whose scoring takes as long as its rollouts --------------------------------------------------------------


class Waits:
    """A reward that asks somebody who takes a while."""

    wait_s = WAIT_S

    async def __call__(self, task: Any, trajectory: Any) -> float:
        await asyncio.sleep(self.wait_s)
        return float(trajectory.attempt)


async def collected() -> float:
    """Seconds of one collection."""
    from rlhf.data import SamplingParams, Task

    collector = part("rlhf.rollout.runner:RolloutRunner", "rlhf.rollout.collect:Collector")
    weighted = part("rlhf.rollout.scoring:Weighted", "rlhf.rollout.score:Weighted")
    agent, renderer, _ = tools(N_TURNS)
    n_at_once = 2 * N_ATTEMPTS
    # The attempts of two tasks at a time, so that all rollouts take as long as all scores.
    engine = Answers(2 * WAIT_S / N_TURNS)
    limits = part("rlhf.rollout.limits:Limits")(max_turns=N_TURNS + 1, max_tokens=SAMPLED, max_concurrent=n_at_once)
    made = collector(Walks(N_TURNS), agent, {"r": weighted("r", 1.0, Waits())}, engine, renderer, limits, seed=0)
    tasks = [Task(f"walk/{i}") for i in range(N_TASKS)]
    begun = time.perf_counter()
    found = await made.collect(tasks, group_size=N_ATTEMPTS, sampling=SamplingParams(), step=0)
    seconds = time.perf_counter() - begun
    assert [g.task_id for g in found.groups] == [t.id for t in tasks]
    return seconds


def step(args: argparse.Namespace) -> dict[str, float]:
    """Figures of the collection in the tree of this process."""
    asyncio.run(collected())
    return {"step_s": statistics.median(asyncio.run(collected()) for _ in range(args.repeats))}


# --- both trees ------------------------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> None:
    """Measure in this process, whose packages have to be those of the tree."""
    tree = Path(args.base).resolve()
    for name in ("rlhf", "environments", "agents"):
        found = Path(str(importlib.import_module(name).__file__)).resolve()
        if tree not in found.parents:
            sys.exit(f"data_path: {name} comes from {found}, and not from {tree}")
    print(json.dumps(step(args) if args.child == "step" else path(args)))


def measured(tree: Path, what: str, args: argparse.Namespace) -> dict[str, float]:
    """Measurements of a tree by a child process."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("trajectories", "turns", "repeats")]
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--child", what, *sizes]
    kept = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"data_path: {what} in {tree} failed:\n{done.stderr[-2000:]}")
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def compared(trees: Sequence[Path], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every figure of the base and of the other tree, and the ratio of the two."""
    wanted = {"path": ["memory", "time"], "step": ["step"], "all": ["memory", "time", "step"]}[args.only]
    found: dict[str, tuple[list[float], list[float]]] = {}
    for what in wanted:
        for _ in range(1 if what == "memory" else args.rounds):
            for number, tree in enumerate(trees):
                for name, value in measured(tree, what, args).items():
                    found.setdefault(name, ([], []))[number].append(value)
    medians = {name: [statistics.median(values) for values in both] for name, both in found.items()}
    return {name: {"base": old, "head": new, "ratio": new / old} for name, (old, new) in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a revision, or the folder of a tree")
    parser.add_argument("head", nargs="?", default=str(ROOT), help="the tree that is compared with it")
    parser.add_argument("--only", choices=("all", "path", "step"), default="all")
    parser.add_argument("--trajectories", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3, help="in each child")
    parser.add_argument("--rounds", type=int, default=2, help="children of each tree")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("memory", "time", "step"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    if args.base is None:
        print(f"data_path: nothing to compare {ROOT.name} with; name a revision: python benchmarks/data_path.py HEAD~1")
        return
    with tree_of(args.base) as base, tree_of(args.head) as head:
        found = compared([base, head], args)
    if args.json:
        print(json.dumps(found))
        return
    texts = {
        "peak_bytes": "peak memory, MB per million tokens",
        "held_bytes": "of these, finished trajectories, MB",
        "seconds": "seconds per million tokens",
        "step_s": "a step with slow scoring, seconds",
    }
    print(f"{args.trajectories:,} trajectories of {args.turns} turns; load {os.getloadavg()[0]:.1f}\n")
    print(f"{'':<36}{'base':>10}{'head':>10}{'ratio':>8}")
    for name, text in texts.items():
        if name in found:
            old, new, ratio = found[name].values()
            scale = 1e-6 if name.endswith("bytes") else 1.0
            print(f"{text:<36}{old * scale:>10.2f}{new * scale:>10.2f}{ratio:>8.3f}")


if __name__ == "__main__":
    main()
