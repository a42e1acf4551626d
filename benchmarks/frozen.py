"""Comparison of two trees: ten training steps of six recipes in each, equal to the bit.

    python benchmarks/frozen.py HEAD~1                      # a revision, and the tree that this file is in
    python benchmarks/frozen.py main ../other --only quickstart gotoobj-ppo
    python benchmarks/frozen.py main --tolerance 1e-6 --renamed rollout/return_mean=rollout/score_mean

For a change of the code that must not change what it computes. Both trees run on this machine, on the CPU, with one
thread and this interpreter; a recipe that one of them lacks is taken from the other. Compared are

- all metrics of all lines but times, memory and tokens per second;
- the tokens that were sampled, of every attempt that is stored, which are never off by a little;
- the weights of every checkpoint and reward model that is kept.

For each recipe, half a minute in each tree on an idle core, it prints what differs first. With `--tolerance T` two
numbers are equal where they are at most T apart, relative to the larger one, or T² in absolute terms; of a
weight, relative to the largest of its tensor. The exit code is 1 where something differs or a run fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import pyarrow.parquet as pq
from safetensors import safe_open

from rlhf.sinks import read_metrics

ROOT = Path(__file__).resolve().parent.parent
#: Metrics that say how long something took, or how much memory.
TIMED = re.compile(r"(time|memory)/|.*_per_s$")
#: What a child runs: the command line of its tree, and of no other that is installed.
CHILD = """
import importlib, pathlib, sys
tree = pathlib.Path(sys.argv[1])
for name in ("rlhf", "environments", "rewards", "agents"):
    found = str(importlib.import_module(name).__file__) if (tree / name).is_dir() else str(tree / name)
    if tree not in pathlib.Path(found).resolve().parents:
        sys.exit(f"{name} comes from {found}, and not from {tree}")
