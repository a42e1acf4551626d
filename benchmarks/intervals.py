"""Do intervals cover as often as they say, and do tests reject a true null as seldom? By simulation, known truth.

    python benchmarks/intervals.py                # 10,000 draws: about a minute on a quiet core
    python benchmarks/intervals.py --draws 1000

Each draw is an evaluation: tasks with their own chance of success, attempts at each. Tasks are alike (one chance for
all) or differ (chances from a Beta distribution with the same mean, a + b = 2). The functions that make the reports'
figures are the ones that are called here. With 10,000 draws the simulation itself is uncertain by 0.4 points.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass

import numpy as np

from rlhf.evaluation.paired import mcnemar, permutation
from rlhf.evaluation.passes import pass_all_k, pass_at_k, share_of_tasks
from rlhf.evaluation.statistics import bootstrap_interval, mean_interval, wilson_interval

CHANCES = (0.1, 0.3, 0.5, 0.8)
TASKS = (50, 200)
ATTEMPTS = (1, 2, 4, 8)
_SPREAD = 2.0


@dataclass(frozen=True)
class Cell:
    """One setting: `tasks` tasks, `attempts` at each, mean chance `p`, and whether tasks are alike."""

    tasks: int
    attempts: int
    p: float
    alike: bool

    def solved(self, draws: int, rng: np.random.Generator) -> np.ndarray:
        """`[draws, tasks]`: how many attempts at each task were solved."""
        a, b = self.p * _SPREAD, (1 - self.p) * _SPREAD
        chances = self.p if self.alike else rng.beta(a, b, size=(draws, self.tasks))
        return rng.binomial(self.attempts, chances, size=(draws, self.tasks))

    def truth(self, k: int, passes: str) -> float:
        """pass@k or pass^k of a task drawn from all tasks."""
        p = 1 - self.p if passes == "at" else self.p
        if self.alike:
            every = p**k
        else:  # E[q^k] of a Beta distribution
            a = p * _SPREAD
            every = math.prod((a + i) / (_SPREAD + i) for i in range(k))
        return 1 - every if passes == "at" else every


def coverage(cell: Cell, k: int, passes: str, draws: int, rng: np.random.Generator) -> float:
    """Share of the draws whose interval for pass@k or pass^k holds the truth; k = 1 is success."""
    share = pass_at_k if passes == "at" else pass_all_k
    value = np.array([share(cell.attempts, c, k) for c in range(cell.attempts + 1)])
    truth, n = cell.truth(k, passes), cell.tasks * cell.attempts
    found = (share_of_tasks(row, n) for row in value[cell.solved(draws, rng)])  # type: ignore[arg-type]
    return sum(e.low - 1e-12 <= truth <= e.high + 1e-12 for e in found) / draws


def exact_wilson(n: int, p: float) -> float:
    """Coverage of Wilson's interval for n independent episodes, summed over the binomial distribution."""
    pmf = (math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1))
    return sum(m for c, m in enumerate(pmf) if wilson_interval(c, n)[0] <= p <= wilson_interval(c, n)[1])


def false_positives(cell: Cell, draws: int, rng: np.random.Generator, *, n_flips: int = 1000) -> tuple[float, float]:
    """Share of the draws in which two equal policies differ at the 5% level, and in which the interval misses 0."""
    # Both policies have the same chance at each task.
    a, b = cell.p * _SPREAD, (1 - cell.p) * _SPREAD
    chances = np.full((draws, cell.tasks), cell.p) if cell.alike else rng.beta(a, b, size=(draws, cell.tasks))
    first, second = (rng.binomial(cell.attempts, chances) for _ in range(2))
    differences = (second - first) / cell.attempts
    if cell.attempts == 1:
        p_values = [mcnemar(int((d > 0).sum()), int((d < 0).sum())) for d in differences]
    else:
        p_values = [permutation(d, n_flips=n_flips, seed=i) for i, d in enumerate(differences)]
    misses = [not e.low <= 0 <= e.high for e in (mean_interval(list(d)) for d in differences)]
    return sum(p <= 0.05 for p in p_values) / draws, sum(misses) / draws


