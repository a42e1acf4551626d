"""Rounds of a step: seeds, what is recorded and counted, and runs that are stopped and go on."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.chat import ChatAgent
from rewards.shaping.outcome import EnvironmentReward
from rlhf.data import Credit, SamplingParams, Task
from rlhf.errors import RecipeError, TrainingError
from rlhf.evaluation.statistics import success_estimate
from rlhf.evaluation.store import read_trajectories
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.recipe import load
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutBatch, RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from rlhf.tasks.selection import Selection
from rlhf.training.rollout_phase import TrainingGroups
from rlhf.training.run import Interrupted
from tests.tasks import odds
from tests.tasks.groups import groups
from tests.test_resume import PressAt, everything, run_with_kills
from tests.tiers import tiered
from tests.training import children, runs
from tests.training.tiny import Echoes, policy

STAGE = {
    "kind": "policy_gradient",
    "steps": 5,
    "tasks_per_step": 4,
    "group_size": 3,
    "checkpoint_every": 1,
    "optimizer": {"lr": 3.0e-3},
}
CURRICULUM = {"kind": "curriculum", "key": "grade", "window": 6, "threshold": 0.2, "review": 0.3}
REWARDS = {"right": {"kind": "outcome"}, "nothing": {"kind": "./odds.py:nothing", "weight": 0.0}}


def recipe(folder: Path, stage: dict[str, Any]) -> Path:
    """A run of a second, whose policy solves half of its tasks by chance."""
    small = runs.BASE["policy"] | {"hidden_size": 16}
    parts = {"environment": {"kind": "./odds.py:Odds"}, "rewards": REWARDS, "limits": {"max_turns": 1, "max_tokens": 3}}
    path = runs.write(folder, [STAGE | stage], policy=small, evaluation={"n_tasks": 4}, **parts)
    shutil.copy(odds.__file__, folder / "odds.py")
    return path


def steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log that are of training steps."""
    return [line for line in runs.log(folder) if "sampling/n_rounds" in line]


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_two_rounds_are_as_one_of_both() -> None:
    made = policy()
    tasks = [Task("echoes/0"), Task("echoes/1", seed=1), Task("echoes/0")]

    async def collected() -> list[RolloutBatch]:
        engine = TransformersEngine(made.model, max_context=made.max_context)
        rewards = {"env": WeightedReward("env", 1.0, EnvironmentReward())}
        limits = Limits(max_turns=2, max_tokens=4)
        collector = RolloutRunner(
            Echoes(), ChatAgent(system=""), rewards, engine, Renderer(made.tokenizer), limits, seed=0
        )
        how: dict[str, Any] = {"group_size": 2, "sampling": SamplingParams(max_tokens=4), "step": 3}
        try:
            whole = await collector.collect(tasks, **how)
            first = await collector.collect(tasks[:2], **how)
            return [whole, await collector.collect(tasks[2:], **how, earlier=first), first]
        finally:
            await engine.close()

    def said(of: RolloutBatch) -> list[list[str]]:
        return [[turn.action.text for turn in t.turns] for group in of.groups for t in group.trajectories]

    whole, second, first = asyncio.run(collected())
    assert said(whole) == said(second)
    assert said(whole)[:2] != said(whole)[4:]  # the task that comes again is attempted with other seeds
    assert second.seconds > first.seconds and len(second.groups) == 3


# --- what becomes of groups ------------------------------------------------------------------------------------------


def test_credit_is_aligned_with_every_group_drawn_and_scaled() -> None:
    drawn = RolloutBatch(tuple(groups("11", "01", "10")), 1.0)
    gathered = TrainingGroups(drawn, Selection((1, 2), factors=(0.5, 2.0)), n_rounds=2)
    credits = [Credit((((1.0, -3.0),),), {"credit/n_groups": 1.0}, (((7.0, 7.0),),)), Credit((((2.0,),), ()))]
    assert [g.task_id for g in gathered.groups] == ["1", "2"]
    first, second = gathered.weighted(credits)
    assert first == replace(credits[0], advantages_GNT=(((0.5, -1.5),),))  # what a critic learns is not scaled
    assert second.advantages_GNT == (((4.0,),), ())
    assert gathered.align_to_all_groups([first, second]) == [None, first, second]
    metrics = gathered.metrics(success_estimate)
    assert metrics["rollout/n_episodes"] == 6 and metrics["rollout/success"] == pytest.approx(4 / 6)
    interval = success_estimate([True, True, False, True, True, False], [0, 0, 1, 1, 2, 2])
    assert (metrics["rollout/success_low"], metrics["rollout/success_high"]) == (interval.low, interval.high)
    assert {k: v for k, v in metrics.items() if k.startswith("sampling/")} == {
        "sampling/n_rounds": 2.0,
        "sampling/n_dropped_groups": 1.0,
        "sampling/advantage_scale_mean": 1.25,
    }
    assert replace(gathered, selection=Selection((1, 2))).weighted(credits) == credits


