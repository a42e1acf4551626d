"""The toy environments are the ruler of other tests, so their exact values are checked here by hand and by play."""

import numpy as np
import pytest

from environments.check import check_environment
from tests.environments.toytext import ToyText, optimal_value, policy_value

CORRIDOR = ("SG",)  # two cells: only a move to the right leaves the first


def test_the_dry_lake_is_solved_in_six_steps_and_not_in_five() -> None:
    # The goal is three rows down and three columns to the right: no path is shorter than 6 moves.
    assert optimal_value(ToyText(horizon=6)) == 1.0
    assert optimal_value(ToyText(horizon=5)) == 0.0


def test_slippery_corridor_by_hand() -> None:
    # "right" slips to down, right, up with 1/3 each; down and up run into the border. Within 3 steps the goal is
    # missed with probability (2/3)^3 = 8/27.
    assert optimal_value(ToyText(slippery=True, rows=CORRIDOR, horizon=3)) == pytest.approx(19 / 27)


def test_uniform_policy_in_the_corridor_by_hand() -> None:
    # Slips turn a quarter to either side, so down, right and up end up going right with 1/3 each, left never:
    # (1/3 + 1/3 + 1/3 + 0) / 4 = 1/4 per step, and 1 - (3/4)^2 = 7/16 within 2 steps.
    settings = ToyText(slippery=True, rows=CORRIDOR, horizon=2)
    assert policy_value(settings, np.full((2, 4), 0.25)) == pytest.approx(7 / 16)


def test_slippery_lake_approaches_its_known_limit() -> None:
    # The known optimum without a step limit is 14/17 (gamma = 1); it is approached from below.
    values = [optimal_value(ToyText(slippery=True, horizon=h)) for h in (100, 1000, 3000)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.744, abs=0.001)
    assert values[-1] == pytest.approx(14 / 17, abs=1e-6)


def test_play_agrees_with_the_exact_value() -> None:
    settings = ToyText(slippery=True, horizon=30, n_tasks=600)
    solved = [settings.plan(task, []) is not None for task in settings.tasks("train")]
    exact = optimal_value(settings)
    # Four standard errors of a share of 600 plays.
    assert np.mean(solved) == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 600) ** 0.5)


def test_taxi_optimum_is_what_its_plans_earn() -> None:
    settings = ToyText("Taxi-v4", horizon=60)
    for task in settings.tasks("train")[:20]:
        episode = settings.start(task)
        start = episode.state
        path = settings.plan(task, [])
        assert path is not None
        assert sum(episode.do(action).reward for action in path) == optimal_value(settings, start)


@pytest.mark.parametrize("settings", [ToyText(), ToyText("Taxi-v4", horizon=40), ToyText(slippery=True, horizon=40)])
def test_keeps_the_contract(settings: ToyText) -> None:
    report = check_environment(settings, other_process=False)
    assert report.ok, str(report)
