"""Environments, rewards and disks that fail while a run trains: typed, counted, told; never a zero, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.data import Outcome
from rlhf.errors import TrainingError
from rlhf.evaluation.store import read_failures, read_trajectories
from rlhf.training.policy.model import FromScratch
from tests.training import children, runs
from tests.training.words import WORDS

FAULTS = '''
"""Parts that go wrong to order."""

import threading
from dataclasses import dataclass, replace

import torch

from environments.base import Properties, StepResult
from rlhf.losses.ppo_clip import PPOClip
from tests.training.words import Words, WordsEpisode

NEVER = threading.Event()


@dataclass(frozen=True)
class Faulty(Words):
    """From step `after` on, every `every`-th step of all episodes of this process goes wrong."""

    fault: str = "raises"
    every: int = 10
    after: int = 0

    @property
    def properties(self):
        return Properties(inline=self.fault != "hangs", thread_safe=True, oracle=True, splits=("train", "dev", "test"))

    def tasks(self, split):
        if self.fault == "listing raises":
            raise RuntimeError("no such list")
        found = {"lists nothing": [], "lists numbers": [1, 2, 3]}
        return found.get(self.fault, super().tasks(split))

    def plan(self, task, taken):
        if self.fault == "plan raises":
            raise RuntimeError("lost")
        return 7 if self.fault == "plans nonsense" else super().plan(task, taken)

    def start(self, task):
        return FaultyEpisode(self, self.words(task.seed))


N_STEPS = {}


class FaultyEpisode(WordsEpisode):
    def __init__(self, settings, words):
        super().__init__(words)
        self.settings = settings

    async def step(self, action):
        n = N_STEPS[self.settings] = N_STEPS.get(self.settings, 0) + 1
        if n > self.settings.after and n % self.settings.every == 0:
            return self.go_wrong()
        return await super().step(action)

    def go_wrong(self):
        match self.settings.fault:
            case "raises":
                raise RuntimeError("the lamp fell over")
            case "hangs":
                NEVER.wait(3)
            case "returns nothing":
                return None
            case "returns a dictionary":
                return {"reply": "Right."}
            case "rewards with NaN":
                return StepResult("Right.", float("nan"), True)
            case "replies with bytes":
                return StepResult(b"Right.", 0.0, True)
        return StepResult("Nothing is wrong.")


@dataclass(frozen=True)
class One:
    """Always 1; for every third task, of which the first is none, something that is no reward."""

    fault: str = "raises"

    def __call__(self, task, trajectory):
        if task.seed % 3 == 1:
            return {"NaN": float("nan"), "text": "good", "nothing": None}.get(self.fault) or self.fail()
        return 1.0

    def fail(self):
        if self.fault == "NaN":
            return float("nan")
        if self.fault == "raises":
            raise KeyError("grade")
        return None


def length(task, trajectory):
    """Differs between attempts, so that every step has an update."""
    return len(trajectory.turns[0].action.text) / 10


@dataclass(frozen=True)
class Angry:
    """An advantage estimator that raises."""

    needs_values = False
    min_group = 1

    def __call__(self, group, values=None):
        raise ZeroDivisionError("no baseline")


N_LOSSES = {}


@dataclass(frozen=True)
class Infinite:
    """From one micro-batch of this process to another, its gradient is not finite."""

    begin: int = 2
    end: int = 1000

    def __call__(self, inputs):
        output = PPOClip()(inputs)
        n = N_LOSSES[self] = N_LOSSES.get(self, 0) + 1
        return replace(output, loss=output.loss * torch.inf) if self.begin < n <= self.end else output
'''

STAGE = {"kind": "policy_gradient", "steps": 3, "tasks_per_step": 4, "group_size": 4, "checkpoint_every": 1}
SUPERVISED = {"kind": "supervised", "n_demonstrations": 40, "epochs": 1}


@pytest.fixture(scope="module", autouse=True)
def untrained(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A tiny model in a folder: what is played before a run is then its demonstrations and nothing else."""
    global POLICY
    settings = {k: v for k, v in runs.BASE["policy"].items() if k != "kind"} | {"hidden_size": 16}
    folder = tmp_path_factory.mktemp("model")
    FromScratch(**settings).build(0, [f"Say {word}. Right. Wrong." for word in WORDS] * 10).save(folder)
    POLICY = {"kind": "pretrained", "path": str(folder)}


