"""The walk over the parts of a recipe: which are asked, where they stand, and what their classes declare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rewards.models.model_folder import ModelReward
from rewards.models.reward_model import OutcomeModelScore, ProcessModelScore
from rlhf.catalog import CATALOG
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions, problems
from rlhf.recipe.keys import keys_of
from rlhf.recipe.model import recipe_of
from rlhf.recipe.text import read
from rlhf.recipe.view import places
from rlhf.registry import resolve
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh
from tests import recipe_parts

STRANGER = """
from dataclasses import dataclass, field
from rewards.base import Reward
from rewards.shaping.outcome import Outcome
from rlhf.checking import Problem

@dataclass(frozen=True)
class Picky:
    inner: Reward = field(default_factory=Outcome)
    least: int = 4
    fails: bool = False

    def __call__(self, task, trajectory):
        return 0.0

    def check(self, context):
        if self.fails:
            raise KeyError("no such thing")
        for path, stage in context.recipe.learning:
            if stage.group_size < self.least:
                holder = type(context.parent).__name__
                yield Problem("too few attempts", context.at("least"), f"{self.least} in {holder}",
                              f"at most {path}.group_size = {stage.group_size}", f"lower it in {context.reward}")

    def cautions(self, context):
        yield f"{context.path} is picky"
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    (tmp_path / "picky.py").write_text(STRANGER)
    return recipe_parts.write(tmp_path)


def with_reward(reward: str) -> list[str]:
    return [f"rewards={{strange: {reward}, solved: {{kind: outcome}}}}"]


def test_a_part_of_a_stranger_checks_itself_where_it_stands(echo: Path) -> None:
    inner = "{kind: ./picky.py:Picky, inner: {kind: ./picky.py:Picky, least: 9}}"
    with pytest.raises(RecipeError) as caught:
        load(echo, with_reward(inner))
    error = caught.value
    assert (error.what, error.where) == ("too few attempts", "rewards.strange.inner.least")
    assert (error.got, error.hint) == ("9 in Picky", "lower it in strange")
    assert error.expected.startswith("at most stages[1].group_size = ")


def test_a_part_of_a_stranger_cautions_where_it_stands(echo: Path) -> None:
    recipe = load(echo, with_reward("{kind: ./picky.py:Picky}"))
    assert "rewards.strange is picky" in cautions(recipe)


def test_a_check_that_raises_is_named(echo: Path) -> None:
    with pytest.raises(RecipeError, match="KeyError") as caught:
        load(echo, with_reward("{kind: ./picky.py:Picky, fails: true}"))
    assert caught.value.where == "rewards.strange, check" and "Picky.check" in caught.value.hint


def test_all_problems_of_a_recipe_are_given(echo: Path) -> None:
    overrides = ["stages.1.minibatches=1000", "stages.1.patience=3", "evaluation.split=nowhere"]
    found = [problem.where for problem in problems(recipe_of(read(echo, overrides), name="e", base=echo.parent))]
    assert found == ["stages[1].minibatches", "stages[1].patience", "evaluation.split"]


def test_every_part_has_one_place(echo: Path) -> None:
    advantage = "stages.1.advantage={kind: two_level, planner: {kind: task_normalised}}"
    recipe = recipe_of(read(echo, [advantage]), name="e", base=echo.parent)
    found = {place.context.path: place for place in places(recipe)}
    assert len(found) == len(places(recipe))
    nested = found["stages[1].advantage.planner.inner"]
    assert nested.section == "advantage" and nested.context.stage is recipe.stages[1]
    assert nested.context.parent is found["stages[1].advantage.planner"].part
    assert found["stages[1].advantage"].context.parent is None
    assert {"agent", "environment", "policy", "limits", "evaluation", "engine"} <= set(found)


def classes() -> list[Any]:
    found = []
    for section, table in CATALOG.items():
        for kind in table:
            try:
                found.append(resolve(section, kind, base=Path()))
            except MissingPackageError:
                continue
    return found


def test_ignored_keys_are_keys_with_defaults() -> None:
    declared = [(cls, ignored) for cls in classes() for ignored in vars(cls).get("ignored_keys", ())]
    assert len(declared) >= 10
    for cls, ignored in declared:
        keys = keys_of(cls)
        assert ignored.by in keys and ignored.keys
        assert all(keys[name].make_default is not None for name in ignored.keys)


def test_keys_of_ratios_are_keys_of_the_loss() -> None:
    losses = [resolve("loss", kind, base=Path()) for kind in CATALOG["loss"]]
    assert sum(bool(loss.ratio_keys) for loss in losses) >= 8
    for loss in losses:
        assert set(loss.ratio_keys) <= {field.name for field in dataclasses.fields(loss)}


@pytest.mark.parametrize("reward", [ModelReward, OutcomeModelScore, ProcessModelScore])
def test_keys_that_mean_nothing_to_a_reward_model_are_keys_of_its_refresh(reward: type[ModelReward]) -> None:
    assert reward.unrefreshed and set(reward.unrefreshed) <= set(keys_of(RewardRefresh))
