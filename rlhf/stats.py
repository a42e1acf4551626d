"""Quantiles of distributions, for every package that gives an interval."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from rlhf.errors import DataError


def t_quantile(probability: float, df: float) -> float:
    """Give the quantile of Student's t distribution with `df` degrees of freedom, at least 1.

    Bisects the closed form of the distribution function for whole `df`; between two of them it goes straight in 1/df,
    within 1e-3 of the truth from 3 on. Above 1000 the normal quantile with two terms of its expansion in 1/df, exact to
    1e-8. Source: Abramowitz and Stegun, 26.7.3, 26.7.4 and 26.7.5.
    """
    if not 0 < probability < 1 or not df >= 1:
        raise DataError("no such quantile", where="t_quantile", got=f"probability {probability}, df {df}")
    below = math.floor(df)
    if df > 1000 or df == below:
        return _t_of_whole(probability, df)
    share = (1 / below - 1 / df) * below * (below + 1)
    return (1 - share) * _t_of_whole(probability, below) + share * _t_of_whole(probability, below + 1)


@lru_cache(4096)
def _t_of_whole(probability: float, df: float) -> float:
    """The quantile for whole `df`, or any above 1000."""
    if probability < 0.5:
        return -_t_of_whole(1 - probability, df)
    if df > 1000:
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df * df)
    low, high = 0.0, math.pi / 2  # of the angle atan(t/√df)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + _central(middle, df) / 2 < probability else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(df)


def _central(angle: float, df: float) -> float:
    """P(|T| < t) with t = √df · tan(angle), by the finite series in cos(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = int(df) % 2
    term = total = cosine if odd else 1.0
    for k in range(2, int(df) - 1, 2):
        term *= cosine**2 * (k / (k + 1) if odd else (k - 1) / k)
        total += term
    if odd:
        return 2 / math.pi * (angle + (sine * total if df > 1 else 0.0))
    return sine * total