POLICY: dict[str, Any] = {}


def written(folder: Path, stage: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "faults.py").write_text(FAULTS)
    stages = [stage if stage and "kind" in stage else STAGE | (stage or {})]
    return runs.write(folder, stages, **{"policy": POLICY, "evaluation": {"n_tasks": 8}, **changes})


def faulty(folder: Path, stage: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **how: Any) -> Path:
    """A recipe whose environment goes wrong."""
    environment = {"kind": "./faults.py:Faulty", "n_turns": 1, **how}
    return written(folder, stage, environment=environment, limits=runs.BASE["limits"] | (limits or {}))


def fails(path: Path, out: Path, kind: str = "TrainingError") -> str:
    """The message of a command that is to end with code 2 and without a stack trace."""
    result = CliRunner().invoke(app, ["train", str(path), "--out", str(out), "--json"])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert json.loads(result.stdout.splitlines()[-1])["error"]["type"] == kind
    return result.stderr


# --- environments ----------------------------------------------------------------------------------------------------


def cautions(done: runs.Done, about: str) -> list[str]:
    """Return the lines that caution of `about`; of other things, this policy's steps may caution too."""
    return [line for line in done.said.splitlines() if line.startswith("caution: ") and about in line]


def test_an_environment_that_raises_now_and_then(tmp_path: Path) -> None:
    # One step in ten raises, and an attempt is one step: a tenth of the 48 attempts, give or take the evaluations.
    done = runs.run(faulty(tmp_path, limits={"max_retries": 0}), tmp_path / "run")
    failed = curve(done, "rollout/n_env_error")
    assert 3 <= sum(failed) <= 7 and curve(done, "rollout/n_infra_errors") == failed
    assert curve(done, "rollout/n_episodes") == [16.0, 16.0, 16.0]
    assert curve(done, "rollout/infra_error_share") == [n / 16 for n in failed]
    records = list(read_failures(tmp_path / "run" / "trajectories", stage="0-policy_gradient"))
    assert len(records) == sum(failed)
    assert {r.failure.outcome for r in records} == {Outcome.ENV_ERROR}
    assert all("RuntimeError: the lamp fell over" in r.failure.message for r in records)
    trained = list(read_trajectories(tmp_path / "run" / "trajectories", phase="train"))
    assert len(trained) == 48 - sum(failed)
    assert "ended with infrastructure errors" in done.said and "the lamp fell over" in done.said
    told = cautions(done, "ended with infrastructure errors")
    assert len(told) == 1, "said once, though it happens in several steps"


def test_a_failed_attempt_is_made_again(tmp_path: Path) -> None:
    done = runs.run(faulty(tmp_path, limits={"max_retries": 3}), tmp_path / "run")
    assert sum(curve(done, "rollout/n_retries")) >= 3 and sum(curve(done, "rollout/n_infra_errors")) == 0
    assert "ended with infrastructure errors" not in done.said


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raises", "step: RuntimeError: the lamp fell over"),
        (
            "returns nothing",
            "the returned object is not a StepResult; got: None; expected: environments.base.StepResult",
        ),
        (
            "returns a dictionary",
            "the returned object is not a StepResult; got: dict; expected: environments.base.StepResult",
        ),
        ("rewards with NaN", "reward is no finite number"),
        ("replies with bytes", "reply is no text"),
    ],
)
def test_an_environment_that_always_fails_stops_the_run(tmp_path: Path, fault: str, says: str) -> None:
    # The evaluation before (8 attempts) and the first step (16) pass; the second does not.
    path = faulty(tmp_path, fault=fault, every=1, after=24, limits={"max_retries": 0})
    message = fails(path, tmp_path / "run")
    assert says in message and "env_error" in message and "limits.max_error_fraction" in message
    assert "  expected:" in message and "  do:" in message
    newest = runs.newest(tmp_path / "run")
    assert newest.name == "0-policy_gradient-000001" and f"the last checkpoint is {newest}" in message
    assert f"rlhf train --resume {tmp_path / 'run'}" in message
    assert len(curve_of(tmp_path / "run", "rollout/success")) == 1


