"""A teacher: which it may be, whom it teaches, what it says, and that a run learns from it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.data import Score, ScoredGroup, Trajectory
from rlhf.errors import ModelError, RecipeError, TrainingError
from rlhf.losses.contrib.kdrl import KDRL
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import DeepSpeed
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.teacher import (
    Teacher,
    TeacherHook,
    check_teachers,
    pupils,
    teacher_of,
    with_teacher_logprobs,
)
from rlhf.training.policy.model import Policy
from rlhf.training.run import Interrupted
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training import runs, words
from tests.training.tiny import collect, credit, policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of the same tokenizer as the policy, twice as wide."""
    found = tmp_path_factory.mktemp("teacher")
    policy(seed=3, hidden_size=32).save(found)
    return found


@pytest.fixture(scope="module")
def groups() -> list[ScoredGroup]:
    return collect(policy())


def stage_of(folder: Path, **keys: Any) -> PolicyGradient:
    return PolicyGradient(loss=KDRL(teacher=str(folder), **keys), steps=5, temperature=0.7)


def rows_of(groups: list[ScoredGroup]) -> list[Sample]:
    return make_samples(groups, credit(groups, DrGRPO()))[0]


def scored(groups: list[ScoredGroup], *totals: tuple[float, ...]) -> list[ScoredGroup]:
    """The groups with other scores."""

    def score(trajectory: Trajectory, total: float) -> Score:
        return Score({}, (0.0,) * (len(trajectory.turns) - 1) + (total,), total)

    return [
        replace(g, scores=tuple(score(t, total) for t, total in zip(g.trajectories, ts, strict=True)))
        for g, ts in zip(groups, totals, strict=True)
    ]


def loaded(stage: PolicyGradient, made: Policy) -> Teacher:
    """The teacher of a stage that has one."""
    teacher = teacher_of(stage, made)
    assert teacher is not None
    return teacher


def test_it_scores_what_the_policy_sampled_at_the_temperature_of_sampling(
    folder: Path, groups: list[ScoredGroup]
) -> None:
    made, stage, rows = policy(), stage_of(folder), rows_of(groups)
    found = with_teacher_logprobs(loaded(stage, made), stage, TorchTrainer(made, AdamW(), 1), rows, groups)
    other = policy(seed=3, hidden_size=32)
    expected = TorchTrainer(other, AdamW(), 1).compute_logprobs(rows, temperature=0.7, max_tokens=4096)
    for row, sample, logprobs in zip(found, rows, expected, strict=True):
        assert row.teacher_logprobs is not None
        np.testing.assert_allclose(row.teacher_logprobs[row.mask], logprobs, atol=1e-5)
        assert not row.teacher_logprobs[~row.mask].any()
        assert row.advantages is sample.advantages
    teacher = teacher_of(stage, made)
    assert teacher is not None and not any(p.requires_grad for p in teacher.model.parameters())


def test_without_a_teacher_rows_stay_as_they_are(groups: list[ScoredGroup]) -> None:
    stage, rows = PolicyGradient(), rows_of(groups)
    assert teacher_of(stage, policy()) is None and TeacherHook.of(stage, policy()) is None
    teacher = Teacher(policy().model, "a teacher that the loss does not name")
    assert with_teacher_logprobs(teacher, stage, TorchTrainer(policy(), AdamW(), 1), rows, groups) == rows


def test_the_coefficient_is_a_function_of_the_step(folder: Path) -> None:
    stage = stage_of(folder)
    run: Any = None
    hook = TeacherHook(loaded(stage, policy()), stage.steps)
    found = [hook.loss_of(run, stage.loss, step).teacher_coef for step in range(5)]  # type: ignore[attr-defined]
    assert found == pytest.approx([5e-3, 4e-3, 3e-3, 2e-3, 1e-3])


