"""Credit of a critic of proposals, from worked numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from agents.contrib.critic import CRITIC
from rlhf.credit.contrib.actor_critic_agents import Reviews
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.data import Prompt, ScoredGroup, Turn
from rlhf.recipe import load
from rlhf.recipe.checks import cautions
from tests.credit.credit_groups import call, group_of, turn_of
from tests.test_role_checks import STAGE, write

#: A turn by the verdicts of its reviews; an actor's call stands before each, and behind the last that sends back.
Told = list[list[str]]


def turn(said: list[str], noted: bool = True) -> Turn:
    roles = [role for _ in said for role in ("actor", "critic")] + ["actor"] * (not said or said[-1] == "revise")
    return turn_of([call((5, 6), role) for role in roles], **({"review": "\n".join(said)} if said and noted else {}))


def group(*attempts: tuple[Told, bool], noted: bool = True) -> ScoredGroup:
    turns_GK = [[turn(said, noted) for said in told] for told, _ in attempts]
    rewards_GK = [[0.0] * (len(told) - 1) + [float(solved)] for told, solved in attempts]
    return group_of(turns_GK, rewards_GK, solved_G=[solved for _, solved in attempts])


def of(made: ScoredGroup, role: str, **keys: object) -> list[list[float]]:
    """The credit of each call of a role, by attempts."""
    credit = Reviews(inner=DrGRPO(), **keys)(made)  # type: ignore[arg-type]
    credit.check(made)
    return [
        [row[0] for g, row in zip(t.generations, rows, strict=True) if g.role == role and row[0] == row[1]]
        for t, rows in zip(made.trajectories, credit.advantages_GNT, strict=True)
    ]


#: A success with an accepted and a returned proposal, a failure with a returned one.
MIXED = group(([["accept"], ["revise"]], True), ([["revise"]], False))


def test_the_critic_is_paid_for_being_right_and_the_actor_by_the_inner_estimator() -> None:
    # x = (1, 0), (1): mean 2/3, deviation sqrt((1/9 + 4/9 + 1/9) / 2) = .57735.
    [won, lost] = of(MIXED, "critic")
    assert won == pytest.approx([0.57735, -1.15470], abs=1e-4) and lost == pytest.approx([0.57735], abs=1e-4)
    assert of(MIXED, "actor") == [[0.5, 0.5, 0.5], [-0.5, -0.5]]
    credit = Reviews(inner=DrGRPO())(MIXED)
    assert credit.metrics["credit/n_reviews"] == 3
    assert credit.metrics["credit/right_reviews_share"] == pytest.approx(2 / 3)
    assert credit.metrics["credit/accepted_reviews_share"] == pytest.approx(1 / 3)


def test_the_outcome_can_count_besides() -> None:
    # Half of the actor's ±.5 is added.
    [won, lost] = of(MIXED, "critic", outcome=0.5)
    assert won == pytest.approx([0.57735 + 0.25, -1.15470 + 0.25], abs=1e-4)
    assert lost == pytest.approx([0.57735 - 0.25], abs=1e-4)


def test_a_review_that_cannot_be_read_is_wrong_and_all_alike_say_nothing() -> None:
    # x = 0 and 1: mean ½, deviation .70711.
    made = group(([["unread"]], True), ([["revise"]], False))
    assert of(made, "critic") == [pytest.approx([-0.70711], abs=1e-4), pytest.approx([0.70711], abs=1e-4)]
    assert of(group(([["accept"]], True), ([["revise"]], False)), "critic") == [[0.0], [0.0]]


def test_success_may_be_a_score() -> None:
    # With a score above 1 as success both have failed: only what was sent back is right. x = (0, 1), (1).
    [won, lost] = of(MIXED, "critic", correct_above=1.0)
    assert won == pytest.approx([-1.15470, 0.57735], abs=1e-4) and lost == pytest.approx([0.57735], abs=1e-4)


def test_without_reviews_it_is_the_inner_estimator() -> None:
    silent = group(([[]], True), ([[]], False))
    assert Reviews(inner=DrGRPO())(silent).advantages_GNT == DrGRPO()(silent).advantages_GNT
    # A turn that was broken off has no note: nothing is said of its reviews.
    broken = group(([["accept"]], True), ([["revise"]], False), noted=False)
    assert Reviews(inner=DrGRPO())(broken).advantages_GNT == DrGRPO()(broken).advantages_GNT


def test_a_piece_of_a_review_gets_what_the_review_gets() -> None:
    actor, critic = turn(["accept"]).action.generations
    rest = replace(call((7,), "critic"), prompt=Prompt(critic.full_ids))
    pieces = turn_of([actor, critic, rest], review="accept")
    made = group_of([[pieces], [turn(["accept"])]], [[1.0], [0.0]], solved_G=[True, False])
    rows = Reviews(inner=DrGRPO())(made).advantages_GNT[0]
    assert rows[1][0] == rows[2][0] == pytest.approx(0.70711, abs=1e-4)
    with pytest.raises(ValidationError, match="outcome"):
        Reviews(outcome=-1.0)


def test_a_critic_that_is_trained_alone_for_foreseeing_is_doubted(tmp_path: Path) -> None:
    [alone] = cautions(load(write(tmp_path, STAGE | {"train_roles": [CRITIC]})))
    assert "stages[0].advantage.outcome is 0" in alone and "credit/accepted_reviews_share" in alone
    paid = {"advantage": {"kind": "reviews", "outcome": 1.0}, "train_roles": [CRITIC]}
    assert not cautions(load(write(tmp_path, STAGE | paid)))
