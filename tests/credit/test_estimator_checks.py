"""Estimators check the parts around them: agent, rewards, demonstrations, branches, seats and critics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environments.base import Properties
from rlhf.checking import CheckContext, scale_of
from rlhf.credit.contrib.archer import ArCHer
from rlhf.credit.contrib.progress import Progress
from rlhf.credit.contrib.self_play import Seats
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.credit.contrib.treerl import TreeRL
from rlhf.credit.estimator import compute_advantages, critic_of, may_take, needs_branches
from rlhf.credit.gae import GAE
from rlhf.credit.grpo import GRPO
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.errors import DataError, RecipeError
from rlhf.recipe import load
from rlhf.recipe.checks import problems
from rlhf.recipe.compatibility import check_seated
from rlhf.recipe.model import recipe_of
from rlhf.recipe.text import read
from rlhf.recipe.view import view_of
from tests.credit.credit_groups import outcome_group

EXPERT = ["stages.1.group_demonstrations={per_group: 1}", "stages.1.loss={kind: luffy}"]
PLANNER = "agent={kind: planner}"
REINFORCED = "stages=[{kind: policy_gradient, steps: 3, group_size: 4}]"


@pytest.mark.parametrize(
    ("advantage", "where"),
    [
        ("{kind: hrpo, reward: nowhere}", "stages[1].advantage.reward"),
        ("{kind: two_level, executor_reward: nowhere}", "stages[1].advantage.executor_reward"),
        ("{kind: two_level}", "stages[1].advantage.kind"),
        ("{kind: reviews}", "stages[1].advantage.kind"),
        ("{kind: task_normalised, inner: {kind: treerl}}", "stages[1].advantage.inner.kind"),
        ("{kind: guided}", "stages[1].advantage.kind"),
        ("{kind: guided, normalize_std: true}", "stages[1].advantage.kind"),
        ("{kind: guided, baseline: own}", "stages[1].advantage.baseline"),
        ("{kind: seats}", "stages[1].advantage.kind"),
        ("{kind: hgpo, history: 0, alpha: 2}", "stages[1].advantage.alpha"),
    ],
)
def test_estimator_without_its_counterpart_is_refused(echo: Path, advantage: str, where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(echo, [f"stages.1.advantage={advantage}", "agent={kind: chat}"])
    assert caught.value.where == where


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.1.advantage={kind: two_level, executor_reward: right}", PLANNER],
        ["stages.1.advantage={kind: guided, baseline: own}", *EXPERT],
        ["stages.1.advantage={kind: reviews}", "agent={kind: critic}"],
        ["stages.1.advantage={kind: hrpo, reward: right}"],
        ["stages.1.advantage={kind: hgpo, history: 0, episode: true, alpha: 2}"],
    ],
)
def test_estimator_with_its_counterpart_is_accepted(echo: Path, overrides: list[str]) -> None:
    recipe = recipe_of(read(echo, overrides), name="echo", base=echo.parent)
    assert not [p for p in problems(recipe) if p.where.startswith("stages[1].advantage")]


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ("executor: {kind: reinforce_pp, gamma: 0.9}", False),
        ("executor: {kind: task_normalised, inner: {kind: reinforce_pp, gamma: 0.9}}", False),
        ("executor: {kind: reinforce_pp, gamma: 0.9}, horizon: option", True),
        ("executor: {kind: reinforce_pp}", True),
        ("executor: {kind: gigpo}", True),
    ],
)
def test_an_executor_that_discounts_per_token_is_refused_where_the_episode_counts(
    echo: Path, keys: str, accepted: bool
) -> None:
    given = ["agent={kind: planner}", f"stages.1.advantage={{kind: two_level, {keys}}}"]
    found = [
        p
        for p in problems(recipe_of(read(echo, given), name="echo", base=echo.parent))
        if p.where == "stages[1].advantage.executor"
    ]
    assert [p.got for p in found] == ([] if accepted else ["gamma: 0.9 with horizon: episode"])


@pytest.mark.parametrize("advantage", ["{kind: two_level}", "{kind: guided}", "{kind: reviews}"])
def test_trained_policy_needs_no_counterpart(echo: Path, advantage: str) -> None:
    load(echo, [f"stages.1.advantage={advantage}"], is_trained=True)


def test_seats_wait_for_training_under_self_play(echo: Path) -> None:
    overrides = [REINFORCED, "agent={kind: self_play}", "stages.0.advantage={kind: seats}"]
    with pytest.raises(RecipeError, match="compares by seats"):
        check_seated(load(echo, overrides))


def test_seats_that_older_versions_have_for_a_turn_are_refused(echo: Path) -> None:
    overrides = [REINFORCED, "stages.0.advantage={kind: seats}", "stages.0.opponents={every: 1, by: turn}"]
    with pytest.raises(RecipeError, match="no credit in the whole attempt"):
        load(echo, [*overrides, "agent={kind: self_play}"])


def test_traits_of_an_estimator_are_those_it_declares() -> None:
    assert critic_of(GAE()) is None
    assert critic_of(TaskNormalised(inner=ArCHer())) == "archer"
    assert may_take(Progress(), "contributions") and not may_take(GRPO(), "contributions")
    assert needs_branches(TreeRL()) and not needs_branches(GRPO())
    assert scale_of(GRPO()) is None and scale_of(GRPO(normalize_std=False)) == "group_mean"


def test_seats_of_a_game_for_two_are_compared(echo: Path) -> None:
    view = replace(view_of(load(echo, [])), properties=Properties(seats=("first", "second")))
    assert not list(Seats().check_seats(CheckContext(path="stages[1].advantage", recipe=view)))


@pytest.mark.parametrize("returned", [None, [[1.0]], 0.5])
def test_an_estimator_that_returns_no_credit_is_named(returned: object) -> None:
    class Own(GRPO):
        def __call__(self, group: ScoredGroup, values: Values | None = None) -> Any:
            return returned

    class Joint(Own):
        def over_batch(self, groups: Sequence[ScoredGroup]) -> Any:
            return [returned for _ in groups]

    for estimator in (Own(), Joint()):
        with pytest.raises(DataError, match="an advantage estimator did not return the credit of a group") as caught:
            compute_advantages(estimator, [outcome_group([1, 0])])
        assert caught.value.where == type(estimator).__name__


@pytest.mark.parametrize(
    ("credit", "says"), [(math.nan, "credit is not finite"), (None, "credit does not match the tokens")]
)
def test_an_estimator_whose_credit_cannot_be_trained_on_is_named(credit: float | None, says: str) -> None:
    class Own(GRPO):
        def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
            n = 0 if credit is None else 1
            return Credit(tuple(tuple((credit,) * n * g.n_tokens for g in t.generations) for t in group.trajectories))

    class Joint(Own):
        def over_batch(self, groups: Sequence[ScoredGroup]) -> list[Credit]:
            return [self(group) for group in groups]

    for estimator in (Own(), Joint()):
        with pytest.raises(DataError, match=says) as caught:
            compute_advantages(estimator, [outcome_group([1, 0])])
        assert caught.value.where == f"{type(estimator).__name__}, task"
