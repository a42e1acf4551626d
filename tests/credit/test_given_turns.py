"""Turns that were given change no credit: not of any estimator, whatever it looks at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf.credit.estimator import compute_advantages, without_given
from rlhf.data import Action, ScoredGroup, Turn, Verdict
from tests.credit.credit_groups import critic, estimators, group, taking

ESTIMATORS = estimators()


def begun() -> ScoredGroup:
    """Four attempts of unequal length that meet the same states again."""
    made = group(
        [[0.0, 1.0], [0.0, 0.0, 0.5], [-0.1], [0.0, 0.0, 1.0]],
        [["hall", "attic"], ["hall", "cellar", "hall"], ["hall"], ["hall", "attic", "hall"]],
        lengths_GK=[[2, 3], [1, 2, 3], [2], [4, 1, 2]],
        solved_G=[True, False, False, True],
    )
    return taking(made, [1.0, 2.0, 3.0, 4.0])


def with_given(made: ScoredGroup) -> ScoredGroup:
    """The same attempts behind two given turns, in states that the policy meets too."""
    given = tuple(Turn(Action("act"), "reply", reward=5.0, state_key=key, valid=False) for key in ("attic", "hall"))
    trajectories = tuple(replace(t, turns=(*given, *t.turns), n_given=2) for t in made.trajectories)
    scores = tuple(
        replace(
            s,
            turns=(0.0, 0.0, *s.turns),
            parts={n: Verdict(v.value, v.why, (0.0, 0.0, *(v.per_turn or ()))) for n, v in s.parts.items()},
        )
        for s in made.scores
    )
    return replace(made, trajectories=trajectories, scores=scores)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_given_turns_change_no_credit(kind: str) -> None:
    made, values = begun(), [critic(begun())]
    [expected] = compute_advantages(ESTIMATORS[kind], [made], values)
    [found] = compute_advantages(ESTIMATORS[kind], [with_given(made)], values)
    found.check(with_given(made))
    assert found == expected


def test_only_what_is_given_goes() -> None:
    made = begun()
    assert without_given(made) is made
    assert without_given(with_given(made)) == made
    branch = replace(with_given(made).trajectories[1], parent=0, n_shared=3)
    rest = without_given(replace(with_given(made), trajectories=(branch,) * 4, scores=with_given(made).scores[1:2] * 4))
    assert [(t.n_given, t.n_shared, len(t.turns)) for t in rest.trajectories] == [(0, 1, 3)] * 4


def test_the_test_can_fail() -> None:
    # GiGPO compares the turns that begin in the hall: with the given one among them it says something else.
    made = with_given(begun())
    assert ESTIMATORS["gigpo"](made).advantages_GNT != ESTIMATORS["gigpo"](begun()).advantages_GNT
