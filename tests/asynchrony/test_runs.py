"""Whole runs whose attempts are made ahead: their ages, which tasks they train, and what a killed one is worth."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import threading
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.asynchrony.settings import Asynchrony
from rlhf.data import Generation
from rlhf.errors import EngineError, RlhfError, TrainingError
from rlhf.evaluation.groups import pack_groups, unpack_groups
from rlhf.evaluation.store import read_trajectories
from rlhf.inference.embedded.copied import CopiedEngine
from rlhf.recipe import load
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.rollouts_ahead import Lookahead, RolloutsAhead
from rlhf.training.run import Interrupted
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.asynchrony import counted_loss, slow_words
from tests.test_resume import SUPERVISED, assert_equal
from tests.training import children, runs, words

STAGE = {
    "kind": "policy_gradient",
    "steps": 6,
    "tasks_per_step": 3,
    "group_size": 4,
    "minibatches": 2,
    "evaluate_every": 3,
    "checkpoint_every": 1,
    "optimizer": {"lr": 3.0e-3},
}
POLICY = runs.BASE["policy"] | {"hidden_size": 16}
LABEL = "1-policy_gradient"
FIXED = {"staleness": 1, "weight_update": "deterministic"}


def recipe(folder: Path, asynchrony: dict[str, Any], stage: dict[str, Any] | None = None, **environment: Any) -> Path:
    """A short imitation, then six steps; a run of a second."""
    changes: dict[str, Any] = {"asynchrony": asynchrony} if asynchrony else {}
    if environment:
        changes["environment"] = {"kind": "./slow_words.py:SlowWords", **environment}
    rewards = {**runs.BASE["rewards"], "varied": {"kind": "./slow_words.py:varied"}}
    stages = [SUPERVISED, {**STAGE, **(stage or {})}]
    path = runs.write(
        folder, stages, policy=POLICY, rewards=rewards, evaluation={"n_tasks": 4, "validation_n_tasks": 4}, **changes
    )
    shutil.copy(slow_words.__file__, folder / "slow_words.py")
    return path


def tasks(folder: Path) -> list[list[str]]:
    """The tasks of each step, in order."""
    found: dict[int, dict[tuple[str, int], None]] = {}
    for record in read_trajectories(folder / "trajectories", stage=LABEL, phase="train"):
        found.setdefault(record.step, {})[record.task_id, 0] = None
    return [[task for task, _ in found[step]] for step in sorted(found)]


def ledger(folder: Path) -> dict[str, float]:
    """The last line of the ledger."""
    [*_, last] = [line for line in runs.log(folder) if "asynchrony/tokens_generated" in line]
    prefix = "asynchrony/tokens_"
    return {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}


def holds(folder: Path, bound: int) -> None:
    """Look at ages and ledger of a finished run."""
    assert max(runs.curve(folder, "asynchrony/staleness_max")) <= bound
    found = ledger(folder)
    assert found["generated"] == found["trained"] + found["discarded"] and found["queued"] == found["running"] == 0
    stored = read_trajectories(folder / "trajectories", stage=LABEL, phase="train")
    assert sum(record.trajectory.n_tokens for record in stored) == found["trained"] > 0


def test_a_bound_of_zero_equals_the_loop_without_asynchrony(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The whole machinery, with a copy of the weights and a thread for updates, held to no step ahead.
    plain = runs.run(recipe(tmp_path / "plain", {}), tmp_path / "plain" / "run").folder
    monkeypatch.setattr(Asynchrony, "is_on", True)
    path = recipe(tmp_path / "ahead", {}, {"correction": {"kind": "bypass"}})
    ahead = runs.run(path, tmp_path / "ahead" / "run").folder
    assert runs.weights(runs.newest(ahead)) == runs.weights(runs.newest(plain))
    assert max(runs.curve(plain, "optimizer/n_updates")) == 12
    own = ("asynchrony/", "tokens_by_staleness/")
    lines = [{k: v for k, v in line.items() if not k.startswith(own)} for line in runs.lines(ahead)]
    assert lines == runs.lines(plain)
    holds(ahead, 0)


def test_staleness_and_ledger_hold_while_tasks_take_unequally_long(tmp_path: Path) -> None:
    made = recipe(tmp_path, {"staleness": 2}, most_s=0.1)
    run = runs.run(made, tmp_path / "run").folder
    holds(run, 2)
    assert max(runs.curve(run, "asynchrony/staleness_max")) == 2 and max(runs.curve(run, "loss/sampler_kl_k3")) > 1e-6
    first, *others = [line for line in runs.log(run) if "time/step_s" in line]
    assert sum(line["time/step_s"] for line in others) <= others[-1]["time"] - first["time"]
    assert all(line["time/rollout_s"] <= line["time/trainer_idle_s"] + 0.01 for line in others)


@pytest.mark.extended
@pytest.mark.parametrize("salt", range(20))
def test_staleness_and_ledger_hold_in_twenty_runs(tmp_path: Path, salt: int) -> None:
    draw = random.Random(salt)
    staleness = draw.randint(1, 4)
    order = draw.choice(["in_order", "first_finished"])
    keys = {"staleness": staleness, "max_steps_ahead": draw.randint(1, staleness), "order": order}
    keys["checkpoint"] = draw.choice(["drain", "restart"])
    world = {"most_s": 0.3 * draw.random(), "slow_s": draw.random(), "salt": salt}
    path = recipe(tmp_path, keys, {"evaluate_every": draw.choice([2, 4]), "checkpoint_every": 2}, **world)
    holds(runs.run(path, tmp_path / "run").folder, staleness)


def test_slow_tasks_change_what_is_trained_only_where_the_first_finished_go_first(tmp_path: Path) -> None:
    def trained(name: str, keys: dict[str, Any], **world: Any) -> list[list[str]]:
        path = recipe(tmp_path / name, keys, {"checkpoint_every": 0}, n_turns=1, **world)
        return tasks(runs.run(path, tmp_path / name / "run").folder)

    even = trained("even", {}, most_s=0.0)
    in_order = trained("in_order", {"staleness": 2}, slow_s=0.4)
    first = trained("first", {"staleness": 2, "order": "first_finished"}, slow_s=0.4)
    assert any(task.endswith("2") for step in even for task in step)
    assert in_order == even != first
    assert Counter(chain(*first)) == Counter(chain(*even)), "overtaken, but not left out"


@pytest.mark.extended
def test_ten_kills_equal_an_uninterrupted_run_where_the_schedule_is_fixed(tmp_path: Path) -> None:
    draw = random.Random(0)
    assert kills(tmp_path, [draw.randrange(40, 160) for _ in range(10)], steps=24) == 10


def stop(path: Path, out: Path, n_steps: int = 2) -> None:
    """Press Ctrl-C once, in the first step of an environment after a checkpoint of so many steps or more is there."""
    pressed: list[bool] = []

    def press() -> None:
        if not pressed and list((out / "checkpoints").glob(f"{LABEL}-00000[{n_steps}-5]/state.json")):
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    with words.on_every_step(path, press), pytest.raises(Interrupted):
        runs.run(path, out)


@pytest.mark.parametrize("asynchrony", [{}, {"staleness": 1}], ids=["synchronous", "ahead"])
def test_a_stop_during_an_update_keeps_every_finished_step(
    asynchrony: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_updates, update = 0, TorchTrainer.update

    def pressed(*given: Any, **keys: Any) -> Any:
        nonlocal n_updates
        n_updates += 1
        if n_updates == 8:  # two a step
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)
        return update(*given, **keys)

    monkeypatch.setattr(TorchTrainer, "update", pressed)
    path = recipe(tmp_path, asynchrony, {"checkpoint_every": 0})
    with pytest.raises(Interrupted):
        runs.run(path, tmp_path / "run")
    assert runs.newest(tmp_path / "run").name == f"{LABEL}-000004"


def kills(folder: Path, at: list[int], steps: int = 6) -> int:
    """Kill runs one after the other at these events of files, and compare; returns how many were killed."""
    path = recipe(folder, FIXED | {"staleness": 2}, {"evaluate_every": 2, "steps": steps}, most_s=0.03)
    runs.run(path, folder / "whole")
    n_killed = 0
    for number in at:
        begin = ["--resume"] if (folder / "run" / "recipe.yaml").exists() else [path, "--out"]
        ended = children.run(folder, "train", *begin, folder / "run", kill_at=number)
        n_killed += ended.code == -9
    if not (folder / "run" / "result.json").exists():
        assert children.run(folder, "train", "--resume", folder / "run").code == 0
    assert n_killed
    assert_equal(folder / "run", folder / "whole")
    holds(folder / "run", 2)
    return n_killed


def test_a_stopped_run_trains_every_task_once_whatever_the_clock(tmp_path: Path) -> None:
    # Whatever the clock, something runs at the cut of four steps: the fourth waits until the fifth has sampled, and
    # that waits for the checkpoint.
    stage, out = {"evaluate_every": 6}, tmp_path / "run" / "run"
    whole = runs.run(recipe(tmp_path / "whole", {}, stage), tmp_path / "whole" / "run").folder
    fourth, fifth = ([task.rpartition("/")[2] for task in step] for step in tasks(whole)[3:5])
    until = dict.fromkeys(fourth, str(tmp_path / fifth[0]))
    until |= dict.fromkeys(fifth, str(out / "checkpoints" / f"{LABEL}-000004" / "state.json"))
    keys = {"staleness": 2, "checkpoint": "restart"}
    held = {"until": until, "marks": str(tmp_path), "after": str(out / "trajectories" / "before-eval-000000.parquet")}
    path = recipe(tmp_path / "run", keys, stage, most_s=0.1, **held)
    stop(path, out, 4)
    runs.run(path, out, resume=True)
    assert tasks(out) == tasks(whole)
    holds(out, 2)
    assert ledger(out)["discarded"] > 0, "what ran was begun again"


def test_a_stop_in_the_middle_changes_nothing_but_the_ledger_where_the_schedule_is_fixed(tmp_path: Path) -> None:
    path = recipe(tmp_path, FIXED, most_s=0.05)
    whole = runs.run(path, tmp_path / "whole").folder
    stop(path, tmp_path / "stopped")
    stopped = runs.run(path, tmp_path / "stopped", resume=True).folder
    assert runs.weights(runs.newest(stopped)) == runs.weights(runs.newest(whole))
    assert tasks(stopped) == tasks(whole)


def test_a_step_is_incomplete_while_its_thread_is_at_work_whoever_stops_waiting(tmp_path: Path) -> None:
    recipe_ = load(recipe(tmp_path, {"staleness": 1}))
    stage = recipe_.stages[1]
    assert isinstance(stage, PolicyGradient)
    ahead = RolloutsAhead(Lookahead(recipe_.asynchrony, pack_groups, unpack_groups), stage, source=None)  # type: ignore[arg-type]
    begun, go_on = threading.Event(), threading.Event()

    async def run() -> None:
        task = asyncio.create_task(ahead.work(lambda: (begun.set(), go_on.wait())))
        await asyncio.to_thread(begun.wait)
        for _ in range(2):  # two Ctrl-C
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ahead.is_incomplete
        go_on.set()
        while ahead.is_incomplete:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("checkpoint", "in_background", "waits"),
    [
        ("drain", True, True),
        ("now", True, False),
        ("now", False, True),
    ],
)
def test_an_evaluation_waits_for_running_groups_or_its_checkpoint_does(
    tmp_path: Path, checkpoint: str, in_background: bool, waits: bool
) -> None:
    recipe_ = load(recipe(tmp_path, {"staleness": 1, "checkpoint": checkpoint}, {"evaluate_every": 2}))
    ahead = RolloutsAhead(Lookahead(recipe_.asynchrony, pack_groups, unpack_groups), recipe_.stages[1], source=None)  # type: ignore[arg-type]
    asked: list[float] = []

    async def is_drained(wait_s: float) -> bool:
        asked.append(wait_s)
        return True

    ahead.controller = SimpleNamespace(is_drained=is_drained)  # type: ignore[assignment]
    beside = object() if in_background else None
    for step, expected in ((1, False), (2, waits)):
        run: Any = SimpleNamespace(
            background_evaluation=beside, state=SimpleNamespace(step=step), runner=SimpleNamespace(engine=None)
        )
        asyncio.run(ahead.before_snapshot(run, is_checkpoint=False))
        assert bool(asked) == expected


def test_an_engine_with_old_weights_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = CopiedEngine.generate

    async def stale(self: Any, prompt: Any, params: Any, session: str = "") -> Generation:
        found = await generate(self, prompt, params, session)
        if session and found.policy_version > 3:  # the canary, which has no session, is told the truth
            return Generation(found.prompt, found.token_ids, found.logprobs, found.finish, 3)
        return found

    monkeypatch.setattr(CopiedEngine, "generate", stale)
    with pytest.raises(RlhfError, match="kept old weights"):
        runs.run(recipe(tmp_path, {"staleness": 1}), tmp_path / "run")


def test_too_many_failures_end_a_run_that_plays_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = CopiedEngine.generate

    async def broken(self: Any, prompt: Any, params: Any, session: str = "") -> Generation:
        if session and self.policy_version > 3:
            raise EngineError("out of memory")
        return await generate(self, prompt, params, session)

    monkeypatch.setattr(CopiedEngine, "generate", broken)
    with pytest.raises(TrainingError, match="ended with infrastructure errors"):
        runs.run(recipe(tmp_path, {"staleness": 1}), tmp_path / "run")


def test_the_user_is_told_who_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("rlhf.progress.RichProgress.note", lambda self, text: notes.append(text))
    runs.run(recipe(tmp_path, {"staleness": 1}, slow_s=0.3), tmp_path / "run")
    assert any(note.startswith("step 1 waits for words/") and "are stored" in note for note in notes)


def test_groups_come_back_as_they_were_packed(tmp_path: Path) -> None:
    from rlhf.data import Failure, Outcome, ScoredGroup

    run = runs.run(recipe(tmp_path, {"staleness": 1}), tmp_path / "run").folder
    records = list(read_trajectories(run / "trajectories", stage=LABEL, phase="train"))[:4]
    trajectories = tuple(record.trajectory for record in records)
    failure = Failure(9, Outcome.ENV_ERROR, "gone", True)
    group = ScoredGroup(records[0].task_id, trajectories, tuple(r.score for r in records if r.score), (failure,))
    only = ScoredGroup("lost", (), (), (failure,))
    assert unpack_groups(pack_groups({7: group, 3: only})) == {7: group, 3: only}
    assert list(unpack_groups(pack_groups({7: group, 3: only}))) == [7, 3]
    assert unpack_groups(pack_groups({})) == {}


def test_the_loss_is_told_how_old_each_token_is(tmp_path: Path) -> None:
    counted = {"kind": "./counted_loss.py:Counted", "file": str(tmp_path / "ages.jsonl")}
    path = recipe(tmp_path, {"staleness": 2}, {"loss": counted}, most_s=0.1)
    shutil.copy(counted_loss.__file__, tmp_path / "counted_loss.py")
    run = runs.run(path, tmp_path / "run").folder
    told = Counter[str]()
    for counts in (tmp_path / "ages.jsonl").read_text().splitlines():
        told.update(json.loads(counts))
    expected = Counter[int]()
    for line in (line for line in runs.log(run) if "asynchrony/staleness_max" in line):
        for age in range(3):
            expected[age] += round(line["batch/n_policy_tokens"] * line.get(f"tokens_by_staleness/{age}", 0.0))
    assert {int(age): n for age, n in told.items()} == {age: n for age, n in expected.items() if n}
    assert len(told) > 1
