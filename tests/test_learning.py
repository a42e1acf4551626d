"""Every estimator with every loss learns a small task from a weak start, in seconds; one seed gives one curve."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf.catalog import CATALOG
from tests.combinations import (
    ACTS,
    CRITIC,
    ELSEWHERE,
    ESTIMATORS,
    LOSS_ACTS,
    LOSSES,
    OTHER_LOSSES,
    OTHERS,
    TOLD_CRITIC,
    TURN_CRITIC,
    WITH_CRITIC,
    WITH_MECHANISM,
    WITH_TOLD_CRITIC,
    WITH_TURN_CRITIC,
    stage_of_loss,
)
from tests.environments import toytext
from tests.tiers import tiered
from tests.training import errands, runs

#: Demonstrations of which most actions are random: the policy that comes of them knows the words and little else.
SUPERVISED = {
    "kind": "supervised",
    "n_demonstrations": 256,
    "random_share": 0.7,
    "epochs": 12,
    "batch_size": 16,
    "optimizer": {"lr": 5.0e-3},
}
POLICY_GRADIENT = {
    "kind": "policy_gradient",
    "tasks_per_step": 8,
    "group_size": 8,
    "optimizer": {"lr": 6.0e-3, "schedule": "linear", "min_lr_ratio": 0.2},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy that was shown spoilt demonstrations: says the two words in about a quarter of the tasks."""
    folder = tmp_path_factory.mktemp("start")
    done = runs.run(runs.write(folder, [SUPERVISED]), folder / "run")
    assert 0.1 < done.result["success_after"] < 0.4
    return runs.newest(done.folder) / "policy"


def learn(start: Path, folder: Path, seed: int = 0, world: str = "", rewards: Any = None, **stage: Any) -> runs.Done:
    """A policy-gradient stage from the saved policy; `world` is one of `errands.py`."""
    changes = {"policy": {"kind": "pretrained", "path": str(start)}, "seed": seed}
    changes |= {"rewards": rewards} if rewards else {}
    changes |= {"environment": {"kind": f"{errands.__file__}:{world}"}} if world else {}
    path = runs.write(folder, [{**POLICY_GRADIENT, **stage}], **changes)
    return runs.run(path, folder / "run")


def assert_learnt(done: runs.Done, proof: tuple[str, float | str], least: float = 0.9) -> None:
    """Success rises from less than 40% to more than `least`, and what is to do it acted."""
    assert done.result["success_before"] < 0.4 and done.result["success_after"] > least, success(done)
    assert runs.ever_above(done.folder, *proof), proof


def success(done: runs.Done) -> list[float]:
    return runs.curve(done.folder, "rollout/success")


@pytest.mark.parametrize(
    ("estimator", "loss"),
    tiered(product(ESTIMATORS, LOSSES), ("grpo", "ppo_clip"), ("gigpo", "ppo_clip"), ("rloo", "reinforce")),
)
def test_every_estimator_learns_with_every_loss(start: Path, tmp_path: Path, estimator: str, loss: str) -> None:
    done = learn(start, tmp_path, advantage={"kind": estimator}, **LOSSES[loss])
    assert done.result["success_before"] < 0.4 and done.result["success_after"] > 0.9, success(done)
    assert done.result["interval_before"][1] < done.result["interval_after"][0]
    # What the engine sampled from is what the trainer computes, in every step and not only in the first.
    assert max(runs.curve(done.folder, "loss/sampler_logprob_diff_max")) < 1e-3
    assert set(runs.curve(done.folder, "rollout/n_infra_errors")) == {0.0}
    assert set(runs.curve(done.folder, "optimizer/n_skipped")) == {0.0}
    assert_learnt(done, ACTS[estimator])
    assert_learnt(done, LOSS_ACTS[loss])


#: Keys with which the others act in this world: of eight attempts, one that differs is 1/7 off the mean of the others.
ACTING = {"loop": {"min_advantage": 0.2}, "hrpo": {"reward": "word"}}


@pytest.mark.parametrize("estimator", [kind for kind in OTHERS if kind != "task_normalised"])
def test_every_other_estimator_learns(start: Path, tmp_path: Path, estimator: str) -> None:
    # Each word is rewarded as it is said: there are turns to tell apart.
    rewards = {"right": {"kind": "environment"}, "word": {"kind": "environment", "weight": 0}}
    advantage = {"kind": estimator, **OTHERS[estimator], **ACTING.get(estimator, {})}
    assert_learnt(learn(start, tmp_path, rewards=rewards, advantage=advantage, **LOSSES["ppo_clip"]), ACTS[estimator])