from rlhf.cli import main
sys.argv = ["rlhf", *sys.argv[2:]]
main()
"""


@dataclass(frozen=True)
class Training:
    """A recipe, made small.

    Attributes:
        recipe: its name.
        overrides: `$STEPS` are the steps of a stage, `$DEMONSTRATIONS` is three times as many batches of four, and
            `$BEFORE` is the folder of the training before it.
        n_processes: that share every step.
    """

    recipe: str
    overrides: tuple[str, ...]
    n_processes: int = 1


_SHORT = ("environment.max_steps=6", "limits.max_turns=6")
#: Weak, and no longer as it was made, so that attempts at a task come to different scores.
_START = (
    *("stages.0.n_demonstrations=$DEMONSTRATIONS", "stages.0.epochs=1", "stages.0.batch_size=4"),
    *("stages.0.optimizer.lr=5.0e-3", "stages.0.optimizer.warmup_steps=5"),
)
_INVALID = "rewards.invalid={kind: invalid_action, penalty: 0.1}"
#: Tells two attempts apart whose every action is invalid.
_REPEATED = "rewards.repetition={kind: repetition, n: 1}"
_ATTEMPTS = "stages.1.rejection_sampling={rounds: 2, tasks_per_round: 10, group_size: 4, keep: best}"


def _stage(number: int, **values: int | str) -> tuple[str, ...]:
    return tuple(f"stages.{number}.{name}={value}" for name, value in values.items())


def _policy_gradient(number: int, tasks_per_step: int = 4) -> tuple[str, ...]:
    return _stage(number, steps="$STEPS", tasks_per_step=tasks_per_step, group_size=4)


def _pairs(number: int) -> tuple[str, ...]:
    return (*_stage(number, epochs=1, batch_size=4), *_stage(number, **{"pairs.tasks": 12, "pairs.group_size": 4}))


_LADDER = (_ATTEMPTS, *_stage(1, epochs=1, batch_size=4), *_pairs(2), *_policy_gradient(3))
_LEFT = (
    "policy.path=$BEFORE/checkpoints/1-reward_model-000000/policy",
    "rewards.learned.path=$BEFORE/reward_model/1-reward_model",
)

#: Those of one name are trained one after the other.
RECIPES: Mapping[str, tuple[Training, ...]] = {
    "quickstart": (Training("quickstart", (*_SHORT, *_START, *_policy_gradient(1))),),
    "gotoobj-ppo": (Training("gotoobj-ppo", (*_SHORT, *_START, *_policy_gradient(1))),),
    "cookingworld-planner": (
        Training("cookingworld-planner", (*_SHORT, *_START, _REPEATED, *_policy_gradient(1, tasks_per_step=2))),
    ),
    "keyhole-ladder": (Training("keyhole-ladder", (*_SHORT, *_START, _INVALID, *_LADDER)),),
    "keyhole-learned-reward": (
        Training("keyhole-reward-model", (*_SHORT, *_START, _INVALID, *_pairs(1))),
        Training("keyhole-learned-reward", (*_SHORT, *_LEFT, *_policy_gradient(0))),
    ),
    "smoke-cpu": (Training("deepspeed/smoke-cpu", (*_START, _REPEATED, "stages.1.steps=$STEPS"), n_processes=2),),
}


@dataclass(frozen=True)
class Made:
    """Results of a recipe in a tree.

    Attributes:
        folders: of its runs, in order.
        duration_s: how long they took.
        failure: the end of what the run said that failed; empty where none did.
    """

    folders: tuple[Path, ...]
    duration_s: float
    failure: str = ""


# --- training --------------------------------------------------------------------------------------------------------


@contextmanager
def tree_of(given: str) -> Iterator[Path]:
    """Give the folder that `given` names, or a checkout of the revision, which is removed afterwards."""
    if (Path(given) / "rlhf").is_dir():
        yield Path(given).resolve()
        return
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        tree = Path(folder).resolve() / "tree"
        done = subprocess.run([*git, "worktree", "add", "--detach", str(tree), given], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"frozen: {given} is neither a folder with rlhf/ in it nor a revision: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def recipe_of(name: str, trees: Sequence[Path]) -> Path:
    """Return the file of a recipe in the first of `trees` that has it."""
    for tree in trees:
        found = sorted((tree / "recipes").rglob(f"{Path(name).name}.yaml"))
        found = [path for path in found if path.with_suffix("").as_posix().endswith(f"/{name}")]
        if found:
            return found[0]
    sys.exit(f"frozen: no recipe {name} in {' or '.join(map(str, trees))}")


def command(training: Training, recipe: Path, tree: Path, folder: Path, before: Path | None, steps: int) -> list[str]:
    """Return the arguments of the interpreter that trains in `tree`, into `folder`."""
    values = {"STEPS": str(steps), "DEMONSTRATIONS": str(12 * steps), "BEFORE": str(before)}
    overrides = [Template(text).safe_substitute(values) for text in training.overrides]
    shared = ["--out", str(folder), "--nproc", str(training.n_processes), "--no-memory-check", "--json"]
    return ["-c", CHILD, str(tree), "train", str(recipe), "evaluation.n_tasks=4", *overrides, *shared]


def train(name: str, trees: Sequence[Path], out: Path, steps: int) -> Made:
    """Train a recipe in the first of `trees`, into folders under `out`."""
    tree, folders = trees[0], []
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    begin = time.monotonic()
    for number, training in enumerate(RECIPES[name]):
        before, folder = (folders[-1] if folders else None), out / f"{number}-{Path(training.recipe).name}"
        out.mkdir(parents=True, exist_ok=True)
        arguments = command(training, recipe_of(training.recipe, trees), tree, folder, before, steps)
        environment = kept | one | {"PYTHONPATH": str(tree)}
        done = subprocess.run([sys.executable, *arguments], cwd=out, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            return Made((), time.monotonic() - begin, "\n".join(said[-12:]) or f"exit code {done.returncode}")
        folders.append(folder)
    return Made(tuple(folders), time.monotonic() - begin)


# --- what a run left -------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Return those of a run, in the order of stages and steps, which their names begin and end with."""

    def place(path: Path) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"^\d+|\d+$", path.name))

    return sorted((path for path in (folder / "checkpoints").iterdir() if path.is_dir()), key=place)


