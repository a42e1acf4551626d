"""What a recipe is told about its loss: refused where it cannot work, cautioned where it is probably not meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions

SUMMED = "stages.1.reduction={kind: seq_mean_token_sum}"
CENTRED = "stages.1.advantage={kind: dr_grpo}"
MANY = "stages.1.epochs=2"
UNWEIGHTED = "rewards.right.weight=0"
KEPT = "stages.1.filters.drop_zero_advantage=false"
PER_TRAJECTORY = "stages.1.reduction={kind: seq_mean_token_mean}"


def said(path: Path, *overrides: str) -> list[str]:
    return cautions(load(path, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [UNWEIGHTED, KEPT, "stages.1.loss={kind: kdrl, teacher: a/b}"],
        [UNWEIGHTED, KEPT, "stages.1.loss={kind: min_entropy}"],
        [UNWEIGHTED, "stages.1.self_certainty={weight: 1}"],
        ["stages.1.rewards={right: 0}", "stages.1.self_certainty={weight: 1}"],
        ["stages.1.rewards={right: 1}", "stages.1.loss={kind: kdrl, teacher: a/b}"],
    ],
)
def test_what_learns_from_something_else_than_the_score_needs_no_weighted_reward(
    echo: Path, overrides: list[str]
) -> None:
    load(echo, overrides)


@pytest.mark.parametrize(
    ("overrides", "where", "expected"),
    [
        (["stages.1.loss={kind: nft}"], "stages[1].advantage.kind", "dr_grpo"),
        (["stages.1.loss={kind: nft}", "stages.1.advantage={kind: rloo}"], "stages[1].advantage.kind", "dr_grpo"),
        (["stages.1.loss={kind: cpgd, drift_coef: 0, max_drift: 1}"], "stages[1].loss.max_drift", "drift_coef is 0"),
        (["stages.1.loss={kind: a_lol, ratio: none, clip_low: 0.5}"], "stages[1].loss.clip_low", "ratio is none"),
        (
            [CENTRED, "stages.1.loss={kind: nft, negative_weight: 0, min_negative: 0.5}"],
            "stages[1].loss.min_negative",
            "negative_weight is 0",
        ),
        (["stages.1.loss={kind: min_entropy, entropy_coef: 0.1}"], "stages[1].loss", "raises the entropy"),
        (["stages.1.loss={kind: kdrl}"], "stages[1].loss.teacher", "teacher"),
        (["stages.1.loss={kind: kdrl, teacher: ./nowhere}"], "stages[1].loss.teacher", "no such folder"),
        (
            ["stages.1.loss={kind: kdrl, teacher: a/b, correct_above: 1}"],
            "stages[1].loss.correct_above",
            "teach is all",
        ),
        (
            ["stages.1.loss={kind: kdrl, teacher: a/b, teach: silent_groups}"],
            "stages[1].filters.drop_zero_advantage",
            "false with loss.teach: silent_groups",
        ),
        ([UNWEIGHTED], "rewards", "at least one reward with a weight"),
        ([UNWEIGHTED, "stages.1.loss={kind: kdrl, teacher: a/b, teach: wrong}"], "rewards", "has weight 0"),
        (
            [UNWEIGHTED, "stages.1.loss={kind: kdrl, teacher: a/b}"],
            "stages[1].filters.drop_zero_advantage",
            "false where no reward has a weight",
        ),
        (
            ["stages.1.rewards={right: 0}", "stages.1.loss={kind: min_entropy}"],
            "stages[1].filters.drop_zero_advantage",
            "every group has equal scores",
        ),
        (["stages.1.loss={kind: ppo_clip, clip_high: 0.2}"], "stages[1].loss.clip_high", "every ratio is 1"),
        (["stages.1.loss={kind: reinforce, max_weight: 2}"], "stages[1].loss.max_weight", "every ratio is 1"),
        (["stages.1.loss={kind: rover, next_weight: 0.5}"], "stages[1].loss.next_weight", "every ratio is 1"),
        (["stages.1.loss={kind: luffy}"], "stages[1].loss.kind", "group_demonstrations: {per_group: 1}"),
        (["stages.1.loss={kind: luffy, shaping: 0}"], "stages[1].loss.shaping", "more than 0"),
    ],
)
def test_what_cannot_work_is_refused(echo: Path, overrides: list[str], where: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(echo, overrides)
    assert caught.value.where == where and expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["loss={kind: gspo}"], "reduction is token_mean, and gspo is defined with seq_mean_token_mean"),
        (["loss={kind: rebel}"], "rebel is defined with seq_mean_token_sum"),
        (["loss={kind: min_entropy}"], "drop_zero_advantage to false"),
        (["loss={kind: min_entropy}", "filters.drop_zero_advantage=false", "epochs=2"], "right for the first"),
        (
            ["loss={kind: a_lol, ratio: none}", "epochs=2", "reduction={kind: seq_mean_token_sum}"],
            "right for the first",
        ),
        (["loss={kind: ppo_clip, kl: k3}"], "measured only"),
        (["loss={kind: shiq}"], "needs advantages that are scores minus a baseline, grpo gives others: use dr_grpo"),
        (["loss={kind: rover}", "advantage={kind: gigpo}", "epochs=2"], "gigpo gives others: use dr_grpo"),
        (["loss={kind: kdrl, teacher: a/b}"], "teaches attempts of any group"),
        (["loss={kind: shiq}"], "keeps what scores as expected where it is"),
        (["loss={kind: shiq}", "reduction={kind: seq_mean_token_mean}"], "shiq is defined with seq_mean_token_sum"),
    ],
)
def test_what_is_probably_not_meant_is_cautioned(echo: Path, overrides: list[str], text: str) -> None:
    [one] = [t for t in said(echo, *(f"stages.1.{o}" for o in overrides)) if text in t]
    assert one.startswith("stages[1]")


def test_an_overlong_that_no_episode_can_reach_is_an_error(echo: Path) -> None:
    # 3 turns of at most 8 tokens
    with pytest.raises(RecipeError) as caught:
        load(echo, ["rewards.long={kind: overlong, max_tokens: 30, buffer: 6}", "limits.max_generations_per_turn=1"])
    assert caught.value.where == "rewards.long.max_tokens" and "= 24 sampled tokens" in caught.value.expected
    load(echo, ["rewards.long={kind: overlong, max_tokens: 30, buffer: 7}", "limits.max_generations_per_turn=1"])
    load(echo, ["rewards.long={kind: overlong, max_tokens: 30, buffer: 6}", "limits.max_generations_per_turn=2"])


def test_scores_that_are_not_right_or_wrong_are_cautioned(echo: Path) -> None:
    nft = ["stages.1.loss={kind: nft}", CENTRED]
    assert said(echo, *nft) == []
    [text] = said(echo, *nft, "rewards.cost={kind: turn_cost, weight: 0.5}")
    assert "0 or 1" in text and "[1.0, 0.5]" in text
    assert said(echo, *nft, "rewards.cost={kind: turn_cost, weight: 0}") == []  # measured, not part of the score
    load(echo, ["stages.1.loss={kind: nft}", "stages.1.advantage={kind: grpo, normalize_std: false}"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.1.loss={kind: gspo, clip_high: 0.01}", PER_TRAJECTORY, "stages.1.epochs=2"],
        ["stages.1.loss={kind: rebel}", SUMMED, CENTRED],
        ["stages.1.loss={kind: a_lol}", SUMMED, CENTRED, "stages.1.minibatches=2"],
        ["stages.1.loss={kind: cispo, clip_high: 4}", "stages.1.epochs=2"],
        ["stages.1.loss={kind: min_entropy}", "stages.1.filters.drop_zero_advantage=false"],
        ["stages.1.loss={kind: shiq}", SUMMED, CENTRED, "stages.1.filters.drop_zero_advantage=false"],
        ["stages.1.loss={kind: rover, clip: 0.2}", "stages.1.advantage={kind: grpo, normalize_std: false}", MANY],
        ["stages.1.loss={kind: kdrl, teacher: a/b, teach: wrong}", "stages.1.filters.drop_zero_advantage=false"],
        # The engine's log-probs are the old ones: the ratio of the only update is not 1.
        ["stages.1.loss={kind: ppo_clip, clip_high: 0.2}", "engine={kind: vllm}", "stages.1.correction={kind: bypass}"],
    ],
)
def test_what_is_meant_is_not_cautioned(echo: Path, overrides: list[str]) -> None:
    assert said(echo, *overrides) == []
