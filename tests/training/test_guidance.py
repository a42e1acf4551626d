"""Demonstrations beside attempts (LUFFY), and between steps (ReLIFT): what is trained on, told apart, and resumed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.data.generation import DEMONSTRATED
from rlhf.errors import RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.losses.reduction import Reduction
from rlhf.recipe import load
from rlhf.recipe.checks import cautions
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.imitate_failed_tasks import FailedTaskQueue, ImitateFailed
from tests import test_resume as resume
from tests.credit.test_guided import group as guided_group
from tests.tiers import tiered
from tests.training import runs, tiny, words

#: Knows the words, and solves about one task in ten.
SUPERVISED = {"kind": "supervised", "n_demonstrations": 128, "random_share": 0.85, "epochs": 8, "batch_size": 16,
              "optimizer": {"lr": 5.0e-3}}  # fmt: skip
STAGE: dict[str, Any] = {"kind": "policy_gradient", "steps": 6, "tasks_per_step": 4, "group_size": 4,
                         "checkpoint_every": 2, "optimizer": {"lr": 4.0e-3}}  # fmt: skip
LUFFY = {"loss": {"kind": "luffy", "entropy_coef": 0.001}, "advantage": {"kind": "guided"}, "group_demonstrations": {}}
RELIFT = {"imitate_failed": {"size": 3}}
BOTH = LUFFY | RELIFT
DROPOUT = {"rank": 2, "dropout": 0.2}
FALLING = {"optimizer": {"lr": 4.0e-3, "schedule": "linear"}}
OUTCOME = {"right": {"kind": "outcome"}}


def learn(folder: Path, stage: dict[str, Any], **changes: Any) -> runs.Done:
    path = runs.write(folder, [SUPERVISED, STAGE | stage], **{"rewards": OUTCOME, **changes})
    return runs.run(path, folder / "run")


def steps(done: runs.Done) -> list[dict[str, Any]]:
    return [line for line in runs.log(done.folder) if "rollout/success" in line]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_tokens_of_demonstrations_are_off_policy() -> None:
    group = guided_group([0.0, 1.0], [1.0])
    credit = tiny.credit([group], DrGRPO())
    for layout in ("trajectory", "generation"):
        samples, _ = make_samples([group], credit, layout)  # type: ignore[arg-type]
        assert [s.off_policy is not None for s in samples] == [False, False, True]
        assert np.array_equal(samples[2].off_policy, samples[2].mask) and not samples[2].sampler_logprobs.any()


# --- LUFFY -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> runs.Done:
    return learn(tmp_path_factory.mktemp("guided"), LUFFY)


def test_figures_of_the_policy_are_of_its_own_attempts(guided: runs.Done) -> None:
    for line in steps(guided):
        found = list(read_trajectories(guided.folder / "trajectories", phase="train", steps=[line["step"]]))
        own = [r for r in found if not r.trajectory.is_demonstration]
        shown = [r for r in found if r.trajectory.is_demonstration]
        assert (
            len(own) == line["rollout/n_episodes"] == 16
            and len(shown) == line["group_demonstrations/n_trajectories"] == 4
        )
        assert line["rollout/success"] == pytest.approx(sum(r.trajectory.solved for r in own) / 16)
        assert line["rollout/n_tokens"] == sum(r.trajectory.n_tokens for r in own)
        assert line["reward/right"] == pytest.approx(sum(r.trajectory.solved for r in own) / 16)
        assert line["group_demonstrations/return_mean"] == 1.0 and line["group_demonstrations/n_unguided_groups"] == 0.0
        for record in shown:
            assert record.trajectory.solved and record.trajectory.attempt == 4 and record.score is not None
            assert {g.policy_version for g in record.trajectory.generations} == {DEMONSTRATED}
            assert record.score.total == 1.0
        assert all(r.trajectory.attempt < 4 for r in own)
    assert guided.result["n_episodes"] == 6 * 16
    assert max(runs.curve(guided.folder, "loss/sampler_logprob_diff_max")) < 1e-3, "demonstrations have no sampler"


def test_advantages_are_over_the_group(guided: runs.Done) -> None:
    records = list(read_trajectories(guided.folder / "trajectories", phase="train", steps=[1]))
    by_task: dict[str, list[Any]] = {}
    for record in records:
        by_task.setdefault(record.task_id, []).append(record)
    assert len(by_task) == 4
    for members in by_task.values():
        mean = sum(r.score.total for r in members) / 5
        for record in members:
            for row in record.advantages:
                assert list(row) == pytest.approx([record.score.total - mean] * len(row))


#: Three words in a row: hardly an attempt of the weak policy gets there, and what it tries on its own teaches little.
HARD = {"environment": {"kind": "./words.py:Words", "n_turns": 3}, "limits": {"max_turns": 4, "max_tokens": 6}}
LONG = {"steps": 30, "tasks_per_step": 8, "optimizer": {"lr": 1.2e-2}}


@pytest.fixture(scope="module")
def unguided(tmp_path_factory: pytest.TempPathFactory) -> runs.Done:
    return learn(tmp_path_factory.mktemp("unguided"), LONG, **HARD)


def test_demonstrations_among_attempts_teach_what_attempts_do_not(tmp_path: Path, unguided: runs.Done) -> None:
    shown = learn(tmp_path, LONG | LUFFY | {"advantage": {"kind": "guided", "baseline": "own"}}, **HARD)
    assert unguided.result["success_before"] == shown.result["success_before"] < 0.1
    assert unguided.result["success_after"] < 0.4
    assert shown.result["success_after"] > 0.8, runs.curve(shown.folder, "rollout/success")


def test_a_task_without_a_demonstration_is_trained_on_as_it_is(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [SUPERVISED, STAGE | LUFFY], rewards=OUTCOME)
    source = (tmp_path / "words.py").read_text()
    plan = "    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:\n"
    lost = plan + "        if task.seed < 1000 and task.seed % 2:\n            return None\n"
    assert plan in source
    (tmp_path / "words.py").write_text(source.replace(plan, lost))
    done = runs.run(path, tmp_path / "run")
    counts = (
        runs.curve(done.folder, "group_demonstrations/n_trajectories"),
        runs.curve(done.folder, "group_demonstrations/n_unguided_groups"),
    )
    assert all(a + b == 4 for a, b in zip(*counts, strict=True)) and 0 < sum(counts[0]) < 24
    shown = [r for r in read_trajectories(done.folder / "trajectories", phase="train") if r.trajectory.is_demonstration]
    assert all(int(r.task_id.split("/")[1]) % 2 == 0 for r in shown)


# --- ReLIFT ----------------------------------------------------------------------------------------------------------


def test_tasks_that_failed_wait_until_there_are_enough() -> None:
    # Groups [0, 0], [1, 0], [0, 0] of tasks a, b, c: a and c are imitated.
    hard = FailedTaskQueue(ImitateFailed(size=2))
    assert hard.put(hard.candidates(["a", "c"])) == ["a", "c"]
    hard.learn(0)
    assert hard.waiting == []
    assert hard.put(hard.candidates(["d"])) == []
    hard.learn(0)
    assert hard.put(hard.candidates(["d"])) == [], "each waits once"
    hard.learn(0)
    assert hard.put(hard.candidates(["e", "f", "d"])) == ["d", "e"], "the longest waiting first"
    assert hard.waiting == ["d"], "a step that is not finished changes nothing"
    hard.learn(0)
    assert hard.waiting == ["f"]


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=4), max_size=8), st.integers(1, 4), st.integers(0, 8))
def test_who_waits_is_remembered(failed: list[list[str]], size: int, stopped: int) -> None:
    whole, resumed = FailedTaskQueue(ImitateFailed(size=size)), FailedTaskQueue(ImitateFailed(size=size))
    for i, names in enumerate(failed):
        if i == stopped:
            again = FailedTaskQueue(ImitateFailed(size=size))
            again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
            resumed = again
        chosen = [hard.put(hard.candidates(names)) for hard in (whole, resumed)]
        assert chosen[0] == chosen[1] and len(chosen[0]) in (0, size)
        for hard in (whole, resumed):
            hard.learn(hard.n_updates + bool(chosen[0]))
            assert len(set(hard.waiting)) == len(hard.waiting)
    assert (whole.waiting, whole.n_updates) == (resumed.waiting, resumed.n_updates)


def rows(policy: Any) -> list[Sample]:
    """Two rows of two tokens to train on each."""

    def row(ids: list[int], number: int) -> Sample:
        mask = np.array([False, False, True, True])
        return Sample(np.array(ids), mask, np.zeros(4, np.float32), mask.astype(np.float32), number, number)

    return [row([5, 6, 7, 8], 0), row([9, 10, 11, 12], 1)]


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_the_supervised_update_is_that_of_its_loss(coef: float) -> None:
    # By hand: the mean over the four tokens of −log π − c · entropy. One update of plain gradient descent tells it.
    policy = tiny.policy()
    samples = rows(policy)
    logits = torch.stack([policy.model(torch.tensor([s.token_ids.tolist()])).logits[0, 1:3] for s in samples])
    log_p = torch.log_softmax(logits, -1)
    targets = torch.tensor([s.token_ids[2:].tolist() for s in samples])
    nll = -log_p.gather(-1, targets[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (nll.mean() - coef * entropy.mean()).backward()
    expected = tiny.gradient(policy.model)
    policy.model.zero_grad()
    trainer = TorchTrainer(policy, AdamW(lr=1e-12, max_grad_norm=None), 1)
    [batches] = pack_minibatches(samples, 1, Reduction(kind="token_mean"), 4, None)
    assert len(batches) == 2, "in two micro-batches"
    values = trainer.sft_update(batches, entropy_coef=coef)
    assert torch.allclose(tiny.gradient(policy.model), expected, atol=1e-6)
    # The mean of the rows' own means: with .5 and 1.5 it would be 1.
    assert values["supervised/loss"] == pytest.approx(float(nll.detach().mean(1).mean()), rel=1e-5)


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> runs.Done:
    return learn(tmp_path_factory.mktemp("lifted"), RELIFT | FALLING)


def test_what_every_attempt_failed_is_imitated(lifted: runs.Done) -> None:
    waiting: list[str] = []
    n_updates = n_scheduled = 0.0
    for line in steps(lifted):
        records = list(read_trajectories(lifted.folder / "trajectories", phase="train", steps=[line["step"]]))
        solved = {r.task_id for r in records if r.trajectory.solved}
        failed = [i for i in dict.fromkeys(r.task_id for r in records) if i not in solved]
        assert line["imitate_failed/n_failed_groups"] == len(failed)
        waiting = list(dict.fromkeys([*waiting, *failed]))
        imitates = len(waiting) >= 3
        assert line["imitate_failed/n_imitated"] == 3 * imitates and ("imitate_failed/loss" in line) is imitates
        waiting = waiting[3:] if imitates else waiting
        assert line["imitate_failed/n_waiting"] == len(waiting)
        updates = line["optimizer/n_updates"] - n_updates
        n_updates = line["optimizer/n_updates"]
        assert updates == (line["batch/n_trained_trajectories"] > 0) + imitates
        assert not any(r.trajectory.is_demonstration for r in records)
        # Update k of 6 has 1 − k/6 of the rate, however many demonstrations were imitated before.
        n_scheduled += updates - imitates
        if updates - imitates:
            assert line["optimizer/lr"] == pytest.approx(4.0e-3 * (1 - (n_scheduled - 1) / 6))
    assert sum(runs.curve(lifted.folder, "imitate_failed/n_imitated")) >= 3
    state = json.loads((runs.newest(lifted.folder) / "state.json").read_text())
    assert state["n_updates"] == n_updates


def test_a_policy_that_hardly_succeeds_is_lifted(tmp_path: Path, unguided: runs.Done) -> None:
    lifted = learn(tmp_path, LONG | RELIFT, **HARD)
    assert unguided.result["success_before"] == lifted.result["success_before"] < 0.1
    assert unguided.result["success_after"] < 0.4
    assert lifted.result["success_after"] > 0.8, runs.curve(lifted.folder, "rollout/success")
    first = steps(lifted)[0]  # all of its attempts fail, and what is imitated moves the policy
    assert (first["batch/n_trained_trajectories"], first["imitate_failed/n_imitated"]) == (0, 3)
    assert first["sampling/n_empty_steps"] == 0 and "step 1 of 1-policy_gradient had nothing" not in lifted.said


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", tiered([None, DROPOUT], DROPOUT), ids=["full", "lora"])
@pytest.mark.parametrize(
    "stage", tiered([LUFFY, RELIFT | FALLING, BOTH], BOTH), ids=["luffy", "imitate_failed", "both"]
)
def test_a_stopped_run_equals_an_uninterrupted_one(
    tmp_path: Path, stage: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    policy = runs.BASE["policy"] | ({"lora": lora} if lora else {})
    stages = [SUPERVISED | {"n_demonstrations": 32}, STAGE | stage]
    path = runs.write(tmp_path, stages, rewards=OUTCOME, policy=policy, evaluation={"n_tasks": 6})
    with words.on_every_step(path, counter := resume.PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    draw = random.Random(f"{lora} {stage}")
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(6)]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "changes", "where", "message"),
    [
        (LUFFY | {"loss": {"kind": "ppo_clip"}}, {}, "group_demonstrations", "loss ppo_clip treats every token"),
        (LUFFY, {"rewards": {"vote": {"kind": "majority"}}}, "group_demonstrations", "rewards.vote compares"),
        (LUFFY | {"advantage": {"kind": "gae"}, "critic": {}}, {}, "group_demonstrations", "a critic would learn"),
        (
            {"advantage": {"kind": "guided", "baseline": "own"}},
            {},
            "advantage.baseline",
            "the stage adds no demonstrations",
        ),
        (RELIFT, {"environment": {"kind": "./mute.py:Mute"}}, "imitate_failed", "cannot demonstrate"),
        (LUFFY, {"environment": {"kind": "./mute.py:Mute"}}, "group_demonstrations", "cannot demonstrate"),
        (RELIFT, {"agent": {"kind": "./mute.py:Silent"}}, "imitate_failed", "lacks write"),
    ],
)
def test_pairs_that_cannot_work(
    tmp_path: Path, stage: dict[str, Any], changes: dict[str, Any], where: str, message: str
) -> None:
    path = runs.write(tmp_path, [STAGE | stage], **{"rewards": OUTCOME, **changes})
    (tmp_path / "mute.py").write_text(
        "from dataclasses import dataclass\n"
        "from environments.base import Properties\n"
        "@dataclass(frozen=True)\nclass Mute:\n"
        "    properties = Properties(splits=('train', 'dev', 'test'))\n"
        "    def tasks(self, split): return []\n    def start(self, task): return None\n"
        "@dataclass(frozen=True)\nclass Silent:\n    async def act(self, history, policy): return None\n"
    )
    with pytest.raises(RecipeError) as error:
        load(path)
    assert error.value.where == f"stages[0].{where}" and message in str(error.value)


def test_a_loss_for_demonstrations_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with_some, without = (
        runs.write(tmp_path / str(i), [STAGE | s]) for i, s in enumerate((LUFFY, {"loss": LUFFY["loss"]}))
    )
    assert not any("demonstrations" in text for text in cautions(load(with_some)))
    with pytest.raises(
        RecipeError, match="this loss is for demonstrations among the attempts, and the stage adds none"
    ):
        load(without)
