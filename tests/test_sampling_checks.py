"""Samplers, selections and replay that do not fit their recipe are refused, or a word is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import RecipeError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.recipe import Recipe, load
from rlhf.recipe.checks import cautions
from tests.training import runs

PENALISED = {"words": {"kind": "environment"}, "short": {"kind": "turn_cost", "cost": 0.1}}


def recipe(folder: Path, rewards: dict[str, Any] | None = None, **stage: Any) -> Recipe:
    whole = {"kind": "policy_gradient", "steps": 4, "tasks_per_step": 4, "group_size": 4} | stage
    return load(runs.write(folder, [whole], **({"rewards": rewards} if rewards else {})))


@pytest.mark.parametrize(
    ("stage", "where", "says"),
    [
        ({"selection": {"kind": "dynamic"}, "group_size": 1}, "stages[0].group_size", "at least 2 for dynamic"),
        (
            {"selection": {"kind": "variance_filter"}, "group_size": 1},
            "stages[0].group_size",
            "at least 2 for variance_filter",
        ),
        ({"sampler": {"kind": "greso"}, "group_size": 1}, "stages[0].group_size", "at least 2 for greso"),
        (
            {"selection": {"kind": "dynamic", "metric": "reward/wrds"}},
            "stages[0].selection.metric",
            "did you mean 'reward/words'?",
        ),
        ({"sampler": {"kind": "greso", "metric": "words"}}, "stages[0].sampler.metric", "did you mean 'reward/words'?"),
        ({"sampler": {"kind": "curriculum", "metric": "zeal"}}, "stages[0].sampler.metric", "success, score"),
        ({"replay": {}, "loss": {"kind": "reinforce"}}, "stages[0].replay", "set loss.max_weight"),
        (
            {"replay": {}, "loss": {"kind": "rebel"}},
            "stages[0].replay",
            "this loss compares the trajectories of a group, and replayed ones have no group",
        ),
        (
            {"replay": {}, "filters": {"drop_zero_advantage": False}},
            "stages[0].filters.drop_zero_advantage",
            "true with replay",
        ),
        ({"sampler": {"kind": "greso", "p_step": 0, "p_min": 0.1}}, "stages[0].sampler.p_min", "p_step is 0"),
        ({"selection": {"kind": "dinamic"}}, "stages[0].selection.kind", "did you mean 'dynamic'?"),
        ({"selection": {"kind": "variance_filter", "rule": "top_k_abs"}}, "stages[0].selection", "needs a value"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, stage: dict[str, Any], where: str, says: str) -> None:
    advantage = {"advantage": {"kind": "reinforce_pp"}} if stage.get("group_size") == 1 else {}
    with pytest.raises(RecipeError) as refused:
        recipe(tmp_path, **advantage, **stage)
    assert refused.value.where == where and says in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    "stage",
    [
        {"selection": {"kind": "dynamic", "metric": "reward/words"}, "sampler": {"kind": "greso"}},
        {"replay": {}, "loss": {"kind": "reinforce", "max_weight": 2.0}},
        {"replay": {"max_age": 1}, "loss": {"kind": "gspo"}, "reduction": {"kind": "seq_mean_token_mean"}},
        {"sampler": {"kind": "curriculum", "levels": ["easy", "hard"]}},
        {"sampler": {"kind": "curriculum", "levels": [1, 2.5]}},
        {"group_size": 1, "advantage": {"kind": "reinforce_pp"}},
    ],
)
def test_what_works_is_let_through(tmp_path: Path, stage: dict[str, Any]) -> None:
    assert recipe(tmp_path, **stage).stages[0].selection is not None


def test_penalties_that_would_keep_a_group_are_worth_a_word(tmp_path: Path) -> None:
    said = cautions(recipe(tmp_path, PENALISED, selection={"kind": "dynamic", "metric": "score"}))
    assert any("differ only in penalties (short)" in text for text in said)
    for metric in ("success", "reward/words"):
        said = cautions(recipe(tmp_path, PENALISED, selection={"kind": "dynamic", "metric": metric}))
        assert not any("penalties" in text for text in said)


def test_a_critic_whose_groups_are_dropped_is_worth_a_word(tmp_path: Path) -> None:
    with_critic = {"critic": {}, "advantage": {"kind": "gae"}}
    for drop_equal in (True, False):
        said = cautions(
            recipe(tmp_path, **with_critic, selection={"kind": "variance_filter", "drop_equal": drop_equal})
        )
        assert any("where a critic still gives an advantage" in text for text in said) == drop_equal


def test_the_arithmetic_counts_rounds(tmp_path: Path) -> None:
    [plain] = arithmetic(recipe(tmp_path))["stages"]
    [rounds] = arithmetic(recipe(tmp_path, selection={"kind": "dynamic", "max_rounds": 3}))["stages"]
    assert plain["max_rounds_per_step"] == 1 and rounds["max_rounds_per_step"] == 3
    assert rounds["max_turns_per_step"] == 3 * plain["max_turns_per_step"]
    for name in ("max_samples_per_step", "episodes_per_step", "updates_per_step"):
        assert rounds[name] == plain[name]