@pytest.mark.parametrize("estimator", WITH_MECHANISM)
def test_every_estimator_learns_with_what_it_is_about(start: Path, tmp_path: Path, estimator: str) -> None:
    assert_learnt(learn(start, tmp_path, **{**LOSSES["ppo_clip"], **WITH_MECHANISM[estimator]}), ACTS[estimator])


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 5))]


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_of_two_types_with_rewards_of_two_scales_are_learnt(start: Path, tmp_path: Path, seed: int) -> None:
    # Dr.GRPO alone would follow those whose rewards are a hundred times as large.
    advantage = {"kind": "task_normalised", "inner": {"kind": "dr_grpo"}}
    done = learn(start, tmp_path, seed, "Scales", advantage=advantage, **LOSSES["ppo_clip"])
    assert_learnt(done, ACTS["task_normalised"])


@pytest.mark.parametrize("seed", SEEDS)
def test_slow_and_quick_turns_are_learnt(start: Path, tmp_path: Path, seed: int) -> None:
    advantage = {"kind": "duration_aware", "inner": {"kind": "grpo"}}
    done = learn(start, tmp_path, seed, "Slow", advantage=advantage, **LOSSES["ppo_clip"])
    assert_learnt(done, ACTS["duration_aware"])
    assert set(runs.curve(done.folder, "credit/n_untimed_trajectories")) == {0.0}


def test_hicra_learns_with_planning_tokens_that_the_policy_says(start: Path, tmp_path: Path) -> None:
    names = AutoTokenizer.from_pretrained(str(start))
    grams = [names.encode(word, add_special_tokens=False) for word in ("red", "blue")]
    done = learn(start, tmp_path, advantage={"kind": "hicra", "grams": grams}, **LOSSES["ppo_clip"])
    assert_learnt(done, ACTS["hicra"])


#: A model of the critic's own, a head on the policy's backbone, and one whose gradient goes on into that backbone.
CRITICS: dict[str, dict[str, Any]] = {
    "own": dict(CRITIC),
    "head": {"backbone": "policy", "optimizer": {"lr": 2.0e-2}},
    "backbone": {"backbone": "policy", "gradient": "backbone", "head_lr": 2.0e-2, "optimizer": {"lr": 1.0e-3}},
}


@pytest.mark.parametrize(
    ("estimator", "critic"),
    [*((estimator, "own") for estimator in WITH_CRITIC), ("gae", "head"), ("turn_gae", "backbone")],
)
def test_every_estimator_with_a_critic_learns(start: Path, tmp_path: Path, estimator: str, critic: str) -> None:
    advantage = {"kind": estimator, **WITH_CRITIC[estimator]}
    done = learn(start, tmp_path, advantage=advantage, critic=CRITICS[critic], **LOSSES["ppo_clip"])
    assert_learnt(done, ACTS[estimator])
    values, returns = (runs.curve(done.folder, f"critic/{name}_mean") for name in ("value", "return"))
    assert values[0] == 0.0 and sum(values[-3:]) == pytest.approx(sum(returns[-3:]), rel=0.15)
    explained = runs.curve(done.folder, "critic/explained_variance")
    if critic == "own":
        assert explained[0] == 0.0 and sum(explained[-3:]) / 3 > 0.3, explained
    assert runs.curve(done.folder, "critic/loss")[-1] < runs.curve(done.folder, "critic/loss")[0]


@pytest.mark.parametrize("estimator", tiered(WITH_TURN_CRITIC))
def test_every_estimator_with_a_critic_of_turns_learns(start: Path, tmp_path: Path, estimator: str) -> None:
    advantage = {"kind": estimator, **WITH_TURN_CRITIC[estimator]}
    stage = {**LOSSES["reinforce"], "steps": 18}
    done = learn(start, tmp_path, advantage=advantage, critic=dict(TURN_CRITIC), **stage)
    assert_learnt(done, ACTS[estimator], 0.85)
    losses, explained = (runs.curve(done.folder, f"critic/{name}") for name in ("q_loss", "explained_variance"))
    assert losses[-1] < 0.2 * losses[0] and explained[0] == 0.0 and sum(explained[-3:]) / 3 > 0.3, explained


@pytest.mark.parametrize("estimator", tiered(WITH_TOLD_CRITIC))
def test_every_estimator_with_a_critic_that_knows_the_answer_learns(
    start: Path, tmp_path: Path, estimator: str
) -> None:
    advantage = {"kind": estimator, **WITH_TOLD_CRITIC[estimator]}
    done = learn(start, tmp_path, advantage=advantage, critic=dict(TOLD_CRITIC), **{**LOSSES["ppo_clip"], "steps": 16})
    assert_learnt(done, ACTS[estimator])
    losses, accuracy = (runs.curve(done.folder, f"critic/{name}") for name in ("pair_loss", "pair_accuracy"))
    assert losses[-1] < 0.2 * losses[0] and accuracy[0] == 0.5 and sum(accuracy[-3:]) / 3 > 0.9, accuracy


