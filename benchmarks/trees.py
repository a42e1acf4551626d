"""Trees of attempts against independent ones: leaves for each sampled token, and success after the same tokens.

    python benchmarks/trees.py                          # one seed, in minutes
    python benchmarks/trees.py --seeds 0 1 2 --write    # the table of docs/strategies.md
    python benchmarks/trees.py --task late --seeds 0 1 2    # where attempts are alike until their last turn
    python benchmarks/trees.py --task early --seeds 0 1 2   # and where their first turn decides

Houses of 3 x 3 rooms of `environments/games/key_door.py`, as in `benchmarks/algorithms.py`: all runs of a seed start
from one
policy, which imitated spoilt demonstrations, and are stopped once they have sampled their budget of tokens. What
several attempts share was sampled once and counts once. Success is measured on fixed tasks that no run trains on. Every
run leaves a file under `--out` and is not repeated. `late` and `early` are corridors of
`benchmarks/mechanism_worlds.py` whose start knows all turns but one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithms import MARKS, POLICY_GRADIENT, TASK, begin, policy_of, recipe_of, until_spent
from credit import Curve, points, share
from pages import write_between

from rlhf.evaluation.statistics import mean_interval
from rlhf.sinks import read_metrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "strategies.md"
#: Sampled tokens of training that each run has.
BUDGETS: Mapping[str, int] = {"keyhole": 10_000, "late": 20_000, "early": 20_000}
WORLDS = Path(__file__).resolve().with_name("mechanism_worlds.py")
#: Two trees of four attempts, or of eight: each attempt branches off in the first or in an earlier one.
_FOUR: Mapping[str, Any] = {"kind": "tree", "branches_per_round": 3}
_DEEP: Mapping[str, Any] = {"kind": "tree", "branches_per_round": 1, "continuations": 1, "rounds": 7}
#: Label -> what it changes in `POLICY_GRADIENT`. The first is what the others are compared with.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "independent, `grpo`": {"advantage": {"kind": "grpo"}},
    "2 trees of 4, `grpo`": {"rollout": _FOUR, "advantage": {"kind": "grpo"}},
    "2 trees of 4, `tree_grpo`": {"rollout": _FOUR, "advantage": {"kind": "tree_grpo"}},
    "2 trees of 4 by surprisal, `treerl`": {
        "rollout": {**_FOUR, "choose": "surprisal"},
        "advantage": {"kind": "treerl"},
    },
    "1 tree of 8, `tree_grpo`": {"rollout": _DEEP, "advantage": {"kind": "tree_grpo"}},
}
#: All branches of a tree leave where the policy was least sure.
_BY_SURPRISAL: Mapping[str, Any] = {
    "kind": "tree", "branches_per_round": 1, "continuations": 3, "choose": "surprisal",
}  # fmt: skip
#: The same in corridors.
CORRIDOR_ARMS: Mapping[str, Mapping[str, Any]] = {
    "independent, `grpo`": {"advantage": {"kind": "grpo"}},
    "2 trees of 4 at random, `tree_grpo`": {"rollout": _FOUR, "advantage": {"kind": "tree_grpo"}},
    "2 trees of 4 by surprisal, `tree_grpo`": {"rollout": _BY_SURPRISAL, "advantage": {"kind": "tree_grpo"}},
    "2 trees of 4 by surprisal, `treerl`": {"rollout": _BY_SURPRISAL, "advantage": {"kind": "treerl"}},
}
#: What a start imitates there: all turns but one, whose colour demonstrations draw.
SHOWN: Mapping[str, Any] = {
    "kind": "supervised", "n_demonstrations": 256, "epochs": 6, "batch_size": 8, "optimizer": {"lr": 3e-3},
}  # fmt: skip


def corridor(task: str, **keys: Any) -> Mapping[str, Any]:
    """Return the keys of a recipe that say what a corridor is."""
    return {
        **TASK,
        "environment": {"kind": f"{WORLDS}:Corridor", "asks": task, **keys},
        "rewards": {"success": {"kind": "outcome"}},
        "limits": {**TASK["limits"], "max_tokens": 4},
    }


def arms_of(task: str) -> Mapping[str, Mapping[str, Any]]:
    return ARMS if task == "keyhole" else CORRIDOR_ARMS


def run(task: str, label: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one arm with one seed until its budget is spent, unless that is done already."""
    folder = out / f"arm{list(arms_of(task)).index(label)}-seed{seed}"
    result = folder.with_suffix(".json")
    if not result.is_file():
        stage = {**POLICY_GRADIENT, "evaluate_every": 2, **arms_of(task)[label]}
        stage |= {} if task == "keyhole" else {"optimizer": {"lr": 1e-3}}
        if task == "keyhole":
            recipe = recipe_of("trees", seed, policy_of("start", seed, out), stage)
        else:
            start = policy_of("start", seed, out, world={**corridor(task, any_colour=True), "stages": [SHOWN]})
            recipe = recipe_of("trees", seed, start, stage, corridor(task))
        found = until_spent(begin(recipe, folder), folder, read, lambda found: found["tokens"], BUDGETS[task])
        result.write_text(json.dumps(found))
        shutil.rmtree(folder)
        print(f"{label}, seed {seed}: {found['leaves'][-1]:.0f} leaves", file=sys.stderr, flush=True)
    found = json.loads(result.read_text())
    return {**found, "curve": Curve(found["tokens"], found["success"])}


