"""Parameters of tests by tier: a few in `make test`, the others with `extended`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values, tuples for several parameters, as parameters; all but `quick` are marked `extended`."""
    values = list(values)
    assert all(value in values for value in quick), f"{quick} are not all among {values}"
    marks = [() if value in quick else pytest.mark.extended for value in values]
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*one, marks=mark) for one, mark in zip(several, marks, strict=True)]