def test_an_environment_that_hangs(tmp_path: Path) -> None:
    limits = {"step_timeout_s": 0.4, "max_error_fraction": 0.5}
    done = runs.run(faulty(tmp_path, {"steps": 1}, limits, fault="hangs", every=8), tmp_path / "run")
    assert sum(curve(done, "rollout/n_timeout")) >= 1
    assert curve(done, "rollout/n_timeout") == curve(done, "rollout/n_infra_errors")
    [first, *_] = read_failures(tmp_path / "run" / "trajectories", stage="0-policy_gradient")
    assert first.failure.outcome is Outcome.TIMEOUT and "step: no answer within 0.4 s" in first.failure.message
    assert curve(done, "time/rollout_s")[0] < 10


def test_an_environment_that_only_hangs_stops_the_run(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"steps": 1}, {"step_timeout_s": 0.4}, fault="hangs", every=1, after=8)
    message = fails(path, tmp_path / "run")
    assert "timeout: step: no answer within 0.4 s" in message and "limits.max_error_fraction" in message


# --- demonstrations --------------------------------------------------------------------------------------------------


def test_demonstrations_go_on_without_what_failed(tmp_path: Path) -> None:
    done = runs.run(faulty(tmp_path, SUPERVISED, {"max_retries": 0}), tmp_path / "run")
    # One step in ten: the trial before is one, and each of the 40 demonstrations another.
    assert "caution: 4 of 40 demonstrations failed and are left out" in done.said
    assert "env_error in words/8: step: RuntimeError: the lamp fell over" in done.said
    assert set(curve(done, "supervised/n_demonstrations")) == {36.0}


def test_a_demonstration_is_played_again(tmp_path: Path) -> None:
    done = runs.run(faulty(tmp_path, SUPERVISED), tmp_path / "run")
    assert "demonstrations failed" not in done.said
    assert set(curve(done, "supervised/n_demonstrations")) == {40.0}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raises", "env_error in words/0: step: RuntimeError: the lamp fell over"),
        ("hangs", "timeout in words/0: step: no answer within 0.05 s"),
        ("returns nothing", "): the returned object is not a StepResult; got: None; expected: "),
        ("plans nonsense", "env_error in words/0: plan: got int, expected a list of texts or None"),
        ("plan raises", "env_error in words/0: plan: RuntimeError: lost"),
        ("lists nothing", "the environment lists no tasks"),
        ("lists numbers", "got:      int"),
        ("listing raises", "RuntimeError: no such list"),
    ],
)
def test_demonstrations_that_only_fail_stop_the_run(tmp_path: Path, fault: str, says: str) -> None:
    path = faulty(
        tmp_path, SUPERVISED | {"n_demonstrations": 5}, {"step_timeout_s": 0.05}, fault=fault, every=1, after=1
    )
    message = fails(path, tmp_path / "run", "EnvError")
    assert says in message and "rlhf check environment" in message


# --- rewards and estimators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["raises", "NaN", "text", "nothing"])
def test_a_reward_that_fails_is_never_a_zero(tmp_path: Path, fault: str) -> None:
    # Every reward that there is is 1, so a mean below 1 would be a failure that was taken for a score.
    path = written(
        tmp_path, rewards={"one": {"kind": "./faults.py:One", "fault": fault}},
        limits=runs.BASE["limits"] | {"max_error_fraction": 0.8},
    )  # fmt: skip
    done = runs.run(path, tmp_path / "run")
    failed = curve(done, "rollout/n_reward_error")
    assert sum(failed) > 0 and curve(done, "rollout/n_infra_errors") == failed
    assert set(curve(done, "rollout/return_mean")) == set(curve(done, "reward/one")) == {1.0}
    says = {"raises": "KeyError: 'grade'", "NaN": "nan", "text": "good", "nothing": "None"}[fault]
    for record in read_failures(tmp_path / "run" / "trajectories"):
        assert record.failure.outcome is Outcome.REWARD_ERROR
        assert "reward one" in record.failure.message and says in record.failure.message
        assert int(record.task_id.rpartition("/")[2]) % 3 == 1
    assert "reward_error" in done.said