def test_every_group_drawn_is_recorded_and_counted(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"selection": {"kind": "dynamic", "max_rounds": 3}})
    done = runs.run(path, tmp_path / "run")
    lines = steps(done.folder)
    assert len(lines) == 5 and any(line["sampling/n_rounds"] > 1 for line in lines)
    stored = list(read_trajectories(done.folder / "trajectories", phase="train"))
    assert len(stored) == sum(line["rollout/n_episodes"] for line in lines) == done.result["n_episodes"]
    for number, line in enumerate(lines, start=1):
        of_step = [r for r in stored if r.step == number]
        trained = [r for r in of_step if r.advantages is not None]
        n_kept = line["rollout/n_groups"] - line["sampling/n_dropped_groups"]
        assert n_kept <= 4 and len(trained) == 3 * n_kept == line["batch/n_trained_trajectories"]
        assert line["batch/n_dropped_groups"] == 0  # every group that was kept has an advantage
        success = sum(r.trajectory.solved for r in of_step) / len(of_step)
        assert line["rollout/success"] == pytest.approx(success)


def test_a_step_with_nothing_to_train_on_says_so_and_moves_nothing(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"steps": 2, "selection": {"kind": "dynamic", "max_rounds": 1, "metric": "reward/nothing"}})
    done = runs.run(path, tmp_path / "run")
    assert [line["sampling/n_empty_steps"] for line in steps(done.folder)] == [1.0, 2.0]
    assert [line["optimizer/n_updates"] for line in steps(done.folder)] == [0.0, 0.0]
    assert all(line["sampling/n_dropped_groups"] == 4 for line in steps(done.folder))
    assert done.said.count("had nothing to train on") == 1
    begin, end = (runs.weights(done.folder / "checkpoints" / f"0-policy_gradient-00000{n}") for n in (0, 2))
    assert begin == end
    assert json.loads((runs.newest(done.folder) / "state.json").read_text())["policy_version"] == 1, "that of the start"


def test_too_many_empty_steps_stop_a_run_with_all_of_them_recorded(tmp_path: Path) -> None:
    selection = {"kind": "variance_filter", "metric": "reward/nothing", "max_empty_steps": 2}
    path = recipe(tmp_path, {"selection": selection})
    out = tmp_path / "run"
    for resume in (False, True):  # and again: nothing has changed
        with pytest.raises(TrainingError, match="2 steps in a row had nothing to train on") as stopped:
            runs.run(path, out, resume=resume)
        assert "step 3" in stopped.value.where and "max_empty_steps" in stopped.value.expected
    assert runs.newest(out).name == "0-policy_gradient-000002"
    assert [step for stage, step, phase in runs.stored(out) if phase == "train"] == [1, 2]


def test_a_selection_that_gives_up_leaves_what_it_saw(tmp_path: Path) -> None:
    selection = {"kind": "dynamic", "max_rounds": 2, "metric": "reward/nothing", "on_exhaustion": "stop"}
    path = recipe(tmp_path, {"selection": selection})
    with pytest.raises(TrainingError, match="2 rounds gave too few groups"):
        runs.run(path, tmp_path / "run")
    stored = list(read_trajectories(tmp_path / "run" / "trajectories", phase="train"))
    assert len(stored) == 2 * 4 * 3 and all(r.advantages is None for r in stored)


def test_a_selection_of_ones_own(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"steps": 1, "selection": {"kind": "./odds.py:EverySecond"}})
    [line] = steps(runs.run(path, tmp_path / "run").folder)
    assert (line["sampling/n_rounds"], line["rollout/n_groups"], line["sampling/n_dropped_groups"]) == (2.0, 8.0, 4.0)
    path.write_text(path.read_text().replace("odds.py:EverySecond", "odds.py:Broken"))
    with pytest.raises(TrainingError, match=r"the selection of 0-policy_gradient, step 1(.|\n)*IndexError"):
        runs.run(path, tmp_path / "again")


