"""Do intervals cover as often as they say, and do tests reject a true null as seldom? Against known truth.

    python benchmarks/intervals.py                # 10,000 draws: some two minutes on a quiet core
    python benchmarks/intervals.py --draws 1000 --only success

Shares of independent episodes, and differences of two policies that attempt each task once, are summed over the
binomial and the trinomial distribution: exact, on a grid of chances. The rest is drawn: each draw is an evaluation,
tasks with their own chance of success, attempts at each. Tasks are alike (one chance for all) or differ (chances from a
Beta distribution with the same mean, a + b = 2). The functions that make the reports' figures are the ones that are
called here; beside them stand the textbook's intervals. With 10,000 draws the simulation is uncertain by 0.4 points.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlhf.evaluation.paired import mcnemar, permutation
from rlhf.evaluation.passes import pass_all_k, pass_at_k, share_of_tasks
from rlhf.evaluation.statistics import bounded_interval, mean_interval, share_interval
from rlhf.stats import t_quantile

CHANCES = (0.1, 0.3, 0.5, 0.8)
TASKS = (50, 200)
ATTEMPTS = (1, 2, 4, 8)
SIZES = (10, 20, 50, 100, 200, 500)
_SPREAD = 2.0
_Z = NormalDist().inv_cdf(0.975)

#: From the number of values and their mean and variance to the two ends.
Ends = Callable[[int, float, float], tuple[float, float]]


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


def wilson(n: int, mean: float, variance: float) -> tuple[float, float]:
    """E. B. Wilson's score interval of a share, JASA 22 (1927), 209-212."""
    shrink = 1 + _Z * _Z / n
    half = _Z / shrink * math.sqrt(mean * (1 - mean) / n + _Z * _Z / (4 * n * n))
    centre = (mean + _Z * _Z / (2 * n)) / shrink
    return 0.0 if mean == 0 else centre - half, 1.0 if mean == 1 else centre + half


def student(n: int, mean: float, variance: float) -> tuple[float, float]:
    """Student's t interval, which knows of no range."""
    half = t_quantile(0.975, n - 1) * math.sqrt(variance / (n - 1))
    return mean - half, mean + half


def ours_of_shares(n: int, mean: float, variance: float) -> tuple[float, float]:
    """The interval of success."""
    return share_interval(mean * n, n)


def ours_of_differences(n: int, mean: float, variance: float) -> tuple[float, float]:
    """The interval of a comparison."""
    return bounded_interval(mean, variance, n, -1.0, 1.0)


def exact_share(n: int, chances: np.ndarray, ends: Ends) -> tuple[np.ndarray, np.ndarray]:
    """Coverage and mean width for n independent episodes, at each of `chances` (none of them 0 or 1)."""
    solved = np.arange(n + 1)
    low, high = np.array([ends(n, c / n, c / n * (1 - c / n)) for c in range(n + 1)]).T
    logs = np.array([math.lgamma(n + 1) - math.lgamma(c + 1) - math.lgamma(n - c + 1) for c in range(n + 1)])
    p = chances[:, None]
    mass = np.exp(logs + solved * np.log(p) + (n - solved) * np.log1p(-p))
    return (mass * ((low <= p + 1e-12) & (p - 1e-12 <= high))).sum(1), (mass * (high - low)).sum(1)


def exact_difference(n: int, chances: list[tuple[float, float]], ends: Ends) -> tuple[np.ndarray, np.ndarray]:
    """Coverage and mean width for n tasks of one attempt each, at chances that the second, the first alone solves it.

    Chances are above 0, and so is what is left of 1.
    """
    better, worse = (x.ravel() for x in np.meshgrid(np.arange(n + 1), np.arange(n + 1)))
    better, worse = better[better + worse <= n], worse[better + worse <= n]
    log = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    logs = log[n] - log[better] - log[worse] - log[n - better - worse]
    mean, square = (better - worse) / n, (better + worse) / n
    low, high = np.array([ends(n, m, max(0.0, s - m * m)) for m, s in zip(mean, square, strict=True)]).T
    covered, wide = [], []
    for p, q in chances:
        mass = np.exp(logs + better * math.log(p) + worse * math.log(q) + (n - better - worse) * math.log(1 - p - q))
        covered.append(mass[(low <= p - q + 1e-12) & (p - q - 1e-12 <= high)].sum())
        wide.append((mass * (high - low)).sum())
    return np.array(covered), np.array(wide)


def pairs_of_chances() -> list[tuple[float, float]]:
    """Chances that one of two policies alone solves a task: few or many tasks that differ, one-sided or even."""
    shares = [*np.geomspace(0.002, 0.1, 14), *np.linspace(0.12, 0.999, 16)]
    return [(s * side, s * (1 - side)) for s in shares for side in (0.999999, 0.97, 0.9, 0.8, 0.65, 0.5)]


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
    misses = [not e.low <= 0 <= e.high for e in (mean_interval(list(d), within=(-1.0, 1.0)) for d in differences)]
    return sum(p <= 0.05 for p in p_values) / draws, sum(misses) / draws


