"""Models of outcomes and of steps: their labels, their gradient, what they learn, and what they are as rewards."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards.combinators.parts import with_parts
from rewards.models.model_folder import logits
from rewards.models.reward_model import OutcomeModelScore, ProcessModelScore, RewardModelScore
from rewards.models.step_rows import step_rows
from rlhf.build.train import train
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import DataError, ModelError, RecipeError, RewardError, TrainingError
from rlhf.recipe import load
from rlhf.recipe.builder import build_part
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.terminal import CleanConsole
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.contrib.reward_model_pointwise import backward, right_before_wrong, updates
from rlhf.training.contrib.step_labels import Labelled, labelled, soft_mean
from rlhf.training.hooks.callbacks import Callbacks, StepInfo
from rlhf.training.reward_model_training import save, scoring_model
from rlhf.training.stages.reward_model import RewardModel
from tests.training import runs, tiny
from tests.training.test_attempts import OUTCOME, START

# --- labels ----------------------------------------------------------------------------------------------------------


def test_the_soft_mean_of_continuations_is_as_worked_by_hand() -> None:
    # Half right: ln((1 + e)/2) = .620115, ln((1 + e²)/2)/2 = .716890, near the mean for a small η. A quarter right:
    # ln((3 + e)/4) = .357374.
    assert soft_mean([0, 1], 1) == pytest.approx(0.620115, abs=1e-6)
    assert soft_mean([1, 0, 0, 1], 2) == pytest.approx(0.716890, abs=1e-6)
    assert soft_mean([0, 1], 0.01) == pytest.approx(0.501250, abs=1e-6)
    assert soft_mean([0, 0, 1, 0], 1) == pytest.approx(0.357374, abs=1e-6)
    assert soft_mean([0, 1], 0) == 0.5
    assert soft_mean([0, 0], 3) == 0.0 and soft_mean([1, 1], 3) == 1.0
    assert soft_mean([0.3], 5) == pytest.approx(0.3)
    for rewards, eta in (([], 1.0), ([1.0], -1.0)):
        with pytest.raises(DataError, match="soft mean is not defined"):
            soft_mean(rewards, eta)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(1e-3, 700), st.floats(1e-3, 700))
def test_the_soft_mean_lies_between_mean_and_best_and_rises_with_eta(r: list[float], a: float, b: float) -> None:
    low, high = sorted((a, b))
    values = [soft_mean(r, eta) for eta in (0.0, low, high)]
    assert sum(r) / len(r) - 1e-9 <= values[0] <= values[1] + 1e-9
    assert values[1] <= values[2] + 1e-9 and values[2] <= max(r) + 1e-9


def said(read: tuple[int, ...], *ids: int) -> Turn:
    return Turn(Action("x", (Generation(Prompt(read), ids, (0.0,) * len(ids), Finish.STOP, 0),)), "")


def branching() -> ScoredGroup:
    """Three attempts that say 5 first; of two of them that then say 6, one is right. A fourth says 7 and is wrong."""
    first, six, other = said((1,), 5), said((1, 5, 2), 6), said((1, 5, 2), 7)
    turns = [
        (first, six, said((1, 5, 2, 6, 2), 8)),
        (first, six, said((1, 5, 2, 6, 2), 9)),
        (first, other),
        (said((1,), 7),),
    ]
    totals = [1.0, 0.0, 0.0, 0.4]
    attempts = tuple(Trajectory("t", i, "", tuple(t), Outcome.FAILED) for i, t in enumerate(turns))
    return ScoredGroup("t", attempts, tuple(Score({}, (0.0,) * len(t), x) for t, x in zip(turns, totals, strict=True)))


def test_a_step_is_labelled_by_what_became_of_all_who_took_it() -> None:
    rows = list(labelled([branching()], steps=True, success_threshold=1.0, eta=0.0))
    # After 5: one of three is right; after 5, 6: one of two; the end of each attempt is its own.
    assert [row.labels for row in rows] == [
        pytest.approx((1 / 3, 1 / 2, 1.0)),
        pytest.approx((1 / 3, 1 / 2, 0.0)),
        pytest.approx((1 / 3, 0.0)),
        (0.0,),
    ]
    assert [row.ends for row in rows] == [(1, 3, 5), (1, 3, 5), (1, 3), (1,)]
    soft = [row.labels for row in labelled([branching()], steps=True, success_threshold=1.0, eta=1.0)]
    assert soft[0] == pytest.approx((math.log((2 + math.e) / 3), 0.620115, 1.0), abs=1e-6)


def test_an_outcome_is_one_label_at_the_end() -> None:
    rows = list(labelled([branching()], steps=False, success_threshold=0.4, eta=0.0))
    assert [(row.ends, row.labels) for row in rows] == [((5,), (1.0,)), ((5,), (0.0,)), ((3,), (0.0,)), ((1,), (1.0,))]


def test_right_attempts_are_compared_with_the_wrong_ones_of_their_task() -> None:
    def row(task: str, right: bool, is_last: bool = True) -> Labelled:
        return Labelled(task, 0, (1,), (0,), (0.0,), right, is_last)

    rows = [row("a", True), row("a", False), row("a", False), row("a", True, False), row("b", True), row("c", False)]
    assert list(right_before_wrong(rows, [0.5, 0.2, 0.7, 9.0, 1.0, 1.0])) == [(True, "a"), (False, "a")]


# --- the gradient ----------------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_all_labels_however_they_are_divided() -> None:
    # p = (.9, .8, .3), labels (1, 1, 0): −(ln .9 + ln .8 + ln .7)/3 = .228393.
    worked = -(math.log(0.9) + math.log(0.8) + math.log(0.7)) / 3
    assert worked == pytest.approx(0.228393, abs=1e-6)
    x = torch.tensor([math.log(p / (1 - p)) for p in (0.9, 0.8, 0.3)])
    labels = torch.tensor([1.0, 1.0, 0.0])
    assert float(torch.nn.functional.binary_cross_entropy_with_logits(x, labels)) == pytest.approx(worked, abs=1e-6)
    policy = tiny.policy()
    groups = tiny.collect(policy, n_tasks=2, group_size=3)
    rows = list(labelled(groups, steps=True, success_threshold=1.0, eta=1.0))
    torch.manual_seed(0)
    model = scoring_model(policy, "process")
    found = []
    for at_once in (1, 2, 6):
        model.zero_grad(set_to_none=True)
        loss = backward(model, rows, at_once)
        found.append((loss, tiny.gradient(model)))
    p = [1 / (1 + math.exp(-x)) for xs in logits(model, [(r.token_ids, r.ends) for r in rows], 2) for x in xs]
    y = [label for row in rows for label in row.labels]
    by_hand = -sum(b * math.log(a) + (1 - b) * math.log(1 - a) for a, b in zip(p, y, strict=True)) / len(y)
    for loss, gradient in found:
        assert loss == pytest.approx(by_hand, abs=1e-6)
        assert torch.allclose(gradient, found[0][1], atol=1e-7)


def test_training_repeats_itself_and_leaves_no_gradient_behind() -> None:
    policy = tiny.policy()
    rows = list(labelled(tiny.collect(policy, n_tasks=2, group_size=3), steps=True, success_threshold=0.5, eta=1.0))
    stage = RewardModel(objective="process", epochs=3, batch_size=4, pairs_per_microbatch=2, optimizer=AdamW(lr=1e-2))
    found = []
    for checkpointing in (False, False, True):
        torch.manual_seed(0)
        model = scoring_model(policy, "process")
        made = RewardModel(**{**vars(stage), "gradient_checkpointing": checkpointing})
        losses = [values["reward_model/loss"] for values in updates(model, rows, made, seed=3)]
        assert len(losses) == made.n_updates(len(rows)) and losses[-1] < losses[0]
        assert all(p.grad is None for p in model.parameters()) and not model.training
        found.append((losses, tiny.parameters(model)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert found[2][0] == pytest.approx(found[0][0], abs=1e-5)


# --- as rewards ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, ScoredGroup]:
    """The folder of a model of steps, the model, and a group it can read."""
    folder, policy = tmp_path_factory.mktemp("steps"), tiny.policy()
    [group] = tiny.collect(policy, n_tasks=1, group_size=4)
    torch.manual_seed(0)
    model = scoring_model(policy, "process")
    save(folder, model, policy.tokenizer)
    return folder, model, group


def test_each_turn_earns_what_it_did_to_the_probability(asked: tuple[Path, Any, ScoredGroup]) -> None:
    folder, model, group = asked
    reward = ProcessModelScore(path=str(folder), batch_size=3)
    reward.check_policy(tiny.policy().tokenizer)
    for trajectory, verdict in zip(group.trajectories, reward.over_group(Task("t"), group.trajectories), strict=True):
        [row] = step_rows(trajectory)
        [numbers] = logits(model, [(row.token_ids, row.ends)], 1)
        p = [1 / (1 + math.exp(-x)) for x in numbers]
        assert verdict.per_turn == pytest.approx([b - a for a, b in zip([0.0, *p], p, strict=False)], abs=1e-5)
        assert verdict.value == pytest.approx(p[-1], abs=1e-5)
        least = ProcessModelScore(path=str(folder), aggregation="min").over_group(Task("t"), [trajectory])[0]
        assert (least.value, least.per_turn) == (pytest.approx(min(p), abs=1e-5), None)


def test_a_model_of_something_else_is_refused(asked: tuple[Path, Any, ScoredGroup]) -> None:
    folder, tokenizer = str(asked[0]), tiny.policy().tokenizer
    for wrong in (RewardModelScore(path=folder), OutcomeModelScore(path=folder)):
        with pytest.raises(ModelError, match="trained with another objective") as caught:
            wrong.check_policy(tokenizer)
        assert "objective: process" in caught.value.got and "process_model" in caught.value.hint


def test_what_cannot_be_read_is_an_error(asked: tuple[Path, Any, ScoredGroup]) -> None:
    silent = Trajectory("t", 3, "", (Turn(Action("x"), ""),), Outcome.FAILED)
    for reward in (ProcessModelScore(path=str(asked[0])), OutcomeModelScore(path=str(asked[0]))):
        with pytest.raises(RewardError, match="no sampled tokens") as caught:
            reward.over_group(Task("t"), [*asked[2].trajectories, silent])
        assert "attempt 3" in caught.value.where


def test_a_model_can_be_a_part_of_another_reward(asked: tuple[Path, Any, ScoredGroup]) -> None:
    folder, _, group = asked
    alone = ProcessModelScore(path=str(folder))
    part = {"reward": {"kind": "process_model", "path": str(folder)}, "weight": 2}
    whole = build_part("reward", {"kind": "combine", "parts": {"learned": part}}, "r", base=Path())
    scored = asyncio.run(score_group(Task("echoes/0"), group.trajectories, {"r": WeightedReward("r", 1.0, whole)}))
    values = [v.value for v in alone.over_group(Task("t"), group.trajectories)]
    assert [s.total for s in scored.scores] == pytest.approx([2 * x for x in values], abs=1e-5)
    assert [type(r).__name__ for _, r in with_parts("score", whole)] == ["Combine", "Part", "ProcessModelScore"]


# --- whole runs ------------------------------------------------------------------------------------------------------

STAGE: dict[str, Any] = {
    "kind": "reward_model", "objective": "process", "pairs": {"tasks": 128, "group_size": 9}, "eta": 0.0, "epochs": 6,
    "rollout": {"kind": "tree", "branches_per_round": 1, "continuations": 2}, "batch_size": 16,
    "optimizer": {"lr": 3.0e-3, "schedule": "linear"},
}  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> runs.Done:
    """A policy that solves some tasks, a model of its steps, and one of its outcomes."""
    folder = tmp_path_factory.mktemp("steps")
    outcome = {k: v for k, v in STAGE.items() if k not in ("rollout", "eta")} | {"objective": "outcome"}
    stages = [START | {"random_share": 0.5}, STAGE, outcome]
    changes: dict[str, Any] = {"policy": runs.BASE["policy"] | {"n_layers": 2}, "evaluation": {"n_tasks": 4}}
    return runs.run(runs.write(folder, stages, rewards=OUTCOME, **changes), folder / "run")


@pytest.mark.extended
def test_both_learn_to_tell_right_from_wrong(done: runs.Done) -> None:
    accuracies = runs.curve(done.folder, "reward_model/accuracy")
    assert len(accuracies) == 2 and min(accuracies) > 0.75, accuracies
    for name, of in (("1-reward_model", "process"), ("2-reward_model", "outcome")):
        folder = done.folder / "reward_model" / name
        kept = json.loads((folder / "held_out.json").read_text())
        assert kept["of"] == of and kept["n_held_out"] > 20 and sum(b["n"] for b in kept["bins"]) == kept["n"]
        assert json.loads((folder / "config.json").read_text())["rlhf_learns"] == of
        assert f"Reward model of {name}" in (done.folder / "report.html").read_text()
    assert done.said.count("held-out pairs of right and wrong") == 2
    n_labels, n_attempts = (runs.curve(done.folder, f"reward_model/n_{x}") for x in ("labels", "attempts"))
    assert n_labels[0] > n_attempts[0] and n_labels[1] == n_attempts[1]


def test_a_wrong_word_costs_its_own_turn(done: runs.Done) -> None:
    from rlhf.evaluation.store import read_trajectories

    folder = done.folder / "reward_model" / "1-reward_model"
    reward = ProcessModelScore(path=str(folder))
    records = [
        r for r in read_trajectories(done.folder / "trajectories", phase="train") if len(r.trajectory.turns) == 2
    ]
    lost = [r.trajectory for r in records if not r.trajectory.solved][:40]
    verdicts = reward.over_group(Task("t"), lost)
    # The first word was right and the second is wrong: what it took away is on the second turn.
    seconds = [v.per_turn[1] for v in verdicts if v.per_turn]
    assert len(seconds) > 10 and sum(seconds) / len(seconds) < -0.1


@pytest.mark.parametrize("name, kind", [("1-reward_model", "process_model"), ("2-reward_model", "outcome_model")])
def test_a_policy_learns_from_them(done: runs.Done, tmp_path: Path, name: str, kind: str) -> None:
    policy = {"kind": "pretrained", "path": str(runs.newest(done.folder) / "policy")}
    stage = {"kind": "policy_gradient", "steps": 8, "tasks_per_step": 8, "group_size": 8, "optimizer": {"lr": 3.0e-3}}
    rewards = {"learned": {"kind": kind, "path": str(done.folder / "reward_model" / name)}}
    learnt = runs.run(runs.write(tmp_path, [stage], policy=policy, rewards=rewards), tmp_path / "run")
    assert learnt.result["success_after"] > learnt.result["success_before"] + 0.1, learnt.result


def test_a_callback_that_raises_at_an_update_is_told_of_it_once_the_model_is_saved(tmp_path: Path) -> None:
    def bad(step: StepInfo) -> None:
        if "reward_model/loss" in step.metrics:
            raise KeyError("loss")

    short = {"kind": "reward_model", "objective": "outcome", "pairs": {"tasks": 24, "group_size": 6}, "epochs": 1}
    path = runs.write(
        tmp_path, [START | {"random_share": 0.5}, short], rewards=OUTCOME, evaluation={"n_tasks": 4, "before": False}
    )
    with pytest.raises(TrainingError, match="a callback raised"):
        train(load(path), tmp_path / "run", console=CleanConsole(file=io.StringIO()), callbacks=Callbacks.of(bad))
    assert (tmp_path / "run" / "reward_model" / "1-reward_model" / "held_out.json").exists()
    state = json.loads((runs.newest(tmp_path / "run") / "state.json").read_text())
    assert (state["stage"], state["finished"]) == (1, True)


def test_attempts_that_are_all_alike_are_nothing_to_learn_from(tmp_path: Path) -> None:
    stage = STAGE | {"success_threshold": 9.0, "pairs": {"tasks": 4, "group_size": 3}}
    with pytest.raises(TrainingError, match="all are correct, or all wrong"):
        runs.run(runs.write(tmp_path, [stage], rewards=OUTCOME, evaluation={"n_tasks": 4}), tmp_path / "run")


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"objective": "pairwise"}, ["stages[0].eta", "no effect"]),
        ({"objective": "outcome", "rollout": {"kind": "independent"}}, ["stages[0].eta", "no effect"]),
        ({"objective": "outcome"}, ["stages[0].rollout", "no effect"]),
        ({"centring": 0.1}, ["stages[0].centring", "no effect"]),
        ({"pairs": {"group_size": 9, "margin": 0.1}}, ["stages[0].pairs.margin", "no effect"]),
        ({"pairs": {"file": "x.jsonl"}}, ["stages[0].pairs.file", "no effect"]),
        ({"pairs": {"group_size": 7}}, ["stages[0].pairs.group_size", "multiple"]),
        ({"objective": "turns"}, ["stages[0].objective", "process"]),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path: Path, stage: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(runs.write(tmp_path, [STAGE | stage]))
    assert all(text in str(caught.value) for text in says), caught.value
