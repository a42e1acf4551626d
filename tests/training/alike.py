"""Figures of two trainers, compared within rounding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def assert_alike(
    got: Mapping[str, float], wanted: Mapping[str, float], where: str = "", *, atol: float, rtol: float
) -> None:
    """Figures are the same but for rounding.

    What moves a weight by next to nothing is rounded to nothing in one order of sums and not in another: the share of
    weights that changed, of some thousand that are looked at, may differ by some.
    """
    share = "optimizer/changed_share"
    theirs, ours = ({k: v for k, v in figures.items() if k != share} for figures in (got, wanted))
    assert theirs == pytest.approx(ours, abs=atol, rel=rtol), where
    assert got.get(share) == pytest.approx(wanted.get(share), abs=0.01), where
