"""Groups with demonstrations among the attempts: worked numbers and degenerate groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.with_demonstrations import Guided
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.grpo import GRPO
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Trajectory, Turn
from rlhf.data.generation import DEMONSTRATED


def group(own: list[float], shown: list[float]) -> ScoredGroup:
    """One token per trajectory; demonstrations behind the attempts."""
    versions = [0] * len(own) + [DEMONSTRATED] * len(shown)
    trajectories, scores = [], []
    for i, (total, version) in enumerate(zip([*own, *shown], versions, strict=True)):
        generation = Generation(Prompt((1,)), (2,), (0.0,), Finish.STOP, version)
        turn = Turn(Action("a", (generation,)), "")
        trajectories.append(Trajectory("t", i, "", (turn,), Outcome.FAILED))
        scores.append(Score({}, (total,), total))
    return ScoredGroup("t", tuple(trajectories), tuple(scores))


def advantages(own: list[float], shown: list[float], **settings: object) -> list[float]:
    credit = Guided(**settings)(group(own, shown))  # type: ignore[arg-type]
    return [rows[0][0] for rows in credit.advantages_GNT]


def test_a_demonstration_is_told_by_its_tokens() -> None:
    assert [t.is_demonstration for t in group([0.0], [1.0]).trajectories] == [False, True]
    assert not replace(group([0.0], []).trajectories[0], turns=()).is_demonstration


def test_the_mean_is_of_the_group_or_of_the_attempts() -> None:
    # (0, 0, 1) and a demonstration of 1: the mean of all is 1/2, that of the attempts 1/3.
    assert advantages([0, 0, 1], [1]) == pytest.approx([-0.5, -0.5, 0.5, 0.5])
    assert advantages([0, 0, 1], [1], baseline="own") == pytest.approx([-1 / 3, -1 / 3, 2 / 3, 2 / 3])


def test_where_all_attempts_are_wrong() -> None:
    # Seven and one of eight: the mean is 1/8. By the own baseline the demonstration alone has an advantage.
    assert advantages([0] * 7, [1]) == pytest.approx([-0.125] * 7 + [0.875])
    assert advantages([0] * 7, [1], baseline="own") == [0.0] * 7 + [1.0]
    assert advantages([0] * 7, [1], baseline="own", normalize_std=True) == [0.0] * 7 + [1.0], "no deviation is 1"


def test_the_deviation_is_of_the_same_trajectories() -> None:
    # (0, 1, 1) and 1. All: mean 3/4, squares 9/16 + 3/16 = 3/4 over 3, deviation 1/2. Own: mean 2/3, deviation √(1/3).
    assert advantages([0, 1, 1], [1], normalize_std=True, eps=0) == pytest.approx([-1.5, 0.5, 0.5, 0.5])
    found = advantages([0, 1, 1], [1], normalize_std=True, baseline="own", eps=0)
    assert found == pytest.approx([-2 / 3 * 3**0.5, *[1 / 3 * 3**0.5] * 3])


@pytest.mark.parametrize("baseline", ["group", "own"])
def test_nothing_is_imitated_where_everything_is_right(baseline: str) -> None:
    assert advantages([1, 1, 1], [1], baseline=baseline) == [0.0] * 4
    assert advantages([0.1 + 0.2, 0.3], [0.3], baseline=baseline) == [0.0] * 3, "equal up to rounding"
    assert advantages([], [1, 1], baseline=baseline) == [0.0] * 2
    assert advantages([], [1, 0], baseline=baseline) == [0.5, -0.5], "without attempts of its own, the group's"


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=6), st.booleans())
def test_without_demonstrations_it_is_grpo(own: list[float], normalize_std: bool) -> None:
    plain = group(own, [])
    expected = GRPO()(plain) if normalize_std else DrGRPO()(plain)
    for baseline in ("group", "own"):
        found = Guided(baseline=baseline, normalize_std=normalize_std)(plain)  # type: ignore[arg-type]
        for got, wanted in zip(found.advantages_GNT, expected.advantages_GNT, strict=True):
            assert got[0][0] == pytest.approx(wanted[0][0], abs=1e-9)
        assert found.metrics == expected.metrics
