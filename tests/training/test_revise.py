"""A run that goes on with another recipe: more steps, fewer, other numbers; what is refused, and what is kept of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.build import revise
from rlhf.build import train as building
from rlhf.build.revise import _schedules
from rlhf.credit.gae import GAE
from rlhf.digests import Manifest
from rlhf.errors import CheckpointError, RecipeError
from rlhf.evaluation.changes import Change, read_changes, write_changes
from rlhf.evaluation.contrib.findings import findings
from rlhf.evaluation.run_data import RunData
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW, load_moments
from rlhf.training.contrib.imitate_failed_tasks import ImitateFailed
from rlhf.training.critics.values import Critic
from rlhf.training.run import Interrupted
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.viewer.run_folder import RunFolder
from tests.commands import last_json
from tests.commands import run as command
from tests.test_resume import LOSS, POLICY_GRADIENT, SHORT, SUPERVISED, everything
from tests.training import runs, words

CONSTANT = {"lr": 3.0e-3, "schedule": "constant"}
STAGES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"kind": "grpo"}},
    "kl": {"advantage": {"kind": "gigpo"}, "loss": LOSS["gigpo"]},
    "critic": {"advantage": {"kind": "gae"}, "critic": {"optimizer": {"lr": 1.0e-2, "schedule": "constant"}}},
    "background": {"checkpoint_in_background": True, "checkpoint_every": 3},
}


def recipe(folder: Path, steps: int, **changes: Any) -> Path:
    """Two stages, the last with a constant learning rate and updates in every step."""
    learnt = {"filters": {"drop_zero_advantage": False}}
    stage = {**POLICY_GRADIENT, **learnt, "steps": steps, "optimizer": CONSTANT, **changes}
    return runs.write(
        folder,
        [SUPERVISED, stage],
        policy=runs.BASE["policy"] | {"hidden_size": 16},
        evaluation={"n_tasks": 6, "validation_n_tasks": 4},
        rewards={**runs.BASE["rewards"], "short": SHORT},
    )


def resume(run: Path, *words: str) -> Any:
    """`rlhf train --resume`, in this process."""
    return command("train", "--resume", run, *words)


@pytest.mark.parametrize("name", STAGES)
def test_a_finished_run_with_more_steps_equals_one_that_had_them(tmp_path: Path, name: str) -> None:
    runs.run(recipe(tmp_path, 7, **STAGES[name]), tmp_path / "whole")
    run = tmp_path / "run"
    runs.run(recipe(tmp_path, 2, **STAGES[name]), run)
    first = (run / "result.json").read_text()
    for steps, key in (("4", "steps"), ("7", "stages.1.steps")):  # after the 2nd and the 4th an evaluation was due
        ended = resume(run, f"{key}={steps}")
        assert ended.exit_code == 0, ended.stderr
        assert f"stages.1.steps: {steps} instead of" in ended.stderr and "caution: the constant" not in ended.stderr
        assert load(run).stages[1].steps == int(steps)
    assert everything(run) == everything(tmp_path / "whole")
    assert (run / "after-000002" / "result.json").read_text() == first
    assert (run / "after-000004" / "after-eval-000004.parquet").is_file()
    assert "this run is finished" in resume(run).stderr


def test_where_the_rate_falls_over_the_stage_it_is_said(tmp_path: Path) -> None:
    linear = {"lr": 3.0e-3, "schedule": "linear"}
    runs.run(recipe(tmp_path, 2, optimizer=linear), tmp_path / "run")
    said = " ".join(resume(tmp_path / "run", "steps=4").stderr.split())
    assert re.search(
        r"linear schedule of optimizer falls over 4 steps instead of 2, which was to be \S+ now and is", said
    )
    assert "not the one that 4 steps would have made" in said


def test_rates_are_those_of_the_updates_that_a_critics_warm_up_leaves(tmp_path: Path) -> None:
    stage = PolicyGradient(
        steps=20, critic=Critic(warmup_steps=10), advantage=GAE(), optimizer=AdamW(lr=1.0, schedule="linear")
    )
    first = next(iter(_schedules(stage, replace(stage, steps=30), 5)))
    assert first.endswith("which was to be 0.5 now and is 0.75"), "5 of 10 updates, and 5 of 20"
    mixed = replace(stage, imitate_failed=ImitateFailed())
    assert "now" not in next(iter(_schedules(mixed, replace(mixed, steps=30), 5))), (
        "updates are not all of the schedule"
    )


def test_a_run_that_was_stopped_is_extended_too(tmp_path: Path) -> None:
    runs.run(recipe(tmp_path, 4), tmp_path / "whole")
    run = tmp_path / "run"
    runs.run(recipe(tmp_path, 3), run)
    for path in (run / "checkpoints").glob("1-policy_gradient-00000[23]"):
        path.rename(path.with_name(path.name + ".damaged"))  # as if it had been stopped after the first step
    (run / "checkpoints" / "1-policy_gradient-000002.damaged").rename(run / "checkpoints" / "1-policy_gradient-000002")
    assert resume(run, "steps=4").exit_code == 0
    assert everything(run)["weights"] == everything(tmp_path / "whole")["weights"]


def test_what_cannot_be_extended_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    runs.run(recipe(tmp_path, 2), run)
    shorter = resume(run, "steps=1")
    assert shorter.exit_code == 2 and "stages.1.steps: this stage is finished" in shorter.stderr
    other = resume(run, "steps=3", "stages.1.group_size=8")
    assert other.exit_code == 2 and "stages.1.group_size" in other.stderr
    assert load(run).stages[1].steps == 2

    newest = runs.newest(run)  # as earlier versions left it
    state = json.loads((newest / "state.json").read_text())
    del state["of_steps"]
    (newest / "files.json").unlink()
    (newest / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="cannot be extended"):
        runs.run(recipe(tmp_path, 3), run, resume=True)
    assert load(run).stages[1].steps == 2, "nothing was changed"


def test_a_run_that_ended_by_patience_is_not_extended(tmp_path: Path) -> None:
    patient = {"evaluate_every": 1, "patience": 1, "optimizer": {"lr": 1.0e-9}}
    done = runs.run(recipe(tmp_path, 5, **patient), tmp_path / "run")
    assert "no better evaluation" in done.said
    with pytest.raises(RecipeError, match="stopped by the patience"):
        runs.run(recipe(tmp_path, 6, **patient), tmp_path / "run", resume=True)


# --- other numbers ---

LR = "stages.1.optimizer.lr"


def stopped(folder: Path, steps: int = 4, after: int = 2, **changes: Any) -> Path:
    """A run that was stopped after a step."""
    runs.stop(recipe(folder, steps, **changes), folder / "run", f"1-policy_gradient-{after:06d}")
    assert runs.newest(folder / "run").name == f"1-policy_gradient-{after:06d}"
    return folder / "run"


def copied(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.with_name(name)))


def test_a_learning_rate_changes_from_a_step_on_and_is_told_of(tmp_path: Path) -> None:
    run = stopped(tmp_path)
    ended = resume(run, f"{LR}=1e-3", "stages.1.trainer={kind: torch, gradient_checkpointing: true}")
    assert ended.exit_code == 0, ended.stderr
    said = f"{LR}: 0.001 instead of 0.003 from step 3 on"
    assert f"caution: {said}" in " ".join(ended.stderr.split())
    assert [line["optimizer/lr"] for line in runs.log(run) if line["stage"] == "1-policy_gradient"
            and "optimizer/lr" in line] == [3e-3, 3e-3, 1e-3, 1e-3]  # fmt: skip
    assert read_changes(run) == [Change(LR, 3e-3, 1e-3, 1, 3)] and [c.text for c in read_changes(run)] == [said]
    kept = load(run).stages[1]
    assert kept.optimizer.lr == 1e-3 and not kept.trainer.gradient_checkpointing, "that is asked anew at each resume"
    for data in (RunData.read(run), RunFolder(run).poll()):
        [found] = [f for f in findings(data, pytest.fail) if f.name == "Recipe changed in mid-run"]
        assert said in found.words and found.level == "look"
    assert said in (run / "report.html").read_text()
    assert said in " ".join(command("show", run).stdout.split())
    assert last_json(command("show", run, "--json"))["changes"] == [
        {"key": LR, "before": 3e-3, "now": 1e-3, "stage": 1, "step": 3}
    ]
    Manifest(run).require(run / "changes.json")
    (run / "changes.json").write_text((run / "changes.json").read_text().replace("0.001", "0.002"))
    assert "changes.json" in resume(run).stderr


def test_an_unchanged_run_has_no_record(tmp_path: Path) -> None:
    run = stopped(tmp_path)
    runs.run(tmp_path / "recipe.yaml", tmp_path / "whole")
    assert resume(run).exit_code == 0 and everything(run) == everything(tmp_path / "whole")
    assert not (run / "changes.json").exists() and "changes" not in last_json(command("show", run, "--json"))


class Killed(BaseException):
    """The process ends."""


def killed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, run: Path, *asked: str) -> None:
    """Resume, and end where a function is called."""

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        with pytest.raises(Killed):
            resume(run, *asked)


def test_a_kill_between_the_change_and_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path)
    before, after, plain = copied(run, "before"), copied(run, "after"), copied(run, "plain")
    assert resume(run, f"{LR}=1e-3").exit_code == 0 and resume(plain).exit_code == 0

    killed(monkeypatch, building, "prepare", after, f"{LR}=1e-3")
    assert len(read_changes(after)) == 1 and "instead of" not in resume(after).stderr
    assert everything(after) == everything(run) and read_changes(after) == read_changes(run)

    again = copied(before, "again")
    for one in (before, again):  # once the record is written, and not yet the recipe
        killed(monkeypatch, revise, "dump", one, f"{LR}=1e-3")
        assert len(read_changes(one)) == 1 and load(one).stages[1].optimizer.lr == 3e-3
    assert resume(before).exit_code == 0
    assert everything(before) == everything(plain) != everything(run) and read_changes(before) == []
    assert resume(again, f"{LR}=1e-3").exit_code == 0
    assert everything(again) == everything(run) and read_changes(again) == read_changes(run)


def test_several_changes_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path, checkpoint_every=1, keep_checkpoints="all")
    killed(monkeypatch, building, "prepare", run, f"{LR}=1e-3", "stages.1.loss.entropy_coef=0.5")
    killed(monkeypatch, building, "prepare", run, f"{LR}=2e-3", "stages.1.loss.entropy_coef=0")
    assert read_changes(run) == [Change(LR, 3e-3, 2e-3, 1, 3)], "what no step was made with is no change"
    assert resume(run).exit_code == 0
    ended = resume(run, "steps=5", f"{LR}=1e-3", "evaluation.n_tasks=4")
    assert ended.exit_code == 0 and "are of other tasks than those before" in ended.stderr
    later = [
        Change("evaluation.n_tasks", 6, 4, 1, 5),
        Change(LR, 2e-3, 1e-3, 1, 5),
        Change("stages.1.steps", 4, 5, 1, 5),
    ]
    assert read_changes(run)[0] == Change(LR, 3e-3, 2e-3, 1, 3)
    assert sorted(read_changes(run)[1:], key=lambda change: change.key) == later
    assert later[0].text == "evaluation.n_tasks: 4 instead of 6 from step 5 of stages.1 on"
    rates = [line["optimizer/lr"] for line in runs.log(run) if "rollout/success" in line]
    assert rates == [3e-3, 3e-3, 2e-3, 2e-3, 1e-3]
    results = json.loads((run / "result.json").read_text())
    assert (results["before"]["n"], results["after"]["n"]) == (6, 4)
    assert command("compare", run, run).exit_code == 0

    for newest in ("000002", "000003", "000004", "000005"):  # as after a loss of the newest ones
        shutil.rmtree(run / "checkpoints" / f"1-policy_gradient-{newest}")
    assert resume(run).exit_code == 0
    assert {change.step for change in read_changes(run)} == {2}, "its steps from there are made with the new values"
    assert runs.curve(run, "optimizer/lr")[-4:] == [1e-3] * 4


def test_a_change_within_a_stage_that_is_over_stays_as_recorded(tmp_path: Path) -> None:
    rewards = {**runs.BASE["rewards"], "short": SHORT}
    stage = {**POLICY_GRADIENT, "filters": {"drop_zero_advantage": False}, "optimizer": CONSTANT, "steps": 3}
    stages = [stage | {"checkpoint_every": 1, "keep_checkpoints": "all"}, stage | {"steps": 1}]
    path = runs.write(tmp_path, stages, policy=runs.BASE["policy"] | {"hidden_size": 16}, rewards=rewards)
    runs.stop(path, tmp_path / "run", "0-policy_gradient-000002")
    run, first = tmp_path / "run", Change("stages.0.optimizer.lr", 3e-3, 1e-3, 0, 3)
    assert resume(run, "stages.0.optimizer.lr=1e-3").exit_code == 0
    for later in (run / "checkpoints").glob("1-*"):  # the newest is that between the stages
        shutil.rmtree(later)
    assert resume(run, f"{LR}=1e-3").exit_code == 0
    assert read_changes(run) == [first, Change(LR, 3e-3, 1e-3, 1, 1)]


def test_a_stage_with_fewer_steps_equals_one_that_had_them(tmp_path: Path) -> None:
    run = stopped(tmp_path, steps=9)
    runs.run(recipe(tmp_path, 3), tmp_path / "whole")
    now = copied(run, "now")
    refused = resume(run, "steps=1")
    assert refused.exit_code == 2 and "2 or more: 2 are made" in refused.stderr
    assert resume(run, "steps=3").exit_code == 0
    assert everything(run) == everything(tmp_path / "whole")
    runs.run(recipe(tmp_path, 2), tmp_path / "two")
    assert resume(now, "steps=2").exit_code == 0
    assert runs.weights(runs.newest(now)) == runs.weights(runs.newest(tmp_path / "two"))


def test_weight_decay_and_the_rates_of_groups_are_those_of_the_recipe(tmp_path: Path) -> None:
    run = stopped(tmp_path)
    plain = copied(run, "plain")
    assert resume(run, "stages.1.optimizer.weight_decay=0.9").exit_code == 0 and resume(plain).exit_code == 0
    assert runs.curve(run, "optimizer/lr") == runs.curve(plain, "optimizer/lr")
    assert runs.weights(runs.newest(run)) != runs.weights(runs.newest(plain))

    def optimizer(lr: float, scale: float) -> Any:
        made = AdamW(lr=lr).build([torch.nn.Parameter(torch.ones(2))])
        made.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr_scale": scale})
        return made

    old, new = optimizer(1e-3, 10.0), optimizer(1e-4, 100.0)
    for group in old.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    old.step()
    load_moments(new, old.state_dict())
    assert [group["lr"] for group in new.param_groups] == [1e-4, 1e-4] and new.param_groups[1]["lr_scale"] == 100.0
    assert len(new.state) == 2


def test_a_critic_is_changed_too(tmp_path: Path) -> None:
    critic = {"optimizer": {"lr": 1.0e-2, "schedule": "constant"}, "head_lr": 2.0e-2}
    run = stopped(tmp_path, advantage={"kind": "gae"}, critic=critic)
    assert resume(run, "stages.1.critic.optimizer.lr=5e-3", "stages.1.critic.head_lr=4e-2").exit_code == 0
    assert runs.curve(run, "critic/lr") == [1e-2, 1e-2, 5e-3, 5e-3]


def test_evaluations_without_a_better_one_are_counted_when_their_distance_changes(tmp_path: Path) -> None:
    still = {"lr": 1.0e-9, "schedule": "constant"}
    run = stopped(tmp_path, steps=12, after=4, evaluate_every=2, checkpoint_every=1, optimizer=still)
    ended = resume(run, "stages.1.evaluate_every=1", "stages.1.patience=4")
    assert ended.exit_code == 0, ended.stderr
    # the first at step 2 is the best; those of 4, 5, 6 and 7 are no better
    assert "1-policy_gradient ends after step 7" in ended.stderr


def test_what_comes_too_late_or_has_no_effect_is_refused(tmp_path: Path) -> None:
    adapted = {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 30}
    run = stopped(tmp_path, loss=adapted)
    whole = (run / "recipe.yaml").read_text()
    for asked, told in (
        (["stages.0.optimizer.lr=1e-4"], "stages.0.optimizer.lr: this stage is finished"),
        (["stages.1.loss.kl_coef=0.2"], "adapted from step to step"),
        (["stages.1.loss.kl=k2"], "another value of stages.1.loss.kl"),
        (["stages.1.filters.drop_zero_advantage=true"], "another value of stages.1.filters.drop_zero_advantage"),
        (["stages.1.loss={kind: reinforce}"], "a run resumes with its own recipe"),
        (["seed=3", f"{LR}=1e-4"], "another value of seed: 3 instead of 0\n"),
        (["stages.1.evaluate_every=1", "evaluation.validation_split=train"], "another value of evaluation."),
    ):
        refused = resume(run, *asked)
        assert refused.exit_code == 2 and told in refused.stderr, (asked, refused.stderr)
    said = " ".join(resume(run, "seed=3").stderr.split())
    assert all(key in said for key in (*revise.OF_TRAINER, *revise.REVISABLE))
    assert (run / "recipe.yaml").read_text() == whole and not (run / "changes.json").exists()
    assert resume(run, "stages.1.loss.kl_target=0.02").exit_code == 0
    late = resume(run, f"{LR}=1e-4")
    assert late.exit_code == 2 and "this stage is finished" in late.stderr
    assert "evaluation.n_tasks: this stage is finished" in resume(run, "evaluation.n_tasks=5").stderr
    assert load(run).stages[1].optimizer.lr == 3e-3


def test_an_adapted_coefficient_is_forgotten_when_its_target_is(tmp_path: Path) -> None:
    adapted = {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.01}
    run, loss = stopped(tmp_path, steps=6, after=4, checkpoint_every=2, loss=adapted), "stages.1.loss"
    state = json.loads((runs.newest(run) / "state.json").read_text())
    assert state["kl_coef"] not in (None, 0.1)
    ended = resume(run, f"{loss}.kl_target=null", f"{loss}.kl_coef=0.3")
    assert ended.exit_code == 0, ended.stderr
    said = f"KL term is kl_coef: 0.3 from here on, and no longer {state['kl_coef']:.3g}"
    assert said in " ".join(ended.stderr.split())
    assert json.loads((runs.newest(run) / "state.json").read_text())["kl_coef"] is None
    assert resume(run, f"{loss}.kl_target=1e-9", "steps=7").exit_code == 0
    assert runs.curve(run, "loss/kl_coef")[-1] == pytest.approx(0.3, rel=0.05), "it begins at the recipe's"


def test_attempts_that_are_made_ahead_are_trained_on(tmp_path: Path) -> None:
    path = recipe(tmp_path, 9)
    path.write_text(f"{path.read_text()}asynchrony: {{staleness: 1, schedule: fixed}}\n")
    pressed = list[bool]()

    def press() -> None:
        if not pressed and (tmp_path / "run" / "checkpoints" / "1-policy_gradient-000002" / "state.json").exists():
            pressed.append(True)  # a second time would end the process at once
            signal.raise_signal(signal.SIGTERM)

    with words.on_every_step(path, press), pytest.raises(Interrupted):
        runs.run(path, tmp_path / "run")
    made = int(runs.newest(tmp_path / "run").name[-6:])
    refused = resume(tmp_path / "run", f"steps={made + 1}")
    assert refused.exit_code == 2 and f"{made + 2} or more" in refused.stderr
    assert resume(tmp_path / "run", f"steps={made + 2}").exit_code == 0
    assert runs.newest(tmp_path / "run").name == f"1-policy_gradient-{made + 2:06d}"


def test_a_record_that_is_none_is_damaged(tmp_path: Path) -> None:
    write_changes(tmp_path, [Change("stages.1.loss.dual_clip", None, 2.0, 1, 3)])
    assert read_changes(tmp_path)[0].text == "stages.1.loss.dual_clip: 2.0 instead of null from step 3 on"
    (tmp_path / "files.jsonl").unlink()
    (tmp_path / "changes.json").write_text("[]")
    with pytest.raises(ValueError, match="no changes of a recipe"):
        read_changes(tmp_path)
