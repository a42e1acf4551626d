"""How sure a figure is: intervals for success and scores. `paired` compares two policies.

Episodes of one task are not independent, so whatever takes `task_ids` counts tasks, not episodes, as the units of
evidence. Failures of parts (an environment that crashed, a timeout) say nothing about the policy: they are counted in
`n_errors` and enter no mean.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from rlhf.errors import DataError

Floats = npt.NDArray[np.float64]

#: Least design effect: few tasks may agree by chance far better than they should.
_MIN_DEFF = 0.5


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


def wilson_interval(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Give Wilson's score interval for a proportion; it keeps its promise near 0, near 1 and for small `n`.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) with p = successes/n. `n` may be fractional: an effective number.
    Without episodes nothing is known: (0, 1). Source: E. B. Wilson, JASA 22 (1927), 209-212.

    Raises:
        DataError: not 0 <= successes <= n, or a confidence outside (0, 1).
    """
    if not 0 <= successes <= n:
        raise DataError("successes do not fit", where="wilson_interval", got=f"{successes} of {n}", expected="0..n")
    z = _z(confidence)
    if n == 0:
        return 0.0, 1.0
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # Rounding must not put p = 0 or p = 1 outside its own interval.
    return (0.0 if successes == 0 else max(0.0, centre - half)), (1.0 if successes == n else min(1.0, centre + half))


def success_estimate(
    solved: Sequence[bool], task_ids: Sequence[Hashable] | None = None, *, n_errors: int = 0, confidence: float = 0.95
) -> Estimate:
    """Estimate the share of solved episodes, with Wilson's interval.

    With several attempts per task the interval uses the effective number of episodes, n / deff, where
    deff = (variance clustered by task) / (p(1−p)/n), and t for the tasks' degrees of freedom in place of the normal
    quantile. An estimated deff below 1 is chance where tasks are alike; it counts, down to 1/2, because an interval
    that is only ever widened by chance covers too much (`benchmarks/intervals.py`). Where all episodes agree deff is
    unknown and the tasks are counted. One attempt per task gives the plain interval.
    Source: E. L. Korn, B. I. Graubard, Survey Methodology 24 (1998), 193-201, who do not let it narrow at all.

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
        effective = effective_n(float(x.mean()), error, n, m, confidence)
    value = n_solved / n if n else math.nan
    low, high = wilson_interval(value * effective if n else 0, effective, confidence)
    return Estimate(value, low, high, n, n_errors)


def mean_interval(
    values: Sequence[float],
    task_ids: Sequence[Hashable] | None = None,
    *,
    n_errors: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate a mean, with Student's t interval on the variance clustered by task.

    x̄ ± t √(m/(m−1) Σ_c (Σ_{i∈c} (x_i − x̄))²) / N with m tasks and m − 1 degrees of freedom. One attempt per task gives
    the textbook interval x̄ ± t s/√N. With fewer than two tasks the interval is (−∞, ∞).
    """
    x = np.asarray(values, dtype=np.float64)
    if not np.isfinite(x).all():
        raise DataError("a value is not finite", where="mean_interval", got=repr(values)[:80])
    if len(x) == 0:
        return Estimate(math.nan, -math.inf, math.inf, 0, n_errors)
    m, error = _clustered_error(x, range(len(x)) if task_ids is None else task_ids)
    mean = float(x.mean())
    half = t_quantile(0.5 + confidence / 2, m - 1) * error if m > 1 else math.inf
    return Estimate(mean, mean - half, mean + half, len(x), n_errors)


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, n_resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """Estimate a mean, with the percentile bootstrap; `values` are one per task. One seed gives one interval."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) == 0:
        return Estimate(math.nan, -math.inf, math.inf, 0)
    generator = np.random.default_rng(seed)
    means = np.empty(n_resamples)
    block = max(1, 2_000_000 // len(x))  # bounds the memory of the resamples
    for start in range(0, n_resamples, block):
        stop = min(start + block, n_resamples)
        means[start:stop] = x[generator.integers(len(x), size=(stop - start, len(x)))].mean(axis=1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(float(x.mean()), float(low), float(high), len(x))


@cache
def t_quantile(probability: float, df: int) -> float:
    """Give the quantile of Student's t distribution with `df` degrees of freedom.

    Bisects the closed form of the distribution function for whole `df`; above 1000 the normal quantile with two terms
    of its expansion in 1/df, exact to 1e-8. Source: Abramowitz and Stegun, 26.7.3, 26.7.4 and 26.7.5.
    """
    if not 0 < probability < 1 or df < 1:
        raise DataError("no such quantile", where="t_quantile", got=f"probability {probability}, df {df}")
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    if df > 1000:
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df * df)
    low, high = 0.0, math.pi / 2  # of the angle atan(t/√df)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + _central(middle, df) / 2 < probability else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(df)


def _central(angle: float, df: int) -> float:
    """P(|T| < t) with t = √df · tan(angle), by the finite series in cos(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term = total = cosine if odd else 1.0
    for k in range(2, df - 1, 2):
        term *= cosine**2 * (k / (k + 1) if odd else (k - 1) / k)
        total += term
    if odd:
        return 2 / math.pi * (angle + (sine * total if df > 1 else 0.0))
    return sine * total


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise DataError("no such confidence", where="statistics", got=str(confidence), expected="between 0 and 1")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _clustered_error(x: Floats, task_ids: Sequence[Hashable]) -> tuple[int, float]:
    """Return the number of tasks and the standard error of the mean of `x` [N], clustered by task."""
    if len(task_ids) != len(x):
        raise DataError("values and task ids differ in number", where="statistics", got=f"{len(x)}, {len(task_ids)}")
    index: dict[Hashable, int] = {}
    cluster = np.array([index.setdefault(task, len(index)) for task in task_ids])
    m = len(index)
    if m < 2:
        return m, math.inf
    sums = np.bincount(cluster, weights=x - x.mean(), minlength=m)
    return m, math.sqrt(m / (m - 1) * float((sums**2).sum())) / len(x)


def effective_n(share: float, error: float, n: int, n_tasks: int, confidence: float = 0.95) -> float:
    """Give the number of independent episodes that say as much as `n` episodes of `n_tasks` tasks; see above.

    Args:
        share: of the episodes that were solved.
        error: standard error of the share, clustered by task.
        n: episodes.
        n_tasks: tasks they are of.
        confidence: of the interval it is for.
    """
    if n_tasks == n:
        return float(n)
    if n_tasks < 2 or share in (0.0, 1.0):
        return float(n_tasks)
    deff = max(_MIN_DEFF, error**2 / (share * (1 - share) / n)) if error else 1.0
    quantile = 0.5 + confidence / 2
    return n / deff * (t_quantile(quantile, n - 1) / t_quantile(quantile, n_tasks - 1)) ** 2