def metrics_of(folder: Path) -> list[tuple[str, dict[str, float | None]]]:
    """Return the place and the values of each logged line, but for times; metrics under their present names."""
    return [
        (f"{line.stage}, step {line.step}", {k: v for k, v in line.values.items() if not TIMED.match(k)})
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def tokens_of(folder: Path) -> dict[tuple[Any, ...], list[list[int]]]:
    """Return the sampled tokens of each generation, by file, task and attempt."""
    found: dict[tuple[Any, ...], list[list[int]]] = {}
    for path in sorted((folder / "trajectories").glob("*.parquet")):
        table = pq.read_table(path, columns=["task_id", "attempt", "generations"])
        seen: Counter[tuple[Any, ...]] = Counter()
        for row in table.to_pylist():
            key = (path.stem, row["task_id"], row["attempt"])
            found[*key, seen[key]] = [generation["token_ids"] for generation in row["generations"] or ()]
            seen[key] += 1
    return found


def weights_of(folder: Path) -> list[Path]:
    """Return the files of weights of a run, relative to it: those of its checkpoints in order, then of other models."""
    found = [file for path in checkpoints(folder) for file in sorted(path.rglob("*.safetensors"))]
    rest = sorted(set(folder.rglob("*.safetensors")) - set(found))
    return [file.relative_to(folder) for file in [*found, *rest]]


def digest(file: Path) -> str:
    """Return a digest of names, shapes, types and values of the tensors of a file."""
    content = file.read_bytes()
    n_head = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + n_head])
    head.pop("__metadata__", None)
    said = hashlib.sha256()
    for name, of in sorted(head.items()):
        begin, end = (8 + n_head + at for at in of["data_offsets"])
        said.update(json.dumps([name, of["dtype"], of["shape"]]).encode() + content[begin:end])
    return said.hexdigest()


# --- comparing -------------------------------------------------------------------------------------------------------


def is_equal(a: float | None, b: float | None, tolerance: float) -> bool:
    """True if two values are equal; None is a value that was not finite."""
    if a is None or b is None or not tolerance:
        return a == b
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance**2)


def apart(a: float | None, b: float | None) -> str:
    """Distance of two values."""
    if a is None or b is None:
        return f"{a} and {b}"
    off = abs(a - b) / max(abs(a), abs(b))
    return f"{a!r} and {b!r}, {abs(a - b):.3g} apart, {off:.2g} of the larger"


def of_metrics(base: Path, head: Path, renamed: Mapping[str, str | None], tolerance: float) -> tuple[int, str]:
    """Return how many numbers were compared, and the first that differs; what is renamed to None is new in `head`."""
    lines = metrics_of(base), metrics_of(head)
    n = 0
    for (place, old), (other, new) in zip(*lines, strict=False):
        if place != other:
            return n, f"a line of {place} has become one of {other}"
        old = {renamed.get(name) or name: value for name, value in old.items()}
        new = {name: value for name, value in new.items() if renamed.get(name, name) is not None}
        for name in [*old, *(name for name in new if name not in old)]:
            if name not in new or name not in old:
                return n, f"{place}: {name} is in {'base' if name in old else 'head'} only"
            n += 1
            if not is_equal(old[name], new[name], tolerance):
                return n, f"{place}: {name} is {apart(old[name], new[name])}"
    if len(lines[0]) != len(lines[1]) or not lines[0]:
        return n, f"{len(lines[0])} and {len(lines[1])} lines were logged"
    return n, ""


def of_tokens(base: Path, head: Path) -> tuple[int, str]:
    """Return how many sampled tokens were compared, and the first attempt that differs."""
    old, new = tokens_of(base), tokens_of(head)
    n = 0
    for key in [*old, *(key for key in new if key not in old)]:
        file, task, attempt, _ = key
        where = f"{file}, task {task}, attempt {attempt}"
        if key not in new or key not in old:
            return n, f"{where} is in {'base' if key in old else 'head'} only"
        for number, (a, b) in enumerate(zip(old[key], new[key], strict=False)):
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                return n, f"{where}: generation {number} differs from token {at} on"
            n += len(a)
        if len(old[key]) != len(new[key]):
            return n, f"{where}: {len(old[key])} and {len(new[key])} generations"
    return n, ""


