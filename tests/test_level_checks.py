"""What a recipe is told about credit on two levels and agents that plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions

LEVELS = "stages.1.advantage={kind: two_level}"


def test_a_reward_of_the_low_level_has_to_be_one(echo: Path) -> None:
    with pytest.raises(RecipeError, match="there is no such reward") as caught:
        load(echo, ["stages.1.advantage={kind: two_level, executor_reward: rigth}"])
    assert caught.value.where == "stages[1].advantage.executor_reward" and "right" in str(caught.value)
    with pytest.raises(RecipeError, match="there is no such reward") as caught:
        load(echo, ["stages.1.advantage={kind: two_level, executor: {kind: two_level, executor_reward: rigth}}"])
    assert caught.value.where == "stages[1].advantage.executor.executor_reward"


def test_two_levels_of_an_agent_that_never_plans_are_refused(echo: Path) -> None:
    with pytest.raises(RecipeError, match="kind chat names no subgoals") as caught:
        load(echo, [LEVELS, "agent={kind: chat}"])
    assert caught.value.where == "stages[1].advantage.kind"
    load(echo, [LEVELS, "agent={kind: planner}"])


def test_more_plans_than_calls_are_probably_not_meant(echo: Path) -> None:
    # A word of the executor, then eight times a plan and another: 17, and 16 are allowed.
    def said(n: int) -> list[str]:
        found = load(echo, [f"agent={{kind: planner, max_plans_per_turn: {n}}}"])
        return [text for text in cautions(found) if "limits.max_generations_per_turn" in text]

    assert said(8) and not said(7)
