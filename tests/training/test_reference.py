"""References that are renewed: when, what they are from then on, and runs that were stopped around it."""

from __future__ import annotations

import copy
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.build.train import train
from rlhf.errors import CheckpointError, RecipeError
from rlhf.recipe import load
from rlhf.terminal import CleanConsole
from rlhf.training.checkpoints.store import every
from rlhf.training.context import RunContext
from rlhf.training.contrib.reference_reset import ReferenceReset, ReferenceResetHook
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.hooks.callbacks import Callbacks
from rlhf.training.policy.model import Lora
from tests import test_resume as resume
from tests.tiers import tiered
from tests.training import runs, tiny, words

# --- when ------------------------------------------------------------------------------------------------------------


def due_after(patience: int, successes: list[float]) -> list[int]:
    """After which evaluations, counted from 1, the reference is renewed."""
    clock, found = ReferenceResetHook(ReferenceReset(patience=patience)), []
    for i, success in enumerate(successes, start=1):
        clock.see(success)
        if clock.is_due:
            clock.reset()
            found.append(i)
    return found


def test_three_evaluations_without_a_new_best() -> None:
    # .2 of the second evaluation is the best; the third only equals it, so the fifth is the third without a new one.
    assert due_after(3, [0.1, 0.2, 0.2, 0.19, 0.2]) == [5]


@pytest.mark.parametrize(
    ("patience", "successes", "expected"),
    [
        (1, [0.1, 0.1, 0.2, 0.1], [2, 4]),
        (3, [0.1, 0.2, 0.3, 0.4, 0.5], []),
        (2, [0.3, 0.2, 0.25, 0.25, 0.29], [3, 5]),  # what surpasses the ones since is not yet a new best
        (2, [0.0, 0.0, 0.0, 0.0, 0.0], [3, 5]),
    ],
)
def test_the_best_stays_the_one_to_surpass(patience: int, successes: list[float], expected: list[int]) -> None:
    assert due_after(patience, successes) == expected


def test_a_step_that_went_far() -> None:
    clock = ReferenceResetHook(ReferenceReset(max_kl=0.5))
    clock.learn({"loss/kl_ref": 0.5})
    assert not clock.is_due
    clock.learn({"loss/kl_ref": 0.51})
    clock.learn({})  # a step without an update does not take it back
    assert clock.is_due
    for success in (0.5, 0.4, 0.3):
        clock.see(success)  # no patience is asked for
    clock.reset()
    clock.learn({})
    assert not clock.is_due and clock.n_resets == 1


def test_an_anchor_that_moves_with_the_steps() -> None:
    clock, due = ReferenceResetHook(ReferenceReset(every=3)), []
    for step in range(1, 8):
        clock.learn({})
        if clock.is_due:
            clock.reset()
            due.append(step)
    assert due == [3, 6]


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), max_size=12), st.integers(1, 4), st.integers(0, 12))
def test_it_remembers(successes: list[float], patience: int, stopped: int) -> None:
    settings = ReferenceReset(patience=patience, max_kl=1.0)
    whole, resumed = ReferenceResetHook(settings), ReferenceResetHook(settings)
    for i, success in enumerate(successes):
        if i == stopped:
            again = ReferenceResetHook(settings)
            again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
            resumed = again
        for clock in (whole, resumed):
            clock.see(success)
            if clock.is_due:
                clock.reset()
    assert whole == resumed


def test_one_of_them_must_be_asked_for() -> None:
    with pytest.raises(ValidationError, match="would never be reset"):
        ReferenceReset()


# --- what ------------------------------------------------------------------------------------------------------------


def test_an_adapter_as_reference_is_the_model_that_it_was(tmp_path: Path) -> None:
    policy = tiny.policy(lora=Lora(rank=2, dropout=0.5))
    policy.save_base(tmp_path)
    policy.save(tmp_path / "fresh" / "policy")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        base = policy.model(ids).logits
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    policy.save(tmp_path / "checkpoint" / "policy")
    with torch.no_grad():
        then = policy.model(ids).logits
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
        now = policy.model(ids).logits
    assert not torch.allclose(now, then) and not torch.allclose(then, base)
    policy.keep_reference(tmp_path / "checkpoint")
    policy.model.train()
    with policy.as_reference() as reference:
        assert torch.equal(reference(ids).logits, then), "dropout is off"
    assert policy.model.training
    policy.model.eval()
    assert torch.equal(policy.model(ids).logits, now)
    policy.keep_reference(tmp_path / "fresh")
    assert policy.reference is None, "an untrained adapter is not copied"
    with policy.as_reference() as reference:
        assert torch.equal(reference(ids).logits, base)


