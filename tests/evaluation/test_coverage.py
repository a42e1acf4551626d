"""Intervals and tests keep their word on simulated evaluations; `benchmarks/intervals.py` has the whole table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DRAWS = 1500  # of a share of 95%: one standard error is 0.56 points, so 2 points are 3.5 of them


@pytest.fixture(scope="module")
def simulated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("intervals_benchmark", ROOT / "benchmarks" / "intervals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("attempts", "alike"), [(1, True), (4, True), (4, False)])
def test_the_interval_of_success_covers_95_times_in_100(simulated: ModuleType, attempts: int, alike: bool) -> None:
    cell = simulated.Cell(200, attempts, 0.3, alike)
    assert simulated.coverage(cell, 1, "at", DRAWS, np.random.default_rng(0)) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("passes", ["at", "all"])
def test_the_intervals_of_pass_at_k_cover_95_times_in_100(simulated: ModuleType, passes: str) -> None:
    cell = simulated.Cell(200, 4, 0.5, False)
    assert simulated.coverage(cell, 2, passes, DRAWS, np.random.default_rng(0)) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("attempts", [1, 4])
def test_equal_policies_differ_5_times_in_100(simulated: ModuleType, attempts: int) -> None:
    cell = simulated.Cell(200, attempts, 0.5, False)
    wrong, missed = simulated.false_positives(cell, DRAWS, np.random.default_rng(0), n_flips=400)
    assert wrong == pytest.approx(0.05, abs=0.02) and missed == pytest.approx(0.05, abs=0.02)


def test_the_truths_are_those_of_the_chances(simulated: ModuleType) -> None:
    """Means over many tasks drawn as the simulation draws them."""
    cell, rng = simulated.Cell(50, 3, 0.3, False), np.random.default_rng(0)
    chances = rng.beta(0.6, 1.4, 400_000)
    assert cell.truth(2, "at") == pytest.approx(np.mean(1 - (1 - chances) ** 2), abs=0.005)
    assert cell.truth(2, "all") == pytest.approx(np.mean(chances**2), abs=0.005)
    assert simulated.Cell(50, 3, 0.3, True).truth(2, "at") == pytest.approx(0.51)


def test_one_attempt_each_is_as_exact_as_wilson(simulated: ModuleType) -> None:
    cell = simulated.Cell(50, 1, 0.1, True)
    found = simulated.coverage(cell, 1, "at", DRAWS, np.random.default_rng(1))
    assert found == pytest.approx(simulated.exact_wilson(50, 0.1), abs=0.02)