def test_who_is_taught(groups: list[ScoredGroup]) -> None:
    three = scored([groups[0], groups[0], groups[1]], (0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert pupils(three, "all", 0.0) == set(range(9))
    assert pupils(three, "wrong", 0.0) == {0, 2, 3, 4, 5}
    assert pupils(three, "silent_groups", 0.0) == {3, 4, 5}
    assert pupils(three, "silent_groups", 1.0) == {3, 4, 5, 6, 7, 8}  # only more than 1 would be right
    unequal = scored(groups[:1], (0.0, -0.5, -0.5))  # all wrong, and they differ: the group speaks
    assert pupils(unequal, "silent_groups", 0.0) == set() and pupils(unequal, "wrong", 0.0) == {0, 1, 2}
    assert pupils([], "all", 0.0) == set()


def test_who_is_not_taught_has_nothing_to_compare_with(folder: Path, groups: list[ScoredGroup]) -> None:
    made, stage, rows = policy(), stage_of(folder, teach="wrong"), rows_of(groups)
    some = scored(groups, (0.0, 1.0, 0.0), (1.0, 1.0, 1.0))
    for row in with_teacher_logprobs(loaded(stage, made), stage, TorchTrainer(made, AdamW(), 1), rows, some):
        assert row.teacher_logprobs is not None
        assert np.isnan(row.teacher_logprobs[row.mask]).all() == (row.sequence not in (0, 2))
    nobody = scored(groups, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    for row in with_teacher_logprobs(loaded(stage, made), stage, TorchTrainer(made, AdamW(), 1), rows, nobody):
        assert row.teacher_logprobs is not None and np.isnan(row.teacher_logprobs[row.mask]).all()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = policy(vocab_size=301)
    other.tokenizer.add_tokens(["unheard"])
    other.model.resize_token_embeddings(len(other.tokenizer))
    other.save(tmp_path)
    with pytest.raises(ModelError, match="tokenizer differs from the policy's") as caught:
        Teacher.load(str(tmp_path), policy())
    assert caught.value.where == f"loss.teacher {tmp_path}" and "unheard" in str(caught.value)


def test_a_run_refuses_another_tokenizer_before_the_first_attempt(tmp_path: Path) -> None:
    policy(vocab_size=301).save(tmp_path / "teacher")
    loss = {"kind": "kdrl", "teacher": str(tmp_path / "teacher")}
    with pytest.raises(ModelError, match="tokenizer differs from the policy's"):
        runs.run(runs.write(tmp_path, [{"kind": "policy_gradient", "loss": loss}]), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "run" / "trajectories").exists()


def test_heads_that_the_processes_of_a_row_cannot_share_are_refused(folder: Path) -> None:
    n_heads = Teacher.load(str(folder), policy()).model.config.num_attention_heads
    stage = stage_of(folder)
    assert teacher_of(stage, policy()) is not None
    odd = replace(stage, trainer=DeepSpeed(sequence_parallel=n_heads + 1))
    with pytest.raises(TrainingError, match="attention heads are not divisible") as caught:
        teacher_of(odd, policy())
    assert f"loss.teacher {folder}" in caught.value.got


def test_a_shorter_context_than_the_policys_rows_is_refused(tmp_path: Path) -> None:
    policy(max_context=16).save(tmp_path)
    losses = [stage_of(tmp_path).loss]
    check_teachers(losses, policy(), 16)
    with pytest.raises(ModelError, match="longer than the model supports") as caught:
        check_teachers(losses, policy(), 17)
    assert caught.value.where == f"loss.teacher {tmp_path}" and "at most 16" in str(caught.value)


def test_a_folder_without_a_model_is_told_before_anything_loads(tmp_path: Path) -> None:
    for teacher in (str(tmp_path / "nowhere"), str(tmp_path)):
        path = runs.write(tmp_path, [{"kind": "policy_gradient", "loss": {"kind": "kdrl", "teacher": teacher}}])
        with pytest.raises(RecipeError, match="there is no model in this folder") as caught:
            load(path)
        assert caught.value.where == "stages[0].loss.teacher"


# --- whole runs ------------------------------------------------------------------------------------------------------

SUPERVISED = {"kind": "supervised", "n_demonstrations": 256, "epochs": 8, "batch_size": 16, "optimizer": {"lr": 5.0e-3}}


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a student that was shown spoilt demonstrations, and of a teacher that was then shown good ones."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("student", "teacher"))
    weak = {**SUPERVISED, "random_share": 0.7, "epochs": 12}
    student = runs.newest(runs.run(runs.write(first, [weak]), first / "run").folder) / "policy"
    path = runs.write(second, [SUPERVISED], policy={"kind": "pretrained", "path": str(student)})
    return {"student": student, "teacher": runs.newest(runs.run(path, second / "run").folder) / "policy"}


#: A reward that gives every attempt 0.
NONE = {"kind": "outcome", "success": 0.0}


def lessons(
    school: dict[str, Path], folder: Path, teach: str = "silent_groups", reward: Any = NONE, **changes: Any
) -> Path:
    """A stage in which no reward says anything: every attempt has 0."""
    loss = {"kind": "kdrl", "teacher": str(school["teacher"]), "teacher_coef": 1.0, "teacher_coef_end": 0.5}
    stage = {"kind": "policy_gradient", "steps": 15, "tasks_per_step": 8, "group_size": 4, "epochs": 2,
             "filters": {"drop_zero_advantage": False}, "optimizer": {"lr": 3.0e-3},
             "loss": loss | {"teach": teach}}  # fmt: skip
    return runs.write(
        folder, [stage | changes], policy={"kind": "pretrained", "path": str(school["student"])},
        rewards={"none": reward},
    )  # fmt: skip


@pytest.mark.parametrize(("teach", "reward"), [("silent_groups", NONE), ("all", {"kind": "outcome", "weight": 0})])
def test_a_student_learns_from_its_teacher_where_no_reward_tells_anything(
    school: dict[str, Path], tmp_path: Path, teach: str, reward: Any
) -> None:
    done = runs.run(lessons(school, tmp_path, teach, reward), tmp_path / "run")
    assert done.result["success_before"] < 0.5 and done.result["success_after"] > 0.8
    gaps = runs.curve(done.folder, "loss/kl_teacher")
    assert gaps[-1] < 0.2 * gaps[0]
    assert runs.curve(done.folder, "loss/teacher_coef") == pytest.approx(np.linspace(1.0, 0.5, 15).tolist())
    assert runs.curve(done.folder, "loss/teacher_token_share") == pytest.approx([1.0] * 15)
    total, beta = (runs.curve(done.folder, f"loss/{name}")[0] for name in ("total", "teacher_coef"))
    assert total == pytest.approx(beta * gaps[0], rel=1e-4)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The default handler of Ctrl-C, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_run_that_is_resumed_equals_one_that_was_not(school: dict[str, Path], tmp_path: Path, ctrl_c: None) -> None:
    path = lessons(school, tmp_path, steps=4, checkpoint_every=1)
    expected = runs.run(path, tmp_path / "whole")

    def stop() -> None:  # in the third step
        log = tmp_path / "cut" / "metrics.jsonl"
        if log.is_file() and len(runs.curve(tmp_path / "cut", "loss/teacher_coef")) == 2:
            signal.raise_signal(signal.SIGINT)

    with words.on_every_step(path, stop), pytest.raises((Interrupted, KeyboardInterrupt)):
        runs.run(path, tmp_path / "cut")
    done = runs.run(path, tmp_path / "cut", resume=True)
    assert runs.weights(runs.newest(done.folder)) == runs.weights(runs.newest(expected.folder))
    coefficients = runs.curve(done.folder, "loss/teacher_coef")
    assert coefficients == runs.curve(expected.folder, "loss/teacher_coef") and len(coefficients) == 4
