"""Levels without a recipe of their own, learnt from the base with the settings of `recipes/base/learn.yaml`.

    OMP_NUM_THREADS=1 python benchmarks/levels.py                                # all that is left: hours of two cores
    python benchmarks/levels.py --levels OpenDoor --seeds 0                      # one level, one seed
    python benchmarks/levels.py --levels PutNextLocal --start runs/base/recall   # from another model
    python benchmarks/levels.py --page docs/proof.md                             # write the table into the page

A row is a level and a seed. It is appended to --rows once it is measured and is not measured again; a run that was
interrupted goes on. Levels differ in `environment` alone; the untrained base and the trained policy get the same unseen
tasks, `evaluation` of the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from pages import write_between
from proof import LEARN, N_TRAIN, base_digest, commit, trained, write

from rlhf.build.evaluate import evaluate
from rlhf.errors import RlhfError
from rlhf.recipe.evaluation_request import EvaluationRequest

#: Environment of each level; levels and parameters that the base's data have not.
LEVELS: Mapping[str, Mapping[str, Any]] = {
    **{
        name: {"kind": "babyai", "level": name, "n_train": N_TRAIN, "max_steps": 32}
        for name in ("OpenDoor", "GoToRedBall", "UnlockLocal", "PutNextLocal")
    },
    "coin-7-rooms": {
        "kind": "textworld_express",
        "game": "coin",
        "params": {"numLocations": 7, "includeDoors": 0, "numDistractorItems": 0},
        "max_steps": 32,
    },
}
MARKS = "<!-- levels: written by benchmarks/levels.py -->", "<!-- end of levels -->"
HEAD = "| level | start | demos | untrained | after SFT, by seed | after RL, by seed | above 80%, and by 20 points |\n"


@dataclass(frozen=True)
class Share:
    """Share of tasks solved, with its 95% interval."""

    success: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.success:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True)
class Row:
    """What one seed came to on one level.

    Attributes:
        n: tasks, the same of all three.
        untrained, imitated, learnt: shares of the base, and of the policy after imitation and after reinforcement.
        seconds: of the run with its two evaluations.
        base: first digits of the SHA-256 of the weights it starts from.
        start: name of the folder with these.
        n_demonstrations: that SFT imitated.
    """

    level: str
    seed: int
    n: int
    untrained: Share
    imitated: Share
    learnt: Share
    seconds: float
    commit: str
    base: str
    at: str
    start: str = "base"
    n_demonstrations: int = 4096

    @property
    def reached(self) -> bool:
        """Above 80%, and by 20 points above the untrained base."""
        return self.learnt.success > 0.8 and self.learnt.success - self.untrained.success >= 0.2


def measured(level: str, seed: int, start: str, learn: Mapping[str, Any], out: Path, rows: Path) -> Row:
    """Train from the model of a folder, by the keys of the recipe `learn`, and return the row.

    Raises:
        CalledProcessError: training failed; its output lies beside the run.
        RlhfError: the untrained base could not be evaluated.
    """
    digest, n_demonstrations = base_digest(start), learn["stages"][0]["n_demonstrations"]
    run = (out / f"{level}-{n_demonstrations}-seed{seed}-{digest}").resolve()
    recipe = run.with_suffix(".yaml")
    path = start if start == "base" else str(Path(start).resolve())
    own = {"environment": dict(LEVELS[level]), "seed": seed, "policy": {**learn["policy"], "path": path}}
    keys = {**learn, **own}
    recipe.write_text(yaml.safe_dump(keys, sort_keys=False))
    there = [row.untrained for row in read(rows) if (row.level, row.base) == (level, digest)]
    untrained = there[0] if there else untrained_share(recipe, keys["evaluation"]["n_tasks"])
    begun = time.monotonic()
    trained(recipe, run)
    result = json.loads((run / "result.json").read_text("utf-8"))
    return Row(
        level=level,
        seed=seed,
        n=result["after"]["n"],
        untrained=untrained,
        imitated=share_of(result["before"], "success"),
        learnt=share_of(result["after"], "success"),
        seconds=round(time.monotonic() - begun, 1),
        commit=commit(rows),
        base=digest,
        at=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        start=Path(start).name,
        n_demonstrations=n_demonstrations,
    )


def untrained_share(recipe: Path, n: int) -> Share:
    """What the base solves of `n` tasks, those that its run is evaluated on."""
    found = evaluate(EvaluationRequest(target=str(recipe), n=n), out=recipe.with_name(f"{recipe.stem}-untrained"))
    return share_of(found["success"], "value")


def share_of(figures: Mapping[str, Any], mean: str) -> Share:
    """Share and interval of an evaluation, whose mean has this name."""
    return Share(*(round(figures[name], 4) for name in (mean, "low", "high")))


def read(path: Path) -> list[Row]:
    """Rows that are measured, oldest first."""
    if not path.is_file():
        return []
    lines = json.loads(path.read_text("utf-8"))
    shares = ("untrained", "imitated", "learnt")
    return [Row(**{**row, **{name: Share(**row[name]) for name in shares}}) for row in lines]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, a line for each level."""
    lines = []
    for asked in dict.fromkeys(map(_setting, rows)):
        found = sorted((row for row in rows if _setting(row) == asked), key=lambda row: row.seed)
        first = found[0]
        verdict = f"{sum(row.reached for row in found)} of {len(found)} seeds"
        imitated, learnt = (", ".join(str(getattr(row, name)) for row in found) for name in ("imitated", "learnt"))
        start = f"{first.level} | {first.start} | {first.n_demonstrations:,} | {first.untrained}"
        lines.append(f"| {start} | {imitated} | {learnt} | {verdict} |\n")
    return f"{HEAD}|---|---|---:|---|---|---|---|\n{''.join(lines)}"


def _setting(row: Row) -> tuple[str, str, int]:
    """What the seeds of a line of the table have in common."""
    return row.level, row.base, row.n_demonstrations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--start", default="base", help="folder of the model that is trained")
    parser.add_argument("--out", type=Path, default=Path("runs") / "levels")
    parser.add_argument("--rows", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "levels.json")
    parser.add_argument("--page", type=Path, help=f"write the table after the line {MARKS[0]} of this page")
    asked = parser.parse_args()
    if asked.page is not None:
        write_between(asked.page, MARKS, table(read(asked.rows)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked.out.mkdir(parents=True, exist_ok=True)
    learn = yaml.safe_load(LEARN.read_text("utf-8"))
    settings = (base_digest(asked.start), learn["stages"][0]["n_demonstrations"])
    there = {(row.level, row.seed) for row in read(asked.rows) if _setting(row)[1:] == settings}
    for seed, level in product(asked.seeds, asked.levels):
        if (level, seed) in there:
            continue
        print(level, seed, flush=True)
        try:
            row = measured(level, seed, asked.start, learn, asked.out, asked.rows)
        except (RlhfError, subprocess.CalledProcessError) as error:
            print(f"{level} {seed}: {error}", file=sys.stderr, flush=True)
            continue
        write(asked.rows, [*read(asked.rows), row])
        print(f"  {row.untrained} untrained, {row.imitated}, {row.learnt}, {row.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
