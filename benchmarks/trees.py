"""Trees of attempts against independent ones: leaves for each sampled token, and success after the same tokens.

    python benchmarks/trees.py                          # one seed, in minutes
    python benchmarks/trees.py --seeds 0 1 2 --write    # the table of docs/strategies.md

Houses of 3 x 3 rooms of `environments/games/key_door.py`, as in `benchmarks/algorithms.py`: all runs of a seed start
from one
policy, which imitated spoilt demonstrations, and are stopped once they have sampled their budget of tokens. What
several attempts share was sampled once and counts once. Success is measured on fixed tasks that no run trains on. Every
run leaves a file under `--out` and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithms import POLICY_GRADIENT, begin, between, policy_of, recipe_of, until_spent
from credit import Curve, points, share

from rlhf.evaluation.statistics import mean_interval
from rlhf.sinks import read_metrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "strategies.md"
#: Sampled tokens of training that each run has.
BUDGET = 10_000
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


def run(label: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one arm with one seed until its budget is spent, unless that is done already."""
    folder = out / f"arm{list(ARMS).index(label)}-seed{seed}"
    result = folder.with_suffix(".json")
    if not result.is_file():
        stage = {**POLICY_GRADIENT, "evaluate_every": 2, **ARMS[label]}
        recipe = recipe_of("trees", seed, policy_of("start", seed, out), stage)
        found = until_spent(begin(recipe, folder), folder, read, lambda found: found["tokens"], BUDGET)
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


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
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
                lambda r: 1000 * Curve(r["tokens"], r["leaves"]).at([BUDGET])[0] / BUDGET,
                lambda r: r["replayed"],
                lambda r: r["curve"].area(BUDGET),
                lambda r: r["curve"].at([BUDGET])[0],
            )
        )
        pairs = zip(area, (r["curve"].area(BUDGET) for r in first), strict=True)
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
    parser.add_argument("--out", type=Path, default=Path("runs/trees"))
    parser.add_argument("--write", action="store_true", help="put the table into docs/strategies.md")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in ARMS}
    for seed in given.seeds:
        for label in ARMS:
            found[label].append(run(label, seed, given.out))
    written = table(found)
    print(written)
    if given.write:
        PAGE.write_text(between(PAGE.read_text("utf-8"), written))


if __name__ == "__main__":
    main()
