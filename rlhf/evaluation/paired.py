"""Paired tests on shared tasks, multiple-comparison correction, and sample size.

Each task gives one difference, so that a task with many attempts counts once. Both tests are mid-p: half of the
probability of what was observed counts. On discrete data an exact test rejects a true null far less often than it
says; mid-p keeps near the level, at times a little above it (`benchmarks/intervals.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlhf.errors import DataError
from rlhf.evaluation.statistics import Estimate, Floats, mean_interval, usual_range

#: Below this, a difference is rounding.
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Paired:
    """Difference of two policies on the tasks that both attempted.

    Attributes:
        difference: mean over tasks of (second minus first), with its interval; `n` counts tasks.
        p_value: two-sided, of the test named by `test`.
        test: `mcnemar` where each task gives −1, 0 or 1; else `permutation`.
        deviation: standard deviation of the differences, what the number of tasks needed follows from.
        better: tasks where the second is better, the clearest first.
        worse: tasks where the second is worse, the clearest first.
        n_unpaired: tasks that only one of the two has an attempt at that no part failed in; left out.
    """

    difference: Estimate
    p_value: float
    test: str
    deviation: float
    better: tuple[str, ...]
    worse: tuple[str, ...]
    n_unpaired: int


def compare(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    *,
    confidence: float = 0.95,
    n_flips: int = 10_000,
    seed: int = 0,
) -> Paired:
    """Compare two policies task by task.

    The interval is that of the mean difference within the range that values of `usual_range` leave it, [−1, 1] for
    success: see `bounded_interval`. It covers at least 94 times in 100 whatever the shares of tasks that differ, for 10
    to 500 tasks; Student's t alone covers as seldom as 2 times in 100 where hardly any task differs.

    Args:
        first: task -> value of each attempt that no part failed in, of one policy.
        second: the same of the other policy.
        confidence: of the interval.
        n_flips: of the permutation test.
        seed: of the permutation test.

    Raises:
        DataError: no task is shared.
    """
    tasks = [{task for task, values in side.items() if len(values)} for side in (first, second)]
    shared = sorted(tasks[0] & tasks[1])
    if not shared:
        raise DataError(
            "the two evaluations share no task",
            where="compare",
            got=f"{len(tasks[0])} tasks and {len(tasks[1])} others",
            expected="two evaluations of one suite",
            hint="evaluate both with the same --suite, or the same split and number of tasks",
        )
    differences = np.array([np.mean(second[t]) - np.mean(first[t]) for t in shared], dtype=np.float64)
    differences[np.abs(differences) < _TIE] = 0.0
    order = np.argsort(-np.abs(differences), kind="stable")
    better = tuple(shared[i] for i in order if differences[i] > 0)
    worse = tuple(shared[i] for i in order if differences[i] < 0)
    is_single = bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())
    p_value = mcnemar(len(better), len(worse)) if is_single else permutation(differences, n_flips=n_flips, seed=seed)
    ends = usual_range(float(value) for side in (first, second) for task in shared for value in side[task])
    within = (ends[0] - ends[1], ends[1] - ends[0]) if ends else None
    return Paired(
        difference=mean_interval(list(differences), within=within, confidence=confidence),
        p_value=p_value,
        test="mcnemar" if is_single else "permutation",
        deviation=float(differences.std(ddof=1)) if len(shared) > 1 else math.nan,
        better=better,
        worse=worse,
        n_unpaired=len(tasks[0] ^ tasks[1]),
    )


def mcnemar(n_better: int, n_worse: int) -> float:
    """Give McNemar's mid-p value, two-sided, that a fair coin made `n_better` and `n_worse`; ties are left out.

    2 Σ_{k < min} C(N, k) / 2^N + C(N, min) / 2^N; 1 where both are equal. Source: M. W. Fagerland, S. Lydersen,
    P. Laake, BMC Medical Research Methodology 13 (2013), 91.
    """
    n, least = n_better + n_worse, min(n_better, n_worse)
    if n_better == n_worse:
        return 1.0
    return (2 * sum(math.comb(n, k) for k in range(least)) + math.comb(n, least)) / (1 << n)


def permutation(differences: Floats, *, n_flips: int = 10_000, seed: int = 0) -> float:
    """Give the two-sided mid-p value that the signs of `differences` [N] are a fair coin's.

    Of `n_flips` random choices of signs, and the observed one: the share with a larger |sum|, and half of those with
    the same. Tasks without a difference take no part. One seed gives one value.
    """
    left = np.asarray(differences, dtype=np.float64)
    left = left[np.abs(left) > _TIE]
    if not len(left):
        return 1.0
    observed, generator = abs(float(left.sum())), np.random.default_rng(seed)
    tolerance = _TIE * max(1.0, float(np.abs(left).sum()))
    n_larger = n_same = 0
    block = max(1, 4_000_000 // len(left))  # bounds the memory of the signs
    for start in range(0, n_flips, block):
        signs = generator.integers(0, 2, size=(min(block, n_flips - start), len(left)), dtype=np.int8) * 2.0 - 1.0
        sums = np.abs(signs @ left)
        n_larger += int((sums > observed + tolerance).sum())
        n_same += int((np.abs(sums - observed) <= tolerance).sum())
    return (n_larger + (n_same + 1) / 2) / (n_flips + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values, in the given order: max over those before of (m − rank) p, at most 1.

    With it the chance of any false finding among m stays at the level. Source: S. Holm, Scandinavian Journal of
    Statistics 6 (1979), 65-70.
    """
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = most
    return adjusted


def n_tasks_needed(deviation: float, difference: float) -> int:
    """Give the number of tasks with which a paired test at the level .05 sees a true `difference` with probability .8.

    ⌈((z_{.975} + z_{.8}) s / d)²⌉, with s the standard deviation of the tasks' differences.

    Raises:
        DataError: a difference of 0, which no number of tasks shows, or a deviation that is no finite number.
    """
    if not difference or not math.isfinite(deviation):
        raise DataError(
            "the required number of tasks is undefined",
            where="n_tasks_needed",
            got=f"difference {difference}, deviation {deviation}",
        )
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return max(2, math.ceil((z * deviation / difference) ** 2))
