"""Confidence intervals for success and scores, within their range. `paired` compares two policies.

Episodes of one task are not independent, so whatever takes `task_ids` counts tasks, not episodes, as the units of
evidence. Failures of parts (an environment that crashed, a timeout) say nothing about the policy: they are counted in
`n_errors` and enter no mean.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhf.errors import DataError
from rlhf.stats import bounded_interval, share_interval, t_quantile

Floats = npt.NDArray[np.float64]

#: Least design effect: few tasks may agree by chance far better than they should.
_MIN_DEFF = 0.5
#: Tasks whose attempts agree that a design effect is estimated with, beside those that there are.
_AGREEING = 0.5
#: What is less is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval.

    Attributes:
        value: the mean.
        low: lower end of the interval.
        high: upper end of the interval.
        n: episodes (or tasks, where tasks are compared) behind it.
        n_errors: attempts left out because a part failed.
    """

    value: float
    low: float
    high: float
    n: int
    n_errors: int = 0


def success_estimate(
    solved: Sequence[bool], task_ids: Sequence[Hashable] | None = None, *, n_errors: int = 0, confidence: float = 0.95
) -> Estimate:
    """Estimate the share of solved episodes, with the interval of `share_interval`.

    With several attempts per task the interval is that of the effective number of episodes; see `effective_n`. One
    attempt per task gives the plain interval.

    Args:
        solved: `[N]` episodes that no part failed in.
        task_ids: `[N]` the task of each; None where every episode has a task of its own.
        n_errors: attempts left out because a part failed; reported, not used.
        confidence: of the interval, in (0, 1).
    """
    n, n_solved = len(solved), sum(bool(x) for x in solved)
    effective = float(n)
    if n and task_ids is not None:
        x = np.asarray(solved, dtype=np.float64)
        m, error = _clustered_error(x, task_ids)
        effective = effective_n(float(x.var()), error, n, m, confidence=confidence)
    value = n_solved / n if n else math.nan
    low, high = share_interval(value * effective if n else 0, effective, confidence)
    return Estimate(value, low, high, n, n_errors)


def mean_interval(
    values: Sequence[float],
    task_ids: Sequence[Hashable] | None = None,
    *,
    within: tuple[float, float] | None = None,
    n_errors: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """Mean with its interval: `bounded_interval` within a range, else Student's t, clustered by task.

    x̄ ± t √(m/(m−1) Σ_c (Σ_{i∈c} (x_i − x̄))²) / N with m tasks and m − 1 degrees of freedom. One attempt per task
    gives
    the textbook interval x̄ ± t s/√N. With fewer than two tasks, or where nothing differs, it is (−∞, ∞). In a range
    the interval is that of the effective number of values; see `effective_n`.

    Args:
        values: `[N]` of attempts that no part failed in.
        task_ids: `[N]` the task of each; None where every value has a task of its own.
        within: least and greatest value that there can be; see `usual_range`. None where they are not known.
        n_errors: attempts left out because a part failed; reported, not used.
        confidence: of the interval, in (0, 1).

    Raises:
        DataError: a value that is not finite, or outside the range.
    """
    x = np.asarray(values, dtype=np.float64)
    if not np.isfinite(x).all():
        raise DataError("a value is not finite", where="mean_interval", got=repr(values)[:80])
    if within and len(x) and not (within[0] <= x.min() and x.max() <= within[1]):
        got = f"{x.min():g} to {x.max():g}"
        raise DataError("a value lies outside its range", where="mean_interval", got=got, expected=f"{within}")
    if len(x) == 0:
        return Estimate(math.nan, *(within or (-math.inf, math.inf)), 0, n_errors)
    m, error = _clustered_error(x, range(len(x)) if task_ids is None else task_ids)
    mean = float(x.mean())
    if within:
        effective = effective_n(float(x.var()), error, len(x), m, width=within[1] - within[0], confidence=confidence)
        return Estimate(mean, *bounded_interval(mean, float(x.var()), effective, *within, confidence), len(x), n_errors)
    is_known = m > 1 and error > _ROUNDING * float(np.abs(x).max())
    half = t_quantile(0.5 + confidence / 2, m - 1) * error if is_known else math.inf
    return Estimate(mean, mean - half, mean + half, len(x), n_errors)


def usual_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Range inferred from the values: [0, 1] or [−1, 1]; None where one lies outside.

    Shares, answers judged right or wrong and most rewards have these ranges. What may earn more and never did is
    estimated as if it could not.
    """
    least, most = 0.0, 0.0
    for value in values:
        least, most = min(least, value), max(most, value)
    return (0.0 if least >= 0 else -1.0, 1.0) if least >= -1 and most <= 1 else None


def _clustered_error(x: Floats, task_ids: Sequence[Hashable]) -> tuple[int, float]:
    """Number of tasks and standard error of the mean of `x` [N], clustered by task."""
    if len(task_ids) != len(x):
        raise DataError("values and task ids differ in number", where="statistics", got=f"{len(x)}, {len(task_ids)}")
    index: dict[Hashable, int] = {}
    cluster = np.array([index.setdefault(task, len(index)) for task in task_ids])
    m = len(index)
    if m < 2:
        return m, math.inf
    sums = np.bincount(cluster, weights=x - x.mean(), minlength=m)
    return m, math.sqrt(m / (m - 1) * float((sums**2).sum())) / len(x)


def effective_n(
    variance: float, error: float, n: int, n_tasks: int, *, width: float = 1.0, confidence: float = 0.95
) -> float:
    """Give the number of independent episodes that say as much as `n` episodes of `n_tasks` tasks.

    n / deff, with deff = error² / (variance / n), times (t_{n−1} / t_{m−1})², which brings the degrees of freedom of
    the m tasks into an interval that is made for n episodes. An estimated deff below 1 is chance where tasks are alike;
    it counts, down to 1/2, because an interval that is only ever widened by chance covers too much. It is estimated
    from few tasks where few differ: half a task more, whose attempts all agree, counts among 4 m variance / width²
    tasks, without which the interval covers 90 times in 100 where one task in fifty is ever solved
    (`benchmarks/intervals.py`). Where all episodes agree deff is unknown and the tasks are counted.
    Source of deff: E. L. Korn, B. I. Graubard, Survey Methodology 24 (1998), 193-201, who do not let it narrow at all.

    Args:
        variance: of the episodes' values.
        error: standard error of their mean, clustered by task.
        n: episodes.
        n_tasks: tasks they are of.
        width: of the range of a value.
        confidence: of the interval it is for.
    """
    if n_tasks == n:
        return float(n)
    if n_tasks < 2 or variance <= _ROUNDING * width**2:
        return float(n_tasks)
    each = n / n_tasks
    deff = max(_MIN_DEFF, error**2 / (variance / n)) if error else 1.0
    if deff < each:
        differing = 4 * n_tasks * variance / width**2
        deff = (differing * deff + _AGREEING * each) / (differing + _AGREEING)
    quantile = 0.5 + confidence / 2
    return n / deff * (t_quantile(quantile, n - 1) / t_quantile(quantile, n_tasks - 1)) ** 2