def test_a_look_at_the_reference_leaves_the_gradient_alone(tmp_path: Path) -> None:
    policy = tiny.policy(lora=Lora(rank=2))
    policy.save_base(tmp_path)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    policy.save(tmp_path / "checkpoint" / "policy")
    policy.keep_reference(tmp_path / "checkpoint")
    policy.reference = {name: 3 * w for name, w in policy.reference.items()}
    ids = torch.tensor([[5, 6, 7, 8]])
    gradients = []
    for looks in (False, True):
        policy.model.zero_grad()
        loss = policy.model(ids).logits.logsumexp(-1).sum()
        if looks:
            with policy.as_reference() as reference:
                reference(ids)
        loss.backward()
        gradients.append(tiny.gradient(policy.model))
    assert torch.equal(*gradients)


def test_an_adapter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    policy = tiny.policy(lora=Lora(rank=2))
    with pytest.raises(CheckpointError, match="cannot be used") as error:
        policy.keep_reference(tmp_path / "nothing")
    assert "the adapter that is the reference" in error.value.expected


# --- in a run --------------------------------------------------------------------------------------------------------

LOSS = {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 30, "entropy_coef": 0.1}
SUPERVISED = {"kind": "supervised", "n_demonstrations": 64, "random_share": 0.7, "epochs": 8, "batch_size": 16,
              "optimizer": {"lr": 5.0e-3}}  # fmt: skip
STAGE = {
    "kind": "policy_gradient",
    "steps": 9,
    "tasks_per_step": 3,
    "group_size": 4,
    "evaluate_every": 1,
    "checkpoint_every": 2,
    "loss": LOSS,
    "filters": {"drop_zero_advantage": False},
    "optimizer": {"lr": 1.0e-2, "schedule": "linear"},
}
LORA = {"rank": 2, "dropout": 0.2}
#: A critic that learns alone in the first three steps.
WARMING: dict[str, Any] = {"advantage": {"kind": "gae"}, "critic": {"warmup_steps": 3}}
#: Nats that the policy drifts in two or three of these steps.
KL = 0.02


def recipe(folder: Path, lora: dict[str, Any] | None, **reset: Any) -> Path:
    policy = runs.BASE["policy"] | ({"lora": lora} if lora else {})
    evaluation = {"n_tasks": 6, "validation_n_tasks": 4}
    return runs.write(folder, [SUPERVISED, STAGE | {"reference_reset": reset}], policy=policy, evaluation=evaluation)