#: Scores in [0, 1], and their mean: spread evenly, near 1, 0 nine times in ten, one half but for a few.
SCORES = {
    "even": (lambda shape, rng: rng.uniform(0, 1, shape), 0.5),
    "near 1": (lambda shape, rng: rng.beta(18, 1, shape), 18 / 19),
    "rare": (lambda shape, rng: rng.binomial(1, 0.1, shape) * rng.beta(2, 2, shape), 0.05),
    "one half": (lambda shape, rng: np.where(rng.random(shape) < 0.04, 1.0, 0.5), 0.52),
}


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def of_success(draws: int, rng: np.random.Generator) -> None:
    rows, found = [], []
    for tasks, n, alike in itertools.product((10, *TASKS), ATTEMPTS, (True, False)):
        if n == 1 and not alike:
            continue
        line = [coverage(Cell(tasks, n, p, alike), 1, "at", draws, rng) for p in CHANCES]
        found += line
        kind = "-" if n == 1 else "alike" if alike else "differ"
        rows.append((str(tasks), str(n), kind, *(f"{x:.1%}" for x in line), f"{np.mean(line):.1%}"))
    head = ("tasks", "attempts", "tasks are", *(f"p = {p}" for p in CHANCES), "mean")
    table(f"Coverage of the 95% interval of success, {draws:,} draws", head, rows)
    print(f"\nmean over all {len(found)} settings: {np.mean(found):.2%}")


def of_shares(draws: int, rng: np.random.Generator) -> None:
    even, near = np.linspace(0.001, 0.999, 999), np.geomspace(1e-5, 0.001, 40)
    rows = []
    for n in SIZES:
        cells = []
        for ends in (ours_of_shares, wilson):
            covered, wide = exact_share(n, even, ends)
            least = min(covered.min(), exact_share(n, near, ends)[0].min())
            cells += [f"{covered.mean():.1%}", f"{least:.1%}", f"{wide.mean():.3f}"]
        rows.append((str(n), *cells))
    head = ("episodes", "mean", "minimum", "width", "Wilson: mean", "minimum", "width")
    table("Intervals of a proportion over independent episodes, over all p, exact", head, rows)


def of_differences(draws: int, rng: np.random.Generator) -> None:
    chances, rows = pairs_of_chances(), []
    for n in SIZES[:-1]:  # of 500 tasks there are 125,000 outcomes
        cells = []
        for ends in (ours_of_differences, student):
            covered, wide = exact_difference(n, chances, ends)
            cells += [f"{covered.mean():.1%}", f"{covered.min():.1%}", f"{wide.mean():.3f}"]
        rows.append((str(n), *cells))
    head = ("tasks", "mean", "minimum", "width", "Student's t: mean", "minimum", "width")
    table(f"Intervals of the difference of two policies, at {len(chances)} pairs of probabilities, exact", head, rows)


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
    for (name, (draw, truth)), tasks in itertools.product(SCORES.items(), (10, *TASKS)):
        values = draw((draws, tasks), rng)
        cells = []
        for within in ((0.0, 1.0), None):
            found = [mean_interval(row, within=within) for row in values]
            ends = [(e.low, e.high) if math.isfinite(e.high) else (e.value, e.value) for e in found]
            cells.append(f"{sum(low <= truth <= high for low, high in ends) / draws:.1%}")
            cells.append(f"{sum(high - low for low, high in ends) / draws:.3f}")
        rows.append((name, str(tasks), *cells))
    head = ("scores", "tasks", "coverage", "width", "Student's t: coverage", "width")
    table("Coverage of the 95% interval of a mean score within [0, 1]", head, rows)


def of_tests(draws: int, rng: np.random.Generator) -> None:
    rows = []
    for tasks, n, p in itertools.product(TASKS, (1, 4), (0.1, 0.5)):
        wrong, missed = false_positives(Cell(tasks, n, p, False), draws, rng)
        rows.append(
            (str(tasks), str(n), str(p), "McNemar" if n == 1 else "permutation", f"{wrong:.1%}", f"{missed:.1%}")
        )
    head = ("tasks", "attempts", "p", "test", "false positives at 5%", "interval misses 0")
    table("Two equal policies", head, rows)


PARTS = {
    "shares": of_shares,
    "differences": of_differences,
    "success": of_success,
    "passes": of_passes,
    "scores": of_scores,
    "tests": of_tests,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(PARTS))
    asked = parser.parse_args()
    for name, part in PARTS.items():
        if asked.only in (None, name):
            part(asked.draws, np.random.default_rng(asked.seed))


if __name__ == "__main__":
    main()
