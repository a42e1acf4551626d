"""pass@k and pass^k: whether one of k attempts, or each of them, solves a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf.errors import DataError
from rlhf.evaluation.statistics import Estimate, effective_n
from rlhf.stats import share_interval


def pass_at_k(n: int, n_solved: int, k: int) -> float:
    """pass@k: share of the choices of k among n attempts with at least one solved.

    1 − C(n−c, k) / C(n, k), with c = n_solved: the mean over all choices, hence unbiased for 1 − (1−p)^k, unlike
    1 − (1−c/n)^k, which is too low. Source: M. Chen et al., arXiv 2107.03374.

    >>> pass_at_k(4, 2, 2)  # of six pairs, one has no solved attempt
    0.8333333333333334

    Raises:
        DataError: not 0 <= n_solved <= n, or not 1 <= k <= n.
    """
    _check(n, n_solved, k)
    return 1 - math.comb(n - n_solved, k) / math.comb(n, k)


def pass_all_k(n: int, n_solved: int, k: int) -> float:
    """Give the share of the choices of k among n attempts in which all are solved: pass^k.

    C(c, k) / C(n, k), unbiased for p^k. Source: S. Yao et al., arXiv 2406.12045.

    Raises:
        DataError: not 0 <= n_solved <= n, or not 1 <= k <= n.
    """
    _check(n, n_solved, k)
    return math.comb(n_solved, k) / math.comb(n, k)


def pass_estimates(solved: Mapping[str, Sequence[bool]], k: int) -> tuple[Estimate, Estimate]:
    """Estimate pass@k and pass^k over tasks.

    Args:
        solved: task -> whether each of its attempts was solved, failures of parts left out. Tasks with fewer than k
            attempts are left out.
        k: attempts.

    Returns:
        Both, with `n` tasks. For the intervals see `share_of_tasks`.
    """
    counts = [(len(found), sum(found)) for found in solved.values() if len(found) >= k]
    n_attempts = sum(n for n, _ in counts)
    at = share_of_tasks([pass_at_k(n, c, k) for n, c in counts], n_attempts)
    return at, share_of_tasks([pass_all_k(n, c, k) for n, c in counts], n_attempts)


def share_of_tasks(values: Sequence[float], n_attempts: int) -> Estimate:
    """Mean of one value in [0, 1] per task, with the 95% interval of a share of effective tasks.

    Their number is that of `effective_n`, of the variance v̄(1−v̄) that ones and zeros would have and the error s/√m.

    Args:
        values: `[m]`, one per task.
        n_attempts: at all tasks together.
    """
    m = len(values)
    if not m:
        return Estimate(math.nan, 0.0, 1.0, 0)
    x = np.asarray(values, dtype=np.float64)
    mean = min(1.0, max(0.0, float(x.mean())))
    error = float(x.std(ddof=1)) / math.sqrt(m) if m > 1 else math.inf
    effective = effective_n(mean * (1 - mean), error, n_attempts, m) if n_attempts > m else float(m)
    low, high = share_interval(mean * effective, effective)
    return Estimate(mean, low, high, m)


def _check(n: int, n_solved: int, k: int) -> None:
    if not (0 <= n_solved <= n and 1 <= k <= n):
        raise DataError(
            "there are no such attempts",
            where="pass@k",
            got=f"{n_solved} of {n} solved, k {k}",
            expected="0 <= solved <= attempts and 1 <= k <= attempts",
        )