def test_a_reward_that_fails_too_often_stops_the_run(tmp_path: Path) -> None:
    message = fails(written(tmp_path, rewards={"one": {"kind": "./faults.py:One"}}), tmp_path / "run")
    assert "reward one" in message and "KeyError: 'grade'" in message and "reward_error" in message


def test_an_estimator_that_raises(tmp_path: Path) -> None:
    message = fails(written(tmp_path, {"advantage": {"kind": "./faults.py:Angry"}}), tmp_path / "run")
    assert "the advantage of 0-policy_gradient, step 1" in message and "ZeroDivisionError: no baseline" in message
    assert runs.newest(tmp_path / "run").name == "0-policy_gradient-000000"


# --- gradients -------------------------------------------------------------------------------------------------------

LENGTH = {"length": {"kind": "./faults.py:length"}}


def test_gradients_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    # Two updates a step: the third and the fourth are spoilt, those of the second step.
    stage = {"minibatches": 2, "loss": {"kind": "./faults.py:Infinite", "begin": 2, "end": 4}}
    done = runs.run(written(tmp_path, stage, rewards=LENGTH), tmp_path / "run")
    assert curve(done, "optimizer/n_skipped") == [0.0, 2.0, 0.0]
    assert curve(done, "optimizer/n_updates") == [2.0, 2.0, 4.0]


def test_gradients_that_are_never_finite_stop_the_run_and_name_the_last_good_checkpoint(tmp_path: Path) -> None:
    # One good step, then two of two spoilt updates each; the fifth in a row is in the fourth step.
    stage = {"steps": 9, "minibatches": 2, "loss": {"kind": "./faults.py:Infinite", "begin": 2}, "keep_checkpoints": 9}
    message = fails(written(tmp_path, stage, rewards=LENGTH), tmp_path / "run")
    assert "5 updates in a row had a gradient that is not finite" in message and "optimizer.lr" in message
    newest = runs.newest(tmp_path / "run")
    assert newest.name == "0-policy_gradient-000003" and f"the last checkpoint is {newest}" in message
    good = newest.with_name("0-policy_gradient-000001")
    assert runs.weights(newest) == runs.weights(good) != runs.weights(newest.with_name("0-policy_gradient-000000"))


# --- what is cut -----------------------------------------------------------------------------------------------------


def test_cut_generations_are_counted_and_the_key_is_named(tmp_path: Path) -> None:
    # A policy that was never trained rarely ends its reply within 6 tokens of 300.
    done = runs.run(written(tmp_path), tmp_path / "run")
    cut = curve(done, "rollout/n_truncated_generations")
    assert all(n > 0 for n in cut)
    [told] = cautions(done, "cut before they ended")
    assert "by limits.max_tokens: 6" in told and "overlong" in told, "said once, though it happens always, to most"


def test_what_the_context_cuts_is_told_apart(tmp_path: Path) -> None:
    # 12 tokens of context less a prompt of some 5 leave fewer than the 10 that a generation may have.
    path = written(tmp_path, limits={"max_turns": 1, "max_tokens": 10, "max_context": 12})
    said = runs.run(path, tmp_path / "run").said
    assert "by the end of the context (limits.max_context)" in said and "by limits.max_tokens" not in said


def test_a_first_prompt_that_fills_the_context_is_told(tmp_path: Path) -> None:
    # A prompt of some 5 tokens in a context of 4: nobody ever says anything, and nothing is learnt.
    said = runs.run(
        written(tmp_path, limits={"max_turns": 1, "max_tokens": 2, "max_context": 4}), tmp_path / "run"
    ).said
    assert (
        "8 of 8 attempts in an evaluation" in said
        and "before the policy could say anything: the first prompt fills" in said
    )


