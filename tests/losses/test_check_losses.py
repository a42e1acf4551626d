"""Losses check the estimator, the filters and the rewards around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import RecipeError
from rlhf.losses.gspo import GSPO
from rlhf.losses.policy_loss import LossNeeds
from rlhf.losses.reinforce import Reinforce
from rlhf.recipe import load
from rlhf.recipe.checks import cautions

CENTRED = "stages.1.advantage={kind: dr_grpo}"
ALL_GROUPS = "stages.1.filters={drop_zero_advantage: false}"


def said(path: Path, *overrides: str) -> list[str]:
    return [text for text in cautions(load(path, overrides)) if ".loss" in text]


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["stages.1.loss={kind: nft}"], "stages[1].advantage.kind"),
        (["stages.1.loss={kind: kdrl, teacher: ./nowhere}"], "stages[1].loss.teacher"),
        (
            ["stages.1.loss={kind: kdrl, teacher: a/b, teach: silent_groups}"],
            "stages[1].filters.drop_zero_advantage",
        ),
        (["stages.1.loss={kind: luffy}"], "stages[1].loss.kind"),
    ],
)
def test_loss_without_its_counterpart_is_refused(echo: Path, overrides: list[str], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(echo, overrides)
    assert caught.value.where == where


@pytest.mark.parametrize(
    "key",
    [
        "filters={high_entropy_share: 0.2}",
        "correction={kind: rejection, criteria: [{over: token, at_most: 2}]}",
    ],
)
def test_ratios_of_replies_need_all_their_tokens(echo: Path, key: str) -> None:
    turns = [
        "stages.1.loss={kind: ppo_clip, ratio: turn}",
        "stages.1.reduction={kind: seq_mean_token_sum}",
        "stages.1.minibatches=2",
    ]
    load(echo, ["engine={kind: vllm}", *turns])
    with pytest.raises(RecipeError, match="single tokens are left out") as caught:
        load(echo, ["engine={kind: vllm}", *turns, f"stages.1.{key}"])
    assert caught.value.where == "stages[1].loss.ratio" and key.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        ("{kind: reinforce, max_weight: null}", "set loss.max_weight"),
        ("{kind: min_entropy}", "use loss: {kind: ppo_clip}"),
    ],
)
def test_replayed_samples_need_a_loss_with_a_ratio(echo: Path, loss: str, remedy: str) -> None:
    with pytest.raises(RecipeError, match="this loss has no ratio") as caught:
        load(echo, ["stages.1.replay={}", f"stages.1.loss={loss}"])
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "n", "says"),
    [
        ([], 0, ""),
        (["stages.1.loss={kind: min_entropy}"], 1, "looks at no advantage"),
        (["stages.1.loss={kind: min_entropy}", ALL_GROUPS], 0, ""),
        (["stages.1.loss={kind: shiq}", ALL_GROUPS], 1, "grpo gives others"),
        (["stages.1.loss={kind: shiq}", ALL_GROUPS, CENTRED], 0, ""),
        (["stages.1.loss={kind: ppo_clip, kl: k2}"], 1, "measured only"),
        (["stages.1.loss={kind: kdrl, teacher: a/b, teach: silent_groups}", ALL_GROUPS], 0, ""),
        (["stages.1.loss={kind: nft}", CENTRED, "rewards={a: {kind: outcome}}"], 0, ""),
        (["stages.1.loss={kind: nft}", CENTRED, "rewards={a: {kind: outcome, weight: 2}}"], 1, "weights [2.0]"),
    ],
)
def test_loss_tells_what_is_probably_not_meant(echo: Path, overrides: list[str], n: int, says: str) -> None:
    found = said(echo, *overrides)
    assert len(found) == n and all(says in text for text in found)


def test_traits_of_a_loss_are_those_it_declares() -> None:
    assert LossNeeds(GSPO()).needs_whole == "trajectory" and not LossNeeds(GSPO()).needs_fresh_samples
    assert LossNeeds(Reinforce()).needs_fresh_samples and LossNeeds(Reinforce()).bounds_ratio
    assert LossNeeds(object()).reductions == ()
