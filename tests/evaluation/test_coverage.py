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
    assert wrong == pytest.approx(0.05, abs=0.02) and missed <= 0.06


def test_the_truths_are_those_of_the_chances(simulated: ModuleType) -> None:
    """Means over many tasks drawn as the simulation draws them."""
    cell, rng = simulated.Cell(50, 3, 0.3, False), np.random.default_rng(0)
    chances = rng.beta(0.6, 1.4, 400_000)
    assert cell.truth(2, "at") == pytest.approx(np.mean(1 - (1 - chances) ** 2), abs=0.005)
    assert cell.truth(2, "all") == pytest.approx(np.mean(chances**2), abs=0.005)
    assert simulated.Cell(50, 3, 0.3, True).truth(2, "at") == pytest.approx(0.51)


@pytest.mark.parametrize("n", [10, 11, 13, 17, 25, 40, 63, 100, 160, 250, 500])
def test_the_interval_of_a_share_covers_at_every_chance(simulated: ModuleType, n: int) -> None:
    """Exact: at least 94 times in 100 at each chance, hence on average; Wilson's does so on average alone."""
    chances = np.concatenate([np.geomspace(1e-6, 0.002, 40), np.linspace(0.002, 0.998, 499)])
    covered, wide = simulated.exact_share(n, chances, simulated.ours_of_shares)
    assert covered.min() >= 0.94
    of_wilson, width_of_wilson = simulated.exact_share(n, chances, simulated.wilson)
    assert of_wilson.min() < 0.9 and wide.mean() < 1.2 * width_of_wilson.mean()


@pytest.mark.parametrize("n", [10, 20, 50, 100])
def test_the_interval_of_a_difference_covers_at_every_pair_of_chances(simulated: ModuleType, n: int) -> None:
    covered, _ = simulated.exact_difference(n, simulated.pairs_of_chances(), simulated.ours_of_differences)
    assert covered.min() >= 0.94
    assert simulated.exact_difference(n, simulated.pairs_of_chances(), simulated.student)[0].min() < 0.3


@pytest.mark.parametrize("tasks", [10, 50])
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_attempts_at_few_tasks_that_are_seldom_solved_cover_too(
    simulated: ModuleType, monkeypatch: pytest.MonkeyPatch, tasks: int, spread: float
) -> None:
    monkeypatch.setattr(simulated, "_SPREAD", spread)
    for p in (0.02, 0.1):
        found = simulated.coverage(simulated.Cell(tasks, 8, p, False), 1, "at", DRAWS, np.random.default_rng(0))
        assert found >= 0.94 - 0.012  # two standard errors of the simulation


@pytest.mark.parametrize("name", ["even", "near 1", "rare", "one half"])
@pytest.mark.parametrize("tasks", [10, 50])
def test_the_interval_of_a_bounded_score_covers(simulated: ModuleType, name: str, tasks: int) -> None:
    draw, truth = simulated.SCORES[name]
    values = draw((DRAWS, tasks), np.random.default_rng(0))
    found = [simulated.mean_interval(row, within=(0.0, 1.0)) for row in values]
    assert np.mean([e.low <= truth <= e.high for e in found]) >= 0.94 - 0.012
    assert all(0 <= e.low < e.high <= 1 for e in found)


def test_drawn_and_exact_coverage_agree(simulated: ModuleType) -> None:
    found = simulated.coverage(simulated.Cell(50, 1, 0.1, True), 1, "at", DRAWS, np.random.default_rng(1))
    exact, _ = simulated.exact_share(50, np.array([0.1]), simulated.ours_of_shares)
    assert found == pytest.approx(exact[0], abs=0.02)