def test_nothing_is_told_of_what_was_not_cut(tmp_path: Path) -> None:
    stage = {"kind": "supervised", "n_demonstrations": 32, "epochs": 6, "batch_size": 4}
    policy = runs.BASE["policy"] | {"hidden_size": 32}
    path = runs.write(tmp_path, [stage], policy=policy, evaluation={"n_tasks": 8, "temperature": 0})
    assert "caution" not in runs.run(path, tmp_path / "run").said


# --- the disk --------------------------------------------------------------------------------------------------------


def test_a_full_disk_names_the_last_good_checkpoint_and_loses_nothing(tmp_path: Path) -> None:
    # A file may grow as large as the policy and not as large as the optimiser's state, which is there from the first
    # update on: the checkpoint of the stage's begin is written, that of the first step is not.
    path = written(tmp_path, rewards={"length": {"kind": "./faults.py:length"}})
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    begin = tmp_path / "run" / "checkpoints" / "0-policy_gradient-000000"
    size = (begin / "policy" / "model.safetensors").stat().st_size
    (tmp_path / "full").mkdir()
    out = tmp_path / "full" / "run"
    ended = children.run(tmp_path / "full", "train", path, "--out", out, max_file_bytes=int(1.5 * size))
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    good = out / "checkpoints" / "0-policy_gradient-000000"
    assert "a checkpoint could not be written" in ended.err and "MB free" in ended.err
    assert f"the last good checkpoint is {good}" in ended.err
    assert [p.name for p in (out / "checkpoints").iterdir()] == [good.name], "nothing half-written"
    assert runs.weights(good) == runs.weights(begin)
    again = children.run(tmp_path / "full", "train", "--resume", out)
    assert again.code == 0, again.err
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(tmp_path / "run"))
    assert runs.lines(out) == runs.lines(tmp_path / "run")


@pytest.mark.extended
def test_a_full_disk_while_training_goes_on_loses_nothing(tmp_path: Path) -> None:
    # As above, with a thread that writes: its failure stops the run in one of the next steps.
    stage = {"steps": 9, "checkpoint_in_background": True}
    path = written(tmp_path, stage, rewards=LENGTH)
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    begin = tmp_path / "run" / "checkpoints" / "0-policy_gradient-000000"
    size = (begin / "policy" / "model.safetensors").stat().st_size
    (tmp_path / "full").mkdir()
    out = tmp_path / "full" / "run"
    ended = children.run(tmp_path / "full", "train", path, "--out", out, max_file_bytes=int(1.5 * size))
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    good = out / "checkpoints" / "0-policy_gradient-000000"
    assert "0-policy_gradient-000001: a checkpoint could not be written" in ended.err, "the place is said"
    assert f"the last good checkpoint is {good}" in ended.err
    assert [p.name for p in (out / "checkpoints").iterdir()] == [good.name], "nothing half-written"
    again = children.run(tmp_path / "full", "train", "--resume", out)
    assert again.code == 0 and f"resuming from {good}" in again.err, again.err
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(tmp_path / "run"))
    assert runs.lines(out) == runs.lines(tmp_path / "run")


def test_a_disk_without_room_for_the_policy(tmp_path: Path) -> None:
    path = written(tmp_path, SUPERVISED | {"n_demonstrations": 5})
    ended = children.run(tmp_path, "train", path, "--out", tmp_path / "run", max_file_bytes=12_000)
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert "a checkpoint could not be written" in ended.err and "File too large" in ended.err
    assert "none yet" in ended.err


# --- small helpers ---------------------------------------------------------------------------------------------------


def curve(done: runs.Done, name: str) -> list[float]:
    return runs.curve(done.folder, name)


def curve_of(folder: Path, name: str) -> list[float]:
    return runs.curve(folder, name)


def test_training_error_is_what_a_caller_of_the_library_gets(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the lamp fell over"):
        runs.run(faulty(tmp_path, every=1, after=1), tmp_path / "run")  # in the evaluation before


def test_the_highest_seed_trains(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, [{"kind": "supervised", "n_demonstrations": 4, "epochs": 1}], seed=2**32 - 1)
    assert runs.log(runs.run(recipe, tmp_path / "run").folder)[0]["step"] == 1