# --- samplers in runs ------------------------------------------------------------------------------------------------


def test_a_curriculum_goes_up_in_a_run(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, {"sampler": CURRICULUM}), tmp_path / "run")
    assert [line["sampling/level"] for line in steps(done.folder)][::4] == [0.0, 1.0]
    drawn = [int(r.trajectory.task_id[-1]) for r in read_trajectories(done.folder / "trajectories", phase="train")]
    assert {i % 2 for i in drawn[:12]} == {0} and {i % 2 for i in drawn[-24:]} == {0, 1}  # with reviews


def test_greso_skips_in_a_run(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, KEPT["greso"]), tmp_path / "run")
    assert sum(line["sampling/n_skipped_tasks"] for line in steps(done.folder)) > 0


def test_a_sampler_that_does_not_fit_the_tasks_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"have no level(.|\n)*did you mean 'grade'"):
        runs.run(recipe(tmp_path, {"sampler": CURRICULUM | {"key": "grades"}}), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- stopped and resumed ---------------------------------------------------------------------------------------------

KEPT: dict[str, dict[str, Any]] = {
    "greso": {"sampler": {"kind": "greso", "p_start": 0.1}},
    "curriculum": {"sampler": CURRICULUM},
    "dynamic": {"selection": {"kind": "dynamic", "max_rounds": 2}},
    "variance_filter": {"selection": {"kind": "variance_filter", "rule": "reweight", "scaling": "sqrt"}},
    "replay": {"replay": {"max_age": 2}, "epochs": 2},
    "all": {
        "sampler": CURRICULUM,
        "selection": {"kind": "dynamic", "max_rounds": 2},
        "replay": {"max_age": 3, "max_share": 1.0},
        "layout": "generation",
        "minibatches": 2,
    },
}


@contextmanager
def on_every_step(path: Path, call: Callable[[], object]) -> Iterator[None]:
    """Let the environment of a recipe make a call in each step."""
    module = sys.modules[type(load(path).environment).__module__]
    module.ON_STEP.append(call)
    try:
        yield
    finally:
        module.ON_STEP.remove(call)


def assert_same(found: Path, expected: Path) -> None:
    for (name, got), wanted in zip(everything(found).items(), everything(expected).values(), strict=True):
        assert got == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(KEPT, "all", "variance_filter"))
def test_ctrl_c_and_resume_equal_an_uninterrupted_run(tmp_path: Path, name: str) -> None:
    path = recipe(tmp_path, KEPT[name])
    with on_every_step(path, counter := PressAt(-1)):
        whole = runs.run(path, tmp_path / "whole")
    if "replay" in KEPT[name]:
        assert sum(line["replay/n_replayed"] for line in steps(whole.folder)) > 0
    out, draw, n_heard = tmp_path / "stopped", random.Random(name), 0
    for n in [draw.randrange(1, counter.n_steps // 2) for _ in range(5)] + [-1]:
        with on_every_step(path, PressAt(n)):
            try:
                runs.run(path, out, resume=out.exists())
            except (Interrupted, KeyboardInterrupt):
                n_heard += 1
                continue
        break
    assert n_heard >= 2
    assert_same(out, whole.folder)


@pytest.mark.slow
@pytest.mark.extended
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    path = recipe(tmp_path, KEPT["all"] | KEPT["greso"])
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    n = children.n_events(whole)
    draw = random.Random(3)
    assert run_with_kills(path, tmp_path / "killed", [draw.randrange(n // 10, n // 2) for _ in range(4)]) >= 2
    assert_same(tmp_path / "killed" / "run", tmp_path / "run")


def test_what_a_checkpoint_keeps_can_be_read_without_running_code(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, KEPT["all"] | {"steps": 3}), tmp_path / "run")
    folder = done.folder / "checkpoints" / "0-policy_gradient-000002"
    kept = torch.load(folder / "trainer.pt", weights_only=True)["kept"]
    assert {"sampler", "empty", "buffer"} <= set(kept) and kept["buffer"]["n_steps"] == 2
    assert all(torch.is_tensor(x) for t in kept["buffer"]["kept"] for row in t["rows"] for x in row.values())