def resets(folder: Path) -> list[int]:
    """After which steps of the stage the reference was renewed."""
    names: list[str] = json.loads((runs.newest(folder) / "state.json").read_text())["references"]
    return [int(name[-6:]) for name in names]


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_the_reference_is_renewed_when_patience_ends(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    done = runs.run(recipe(tmp_path, lora, patience=2), tmp_path / "run")
    evaluations = [line for line in runs.log(done.folder) if "eval/success" in line]
    watched = {line["step"]: line["eval/success"] for line in evaluations if line["step"] < 9 and line["step"] > 0}
    clock, expected = ReferenceResetHook(ReferenceReset(patience=2)), []
    for step in range(1, 9):
        clock.see(watched[step])
        if clock.is_due:
            clock.reset()
            expected.append(step)
    assert resets(done.folder) == expected != []
    assert f"the policy after step {expected[0]} of 1-policy_gradient is the reference from now on" in done.said
    # Counted from the next step on; compared with itself, the policy has diverged by nothing in one update per step.
    steps = {line["step"]: line for line in runs.log(done.folder) if "loss/kl_ref" in line}
    for step, line in steps.items():
        assert line["reference/n_resets"] == sum(s < step for s in expected)
        if step - 1 in expected:
            assert line["loss/kl_ref"] == pytest.approx(0, abs=1e-4)
    names = {p.name for p in every(done.folder / "checkpoints")}
    assert names >= {f"1-policy_gradient-{step:06d}" for step in (0, *expected)}, "references stay"


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("before", [SUPERVISED, {**STAGE, "steps": 2, "evaluate_every": 0}], ids=["sft", "rl"])
def test_the_reference_is_the_policy_after_the_stage_before(
    tmp_path: Path, before: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    measured = {**STAGE, "steps": 4, "evaluate_every": 0}
    policy = runs.BASE["policy"] | ({"lora": lora} if lora else {})
    path = runs.write(tmp_path, [before, measured], policy=policy, evaluation={"n_tasks": 4})
    done = runs.run(path, tmp_path / "run")
    first, *later = [line["loss/kl_ref"] for line in runs.log(done.folder) if "loss/kl_ref" in line][-4:]
    assert first == pytest.approx(0, abs=1e-5) and max(later) > 1e-3


def test_steps_in_which_a_critic_learns_alone_bring_no_reset_nearer(tmp_path: Path) -> None:
    stage = {**STAGE, **WARMING, "steps": 6, "evaluate_every": 0, "reference_reset": {"every": 2}}
    done = runs.run(runs.write(tmp_path, [stage], evaluation={"n_tasks": 4}), tmp_path / "run")
    assert resets(done.folder) == [5]
    assert runs.curve(done.folder, "reference/n_resets") == [0, 0, 0, 0, 0, 1]


def test_a_stage_without_a_reference_does_not_hold_that_of_the_stage_before(tmp_path: Path) -> None:
    held: list[bool] = []

    class Look(StageHook):
        def before_step(self, run: RunContext, step: Step) -> None:
            held.append(run.policy.reference is not None)

    plain = {**STAGE, "steps": 1, "evaluate_every": 0, "loss": {"kind": "ppo_clip"}}
    path = runs.write(tmp_path, [plain | {"loss": LOSS}, plain])
    train(load(path), tmp_path / "run", console=CleanConsole(file=io.StringIO()), callbacks=Callbacks.of(Look()))
    assert held == [True, False]


def test_the_reference_is_renewed_when_the_policy_has_gone_far(tmp_path: Path) -> None:
    path = recipe(tmp_path, None, max_kl=KL)
    done = runs.run(path, tmp_path / "run")
    lines = [line for line in runs.log(done.folder) if "loss/kl_ref" in line]
    expected = [line["step"] for line in lines if line["loss/kl_ref"] > KL and line["step"] < 9]
    assert resets(done.folder) == expected != []
    # The coefficient begins anew: that of the step after a reset is the recipe's, changed once.
    by_step = {line["step"]: line["loss/kl_coef"] for line in lines}
    for step in expected:
        assert by_step[step + 1] == pytest.approx(0.1 * (1 - 0.2 * 12 / 30))  # of no divergence, by the lowest factor


def test_the_optimizer_begins_anew_or_goes_on(tmp_path: Path) -> None:
    found = {}
    for again in (True, False):
        folder = tmp_path / str(again)
        done = runs.run(recipe(folder, None, patience=2, reset_optimizer=again), folder / "run")
        first = resets(done.folder)[0]
        saved = torch.load(done.folder / "checkpoints" / f"1-policy_gradient-{first:06d}" / "trainer.pt")
        found[again] = saved["optimizer"]["state"]
    assert found[True] == {} and len(found[False]) > 0
    assert {float(s["step"]) for s in found[False].values()} == {float(first)}


@pytest.mark.parametrize("lora", tiered([None, LORA], LORA), ids=["full", "lora"])
@pytest.mark.parametrize("reset", [{"patience": 2}, {"max_kl": KL}], ids=["patience", "kl"])
def test_a_stopped_run_equals_an_uninterrupted_one(
    tmp_path: Path, lora: dict[str, Any] | None, reset: dict[str, Any]
) -> None:
    path = recipe(tmp_path, lora, **reset)
    with words.on_every_step(path, counter := resume.PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    assert resets(tmp_path / "whole")
    draw = random.Random(f"{lora} {reset}")
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(6)]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ({"loss": {"kind": "ppo_clip"}}, "reference_reset", "no reference to reset"),
        ({"evaluate_every": 0}, "reference_reset.patience", "0 evaluations"),
        ({"evaluate_every": 4}, "reference_reset.patience", "2 evaluations between 9 steps"),
        ({"evaluate_every": 3, "steps": 10, **WARMING}, "reference_reset.patience", "2 evaluations between 7 steps"),
    ],
)
def test_resets_that_never_come_are_refused(tmp_path: Path, changes: dict[str, Any], where: str, message: str) -> None:
    stage = copy.deepcopy(STAGE) | {"reference_reset": {"patience": 2}} | changes
    evaluation = {"n_tasks": 6}
    with pytest.raises(RecipeError) as error:
        load(runs.write(tmp_path, [stage], evaluation=evaluation))
    assert error.value.where == f"stages[0].{where}" and message in str(error.value)


@pytest.mark.parametrize("trainer", [{"kind": "fsdp"}, {"kind": "deepspeed", "zero_stage": 3}], ids=["fsdp", "zero3"])
def test_sharded_adapters_are_compared_with_their_base_alone(tmp_path: Path, trainer: dict[str, Any]) -> None:
    stage = {**STAGE, "trainer": trainer, "evaluate_every": 0}
    policy = {"policy": runs.BASE["policy"] | {"lora": {"rank": 2}}}
    assert load(runs.write(tmp_path, [stage], **policy))
    refused = (
        ([SUPERVISED | {"trainer": trainer}, stage], "stages[1].loss", "adapters of an earlier stage"),
        ([stage | {"reference_reset": {"max_kl": 1.0}}], "stages[0].reference_reset", "a reset reference"),
    )
    for stages, where, got in refused:
        with pytest.raises(RecipeError, match="sharded adapters") as error:
            load(runs.write(tmp_path, stages, **policy))
        assert error.value.where == where and got in error.value.got