def read(folder: Path) -> dict[str, Any]:
    """Read what a run has measured so far: success and leaves by sampled tokens, and how much was replayed."""
    path = folder / "metrics.jsonl"
    tokens: list[float] = []
    success: list[float] = []
    leaves: list[float] = []
    total = {"n_tokens": 0.0, "n_episodes": 0.0, "n_replayed_turns": 0.0, "n_turns": 0.0}
    for line in read_metrics(path) if path.is_file() else ():
        values = {name: line.values.get(f"rollout/{name}") or 0.0 for name in (*total, "n_turns_mean")}
        values["n_turns"] = values["n_turns_mean"] * values["n_episodes"]
        total = {name: before + values[name] for name, before in total.items()}
        solved = line.values.get("eval/success")
        if solved is not None:
            tokens.append(total["n_tokens"])
            success.append(solved)
            leaves.append(total["n_episodes"])
    return {
        "tokens": tokens,
        "success": success,
        "leaves": leaves,
        "replayed": total["n_replayed_turns"] / max(total["n_turns"], 1.0),
    }


def table(found: Mapping[str, Sequence[Mapping[str, Any]]], budget: int) -> str:
    """Return the table in Markdown."""
    lines = [
        "| rollout, estimator | leaves per 1,000 tokens | turns replayed | mean success over the budget | less that of "
        "the first, in points | success after the budget |",
        "|---|---|---|---|---|---|",
    ]
    first = next(iter(found.values()))
    for label, runs in found.items():
        leaves, replayed, area, last = (
            [f(r) for r in runs]
            for f in (
                lambda r: 1000 * Curve(r["tokens"], r["leaves"]).at([budget])[0] / budget,
                lambda r: r["replayed"],
                lambda r: r["curve"].area(budget),
                lambda r: r["curve"].at([budget])[0],
            )
        )
        pairs = zip(area, (r["curve"].area(budget) for r in first), strict=True)
        more = "" if runs is first else points(mean_interval([a - b for a, b in pairs]))
        of_leaves = mean_interval(leaves)
        lines.append(
            f"| {label} | {of_leaves.value:.0f} ({of_leaves.low:.0f} to {of_leaves.high:.0f}) "
            f"| {sum(replayed) / len(replayed):.0%} | {share(mean_interval(area))} | {more} "
            f"| {share(mean_interval(last))} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run every arm with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--task", choices=["keyhole", "late", "early"], default="keyhole")
    parser.add_argument("--out", type=Path, help="runs/trees, or runs/trees-TASK")
    parser.add_argument("--write", action="store_true", help="put the table of keyhole into docs/strategies.md")
    given = parser.parse_args()
    out = given.out or Path("runs/trees" if given.task == "keyhole" else f"runs/trees-{given.task}")
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in arms_of(given.task)}
    for seed in given.seeds:
        for label, runs in found.items():
            runs.append(run(given.task, label, seed, out))
    written = table(found, BUDGETS[given.task])
    print(written)
    if given.write and given.task == "keyhole":
        write_between(PAGE, MARKS, f"{written}\n")


if __name__ == "__main__":
    main()