@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_every_other_loss_learns(start: Path, tmp_path: Path, loss: str) -> None:
    stage = stage_of_loss(loss)
    if loss == "kdrl":  # the start itself is a teacher of the same tokenizer, and holds back what drifts
        stage["loss"] = {**stage["loss"], "teacher": str(start)}
    done = learn(start, tmp_path, **stage)
    assert_learnt(done, LOSS_ACTS[loss])
    assert set(runs.curve(done.folder, "optimizer/n_skipped")) == {0.0}


@pytest.mark.parametrize("seed", SEEDS)
def test_more_certainty_alone_raises_success(start: Path, tmp_path: Path, seed: int) -> None:
    # What the start is most certain of is mostly right, and no reward is looked at. It collapses after more updates.
    stage = {"loss": {"kind": "min_entropy"}, "filters": {"drop_zero_advantage": False}, "temperature": 0.5}
    optimizer = {"lr": 2.0e-3, "schedule": "linear", "min_lr_ratio": 0.2}
    done = learn(start, tmp_path, seed, steps=8, optimizer=optimizer, **stage)
    assert_learnt(done, LOSS_ACTS["min_entropy"], 0.5)
    assert done.result["interval_before"][1] < done.result["interval_after"][0]
    entropies = runs.curve(done.folder, "loss/entropy")
    assert entropies[-1] < 0.5 * entropies[0], entropies


def test_every_loss_of_the_catalogue_is_asked_to_learn() -> None:
    assert {*LOSSES, *OTHER_LOSSES, "min_entropy"} == set(LOSS_ACTS) == set(CATALOG["loss"])


def test_every_estimator_of_the_catalogue_is_asked_to_learn() -> None:
    assert {
        *ESTIMATORS, *OTHERS, *WITH_MECHANISM, *ELSEWHERE, *WITH_CRITIC, *WITH_TURN_CRITIC, *WITH_TOLD_CRITIC,
        "duration_aware", "hicra",
    } == set(ACTS) == set(CATALOG["advantage"])  # fmt: skip
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text("utf-8"), test


def test_later_updates_of_the_same_samples_move_the_ratios(start: Path, tmp_path: Path) -> None:
    done = learn(start, tmp_path, **{**LOSSES["ppo_clip"], "steps": 2})
    assert min(runs.curve(done.folder, "loss/ratio_max")) > 1.05
    assert max(runs.curve(done.folder, "loss/clip_high_share")) > 0
    assert runs.curve(done.folder, "optimizer/n_updates") == [4.0, 8.0]


def test_one_seed_gives_one_curve(start: Path, tmp_path: Path) -> None:
    stage = {**LOSSES["ppo_clip"], "advantage": {"kind": "gigpo"}, "steps": 4}
    first, again, other = (
        learn(start, tmp_path / name, seed, **stage) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert runs.lines(first.folder) == runs.lines(again.folder)
    assert runs.weights(runs.newest(first.folder)) == runs.weights(runs.newest(again.folder))
    assert success(first) != success(other)


def test_nothing_is_learnt_where_all_attempts_score_the_same(start: Path, tmp_path: Path) -> None:
    # A reward that is 1 whatever happens: every group is silent, no update is made, the weights stay to the bit.
    path = runs.write(
        tmp_path, [{**POLICY_GRADIENT, "steps": 2}], policy={"kind": "pretrained", "path": str(start)},
        rewards={"same": {"kind": "outcome", "failure": 1.0}},
    )  # fmt: skip
    done = runs.run(path, tmp_path / "run")
    assert runs.curve(done.folder, "batch/n_dropped_groups") == [8.0, 8.0]
    assert runs.curve(done.folder, "optimizer/n_updates") == [0.0, 0.0]
    assert runs.weights(runs.newest(done.folder)) == runs.weights(start.parent)
    assert done.result["success_before"] == done.result["success_after"]


@pytest.mark.extended
def test_a_frozen_lake_is_crossed_as_well_as_it_can_be(tmp_path: Path) -> None:
    rows, horizon = ("SFFF", "FHFF", "FFFG"), 12
    best = toytext.optimal_value(toytext.ToyText(rows=rows, horizon=horizon))
    path = runs.write(
        tmp_path,
        [
            SUPERVISED | {"n_demonstrations": 128, "random_share": 0.4, "epochs": 10, "optimizer": {"lr": 1.0e-2}},
            POLICY_GRADIENT | {"steps": 14, "minibatches": 2, "advantage": {"kind": "gigpo"}},
        ],
        environment={"kind": f"{toytext.__file__}:ToyText", "horizon": horizon, "rows": list(rows)},
        agent={"kind": "chat", "system": "", "memory": {"kind": "window", "turns": 0}},
        rewards={"goal": {"kind": "outcome"}},
        limits={"max_turns": horizon, "max_tokens": 6},
        evaluation={"n_tasks": 100},
    )
    done = runs.run(path, tmp_path / "run")
    assert best == 1.0, "without slips the best policy always arrives"
    assert done.result["success_before"] < 0.3 and done.result["success_after"] >= 0.95 * best, success(done)
