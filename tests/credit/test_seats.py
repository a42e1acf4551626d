"""Credit of seats: what a game for two earns each of them, from worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.grpo_lead import GRPOLead
from rlhf.credit.contrib.hrpo import HRPO
from rlhf.credit.contrib.ktae import KTAE
from rlhf.credit.contrib.self_play import Seats, seat_of
from rlhf.credit.contrib.two_level import TwoLevel
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.gae import GAE
from rlhf.data import ScoredGroup, Trajectory, Verdict
from tests.credit.credit_groups import call, group_of, turn_of

#: A turn: the seat that had it, and its reward.
Told = tuple[str, float]


def group(*attempts: list[Told], noted: bool = True) -> ScoredGroup:
    """What each seat did in each attempt, and what it earned: turn by turn, and in a part that says no more."""
    turns_GK = [
        [turn_of([call((5, 6), seat)], "s", **({"seat": seat} if noted else {})) for seat, _ in told]
        for told in attempts
    ]
    made = group_of(turns_GK, [[reward for _, reward in told] for told in attempts])
    scores = (replace(s, parts={**s.parts, "whole": Verdict(s.total)}) for s in made.scores)
    return replace(made, scores=tuple(scores))


def advantages(credit_GN: tuple[tuple[tuple[float, ...], ...], ...]) -> list[list[float]]:
    return [[row[0] for row in of] for of in credit_GN]


A, B = "player 0", "player 1"
#: The second seat wins the first attempt, the first seat the second one.
LOST: list[Told] = [(A, 0.0), (B, 0.0), (A, 0.0), (B, 1.0)]
WON: list[Told] = [(A, 0.0), (B, 0.0), (A, 1.0)]


@pytest.mark.parametrize("noted", [True, False])
def test_a_seat_is_compared_with_itself_and_loses_what_the_other_wins(noted: bool) -> None:
    # First seat: -1 and 1, mean 0. Second seat: 1 and -1. Dr.GRPO is the reward minus the mean.
    credit = Seats(inner=DrGRPO())(group(LOST, WON, noted=noted))
    assert advantages(credit.advantages_GNT) == [[-1, 1, -1, 1], [1, -1, 1]]
    assert credit.metrics["credit/n_seat_groups"] == 2


def test_who_plays_together_earns_together_and_who_plays_alone_alone() -> None:
    # Rewards 1 and 3 of two attempts. Together: every seat has 1 and 3, mean 2. Alone: the seat that moved last has
    # them: second seat 1 and 0, mean 0.5; first seat 0 and 3, mean 1.5.
    three: list[Told] = [(A, 0.0), (B, 0.0), (A, 3.0)]
    together = Seats(inner=DrGRPO(), others="same")(group(LOST, three))
    assert advantages(together.advantages_GNT) == [[-1, -1, -1, -1], [1, 1, 1]]
    alone = Seats(inner=DrGRPO(), others="own")(group(LOST, three))
    assert advantages(alone.advantages_GNT) == [[-1.5, 0.5, -1.5, 0.5], [1.5, -0.5, 1.5]]


def test_what_others_do_counts_on_the_turn_before_it_or_on_the_first() -> None:
    # First attempt: B earns 2 before A's first turn, and 1 between A's turns; A itself 4 at the end.
    # A's turns: -2 - 1 = -3, then 4. HRPO with alpha 0... is not needed: a score of turns is seen by `steps`.
    sides = Seats(inner=DrGRPO())._sides(0, group([(B, 2.0), (A, 0.0), (B, 1.0), (A, 4.0)]))
    [of_b, of_a] = [side.group for side in sides]
    assert of_a.scores[0].turns == (-3, 4) and of_a.scores[0].total == 1
    assert of_b.scores[0].turns == (2, -3) and of_b.scores[0].total == -1
    assert of_a.scores[0].parts["steps"].per_turn == (0, 4) and of_a.scores[0].parts["whole"].per_turn is None
    assert [side.places for side in sides] == [((0, (0, 2)),), ((0, (1, 3)),)]


def test_an_attempt_in_which_a_seat_never_moved_is_no_attempt_of_it() -> None:
    # The second seat had a turn in the first attempt alone: nothing to compare with, no credit.
    credit = Seats(inner=DrGRPO())(group(LOST, [(A, 1.0)]))
    assert advantages(credit.advantages_GNT) == [[-1, 0, -1, 0], [1]]


def test_a_seat_that_another_plays_has_no_credit_and_is_compared_with_nobody() -> None:
    # The second seat is another's in the first attempt, or in both: only the first seat is left to compare.
    made = group(LOST, WON)

    def played_by_another(trajectory: Trajectory) -> Trajectory:
        turns = (
            replace(
                t, action=replace(t.action, generations=tuple(replace(g, opponent="step 2") for g in t.generations))
            )
            if seat_of(t) == B
            else t
            for t in trajectory.turns
        )
        return replace(trajectory, turns=tuple(turns))

    first, second = made.trajectories
    one = replace(made, trajectories=(played_by_another(first), second))
    both = replace(made, trajectories=(played_by_another(first), played_by_another(second)))
    for of in (one, both):
        credit = Seats(inner=DrGRPO())(of)
        assert advantages(credit.advantages_GNT) == [[-1, 0, -1, 0], [1, 0, 1]]
    assert Seats(inner=DrGRPO()).over_batch([one])[0].metrics["credit/n_seat_groups"] == 2
    assert Seats(inner=DrGRPO()).over_batch([both])[0].metrics["credit/n_seat_groups"] == 1


def test_groups_of_a_step_keep_their_own_numbers_and_count_once() -> None:
    first, second = Seats(inner=DrGRPO()).over_batch([group(LOST, WON), group(WON, WON)])
    assert advantages(first.advantages_GNT) == [[-1, 1, -1, 1], [1, -1, 1]]
    assert advantages(second.advantages_GNT) == [[0, 0, 0], [0, 0, 0]]
    assert first.metrics["credit/n_seat_groups"] == 4 and second.metrics == {}
    assert first.metrics["credit/n_zero_std_groups"] == 2  # both sides of the second group


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=2, max_size=4))
def test_without_seats_it_is_the_inner_estimator(rewards: list[list[float]]) -> None:
    one = group(*[[("", r) for r in of] for of in rewards], noted=False)
    for inner in (DrGRPO(), HRPO(reward="steps")):
        found, expected = Seats(inner=inner)(one), inner(one)
        for a, b in zip(found.advantages_GNT, expected.advantages_GNT, strict=True):
            assert all(
                math.isclose(x, y, abs_tol=1e-9) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True)
            )


@given(st.lists(st.lists(st.tuples(st.sampled_from([A, B]), st.floats(-3, 3)), min_size=1, max_size=6), min_size=1))
def test_what_one_seat_earns_the_other_pays(told: list[list[Told]]) -> None:
    sides = Seats()._sides(0, group(*told))
    totals = {
        (i, s): side.group.scores[k].total for s, side in enumerate(sides) for k, (i, _) in enumerate(side.places)
    }
    for i in range(len(told)):
        of_both = [total for (j, _), total in totals.items() if j == i]
        if len(of_both) == 2:
            assert math.isclose(sum(of_both), 0, abs_tol=1e-9)


def test_a_critic_inside_is_refused_and_the_group_needed_is_that_of_the_inner() -> None:
    with pytest.raises(ValueError, match="needs a critic"):
        Seats(inner=GAE())
    for inner in (KTAE(), KTAE(correct_above=0, inner=GRPOLead())):
        with pytest.raises(ValueError, match=r"correct_above of .* is null"):
            Seats(inner=inner)
    with pytest.raises(ValueError, match="correct_above of GRPOLead"):
        Seats(inner=TwoLevel(planner=GRPOLead(), executor=None))
    assert Seats(inner=KTAE(correct_above=0, inner=GRPOLead(correct_above=0))).min_group == 2
    assert Seats().min_group == Seats().inner.min_group and not Seats().needs_values
