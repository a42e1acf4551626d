"""Quantiles, against closed forms and the printed table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf.errors import DataError
from rlhf.stats import t_quantile


@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.999])
def test_t_quantile_against_closed_forms(probability: float) -> None:
    p = probability
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)  # Cauchy
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-9)
    assert t_quantile(1 - p, 7) == pytest.approx(-t_quantile(p, 7), rel=1e-9)
    # the finite series (df up to 1000) and the expansion (above) meet
    steps = [t_quantile(p, df) for df in (999, 1000, 1001, 1002)]
    assert np.diff(steps) == pytest.approx([np.diff(steps).mean()] * 3, rel=0.01)


def test_t_quantile_of_a_fraction_lies_between_its_neighbours() -> None:
    assert t_quantile(0.975, 12.5) == pytest.approx((2.178813 + 2.160369) / 2, abs=1e-3)
    assert t_quantile(0.975, 12) > t_quantile(0.975, 12.01) > t_quantile(0.975, 12.99) > t_quantile(0.975, 13)
    with pytest.raises(DataError):
        t_quantile(0.975, 0.5)


def test_t_quantile_against_the_printed_table() -> None:
    # Student's table, two-sided 5%: df 4, 5, 10, 30; two-sided 0.1%: df 6
    assert [round(t_quantile(0.975, df), 3) for df in (4, 5, 10, 30)] == [2.776, 2.571, 2.228, 2.042]
    assert round(t_quantile(0.9995, 6), 3) == 5.959