def scores(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Scores of a distribution with mean 1: even, skewed, or mostly 0 and now and then a lot."""
    if name == "even":
        return rng.uniform(0, 2, shape)
    return rng.exponential(1, shape) if name == "skewed" else rng.binomial(1, 0.1, shape) * rng.exponential(10, shape)


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def of_success(draws: int, rng: np.random.Generator) -> None:
    rows, found = [], []
    for tasks, n, alike in itertools.product(TASKS, ATTEMPTS, (True, False)):
        if n == 1 and not alike:
            continue
        line = [coverage(Cell(tasks, n, p, alike), 1, "at", draws, rng) for p in CHANCES]
        found += line
        kind = "-" if n == 1 else "alike" if alike else "differ"
        rows.append((str(tasks), str(n), kind, *(f"{x:.1%}" for x in line), f"{np.mean(line):.1%}"))
    head = ("tasks", "attempts", "tasks are", *(f"p = {p}" for p in CHANCES), "mean")
    table(f"Coverage of the 95% interval of success, {draws:,} draws", head, rows)
    exact = []
    for n in (*TASKS, 1000):
        mean = np.mean([exact_wilson(n, p / 100) for p in range(1, 100)])
        exact.append((str(n), *(f"{exact_wilson(n, p):.1%}" for p in CHANCES), f"{mean:.1%}"))
    head = ("episodes", *(f"p = {p}" for p in CHANCES), "mean, p = 0.01 to 0.99")
    table("Wilson's interval of independent episodes, exact", head, exact)
    print(f"\nmean over all {len(found)} settings: {np.mean(found):.2%}")


def of_passes(draws: int, rng: np.random.Generator) -> None:
    rows = []
    for tasks, (n, k), alike in itertools.product(TASKS, ((4, 2), (8, 2), (8, 4)), (True, False)):
        line = [coverage(Cell(tasks, n, p, alike), k, what, draws, rng) for what in ("at", "all") for p in (0.3, 0.5)]
        kind = "alike" if alike else "differ"
        rows.append((str(tasks), str(n), str(k), kind, *(f"{x:.1%}" for x in line)))
    ends = tuple(f"{what}, p = {p}" for what in ("pass@k", "pass^k") for p in (0.3, 0.5))
    table("Coverage of the 95% intervals of pass@k and pass^k", ("tasks", "attempts", "k", "tasks are", *ends), rows)


def of_scores(draws: int, rng: np.random.Generator) -> None:
    rows = []
    for name, tasks in itertools.product(("even", "skewed", "rare"), TASKS):
        values = scores(name, (draws, tasks), rng)
        t = sum(e.low <= 1 <= e.high for e in (mean_interval(list(row)) for row in values)) / draws
        some = values[: draws // 10]
        boot = sum(e.low <= 1 <= e.high for e in (bootstrap_interval(list(r), n_resamples=1000) for r in some)) / len(
            some
        )
        rows.append((name, str(tasks), f"{t:.1%}", f"{boot:.1%}"))
    table("Coverage of the 95% interval of a mean score", ("scores", "tasks", "Student's t", "bootstrap"), rows)


def of_tests(draws: int, rng: np.random.Generator) -> None:
    rows = []
    for tasks, n, p in itertools.product(TASKS, (1, 4), (0.1, 0.5)):
        wrong, missed = false_positives(Cell(tasks, n, p, False), draws, rng)
        rows.append(
            (str(tasks), str(n), str(p), "McNemar" if n == 1 else "permutation", f"{wrong:.1%}", f"{missed:.1%}")
        )
    head = ("tasks", "attempts", "p", "test", "false positives at 5%", "interval misses 0")
    table("Two equal policies", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("success", "passes", "scores", "tests"))
    asked = parser.parse_args()
    parts = {"success": of_success, "passes": of_passes, "scores": of_scores, "tests": of_tests}
    for name, part in parts.items():
        if asked.only in (None, name):
            part(asked.draws, np.random.default_rng(asked.seed))


if __name__ == "__main__":
    main()