def of_weights(base: Path, head: Path, tolerance: float) -> tuple[int, str]:
    """Return how many files of weights were compared, and the first that differs."""
    old, new = weights_of(base), weights_of(head)
    if old != new or not old:
        return 0, f"files of weights: {sorted(map(str, {*old} ^ {*new})) or 'none'} in one tree only"
    for n, file in enumerate(old):
        if digest(base / file) == digest(head / file):
            continue
        if said := _of_tensors(base / file, head / file, tolerance):
            return n, f"{file}: {said}"
    return len(old), ""


def _of_tensors(base: Path, head: Path, tolerance: float) -> str:
    with safe_open(base, "pt") as old, safe_open(head, "pt") as new:
        if sorted(old.keys()) != sorted(new.keys()):
            return f"tensors {sorted({*old.keys()} ^ {*new.keys()})} are in one tree only"
        for name in sorted(old.keys()):
            a, b = old.get_tensor(name), new.get_tensor(name)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"{name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
            off, largest = (a.double() - b.double()).abs().max().item(), a.double().abs().max().item()
            if not off <= tolerance * largest:
                return f"{name} is {off:.3g} apart, of {largest:.3g} at most"
    return ""


def compared(base: Made, head: Made, renamed: Mapping[str, str | None], tolerance: float) -> tuple[str, list[str]]:
    """Return what was compared, and what differs first of metrics, tokens and weights."""
    failed = [f"failed in {name}:\n{made.failure}" for name, made in (("base", base), ("head", head)) if made.failure]
    if failed:
        return "nothing", failed
    counts, differing = [0, 0, 0], []
    for old, new in zip(base.folders, head.folders, strict=True):
        found = of_metrics(old, new, renamed, tolerance), of_tokens(old, new), of_weights(old, new, tolerance)
        counts = [n + m for n, (m, _) in zip(counts, found, strict=True)]
        differing += [f"{old.name}, {said}" for _, said in found if said]
    return "{:,} numbers, {:,} tokens, {} files of weights".format(*counts), differing


def main() -> None:
    """Print a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a revision, or a folder")
    parser.add_argument("head", nargs="?", default=str(ROOT), help="the same; this tree if left out")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=10, help="of each stage")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative; 0 is to the bit")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="metrics that are called otherwise")
    parser.add_argument("--added", nargs="+", default=[], metavar="NAME", help="metrics that the second tree alone has")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="an empty folder that the runs stay in; a temporary one if left out")
    given = parser.parse_args()
    if given.base is None:
        print(f"frozen: nothing to compare {ROOT.name} with; name a revision: python benchmarks/frozen.py HEAD~1")
        return
    renamed = dict.fromkeys(given.added) | dict(pair.split("=", 1) for pair in given.renamed)
    n_differing = 0
    with tree_of(given.base) as base, tree_of(given.head) as head, tempfile.TemporaryDirectory() as temporary:
        out = (given.out or Path(temporary)).resolve()
        places = {"base": (base, head), "head": (head, base)}
        with ThreadPoolExecutor(given.jobs) as pool:
            jobs = [
                [pool.submit(train, n, trees, out / n / p, given.steps) for p, trees in places.items()]
                for n in given.only
            ]
            for name, pair in zip(given.only, jobs, strict=True):
                old, new = (job.result() for job in pair)
                what, differing = compared(old, new, renamed, given.tolerance)
                n_differing += bool(differing)
                took = f"base {old.duration_s:.0f} s, head {new.duration_s:.0f} s"
                print(f"{name}: {'differs' if differing else 'equal'}; {what}; {took}", flush=True)
                for said in differing:
                    print("  " + said.replace("\n", "\n    "), flush=True)
    sys.exit(1 if n_differing else 0)


if __name__ == "__main__":
    main()
