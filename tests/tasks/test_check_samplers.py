"""Samplers and selections check the rewards, the size of groups and the critic around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions

ALONE = ["stages.1.group_size=1", "stages.1.advantage={kind: grpo, single_group: raw}"]
WITH_PENALTY = "rewards={solved: {kind: outcome}, invalid: {kind: invalid_action}}"
WITH_CRITIC = ["stages.1.advantage={kind: gae}", "stages.1.critic={}"]
WITH_NFT = ["stages.1.advantage={kind: dr_grpo}", "stages.1.loss={kind: nft}"]


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["stages.1.sampler={kind: curriculum, metric: reward/nowhere}"], "stages[1].sampler.metric"),
        (["stages.1.sampler={kind: ladder, metric: reward/nowhere}"], "stages[1].sampler.metric"),
        (["stages.1.sampler={kind: greso, metric: reward/nowhere}"], "stages[1].sampler.metric"),
        (["stages.1.selection={kind: dynamic, metric: reward/nowhere}"], "stages[1].selection.metric"),
        (["stages.1.selection={kind: variance_filter, metric: reward/nowhere}"], "stages[1].selection.metric"),
        (["stages.1.sampler={kind: greso}", *ALONE], "stages[1].group_size"),
        (["stages.1.selection={kind: dynamic}", *ALONE], "stages[1].group_size"),
        (["stages.1.selection={kind: variance_filter}", *ALONE], "stages[1].group_size"),
        (["stages.1.selection={kind: variance_filter, rule: reweight}", *WITH_NFT], "stages[1].selection.rule"),
        (["stages.1.selection={kind: variance_filter, scaling: sqrt}", *WITH_NFT], "stages[1].selection.scaling"),
    ],
)
def test_metric_group_size_and_factors_are_refused(echo: Path, overrides: list[str], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(echo, overrides)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("overrides", "n"),
    [
        (["stages.1.selection={kind: dynamic, metric: score}", WITH_PENALTY], 1),
        (["stages.1.selection={kind: dynamic, metric: success}", WITH_PENALTY], 0),
        (["stages.1.selection={kind: variance_filter}", *WITH_CRITIC], 1),
        (["stages.1.selection={kind: variance_filter, drop_equal: false}", *WITH_CRITIC], 0),
        (["stages.1.sampler={kind: greso}"], 0),
        (["stages.1.sampler={kind: curriculum}"], 0),
    ],
)
def test_selection_tells_what_is_probably_not_meant(echo: Path, overrides: list[str], n: int) -> None:
    assert len([text for text in cautions(load(echo, overrides)) if ".selection" in text]) == n
