"""Each broken environment is caught, with the finding that names what it broke; a sound one passes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from environments.base import Properties, StepResult
from environments.check import check_environment
from rlhf.data import Task
from rlhf.data.report import Report


class Walker:
    """Cells 0 to 4; behind cell 4 is the door, before cell 0 a pit."""

    def __init__(self, seed: int) -> None:
        self.cell = seed % 3 + 1
        self.opening = self.told()

    def told(self, valid: bool = True) -> StepResult:
        over = not 0 <= self.cell < 5
        return StepResult(
            f"You are in cell {self.cell}.",
            reward=float(self.cell >= 5),
            terminated=over,
            state_key=str(self.cell),
            success=self.cell >= 5 if over else None,
            valid=valid,
            admissible_actions=("left", "right"),
        )

    async def step(self, action: str) -> StepResult:
        self.cell += {"right": 1, "left": -1}.get(action, 0)
        return self.told(valid=action in ("left", "right"))

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Corridor:
    """The seed of a task is where the walker starts."""

    walker: Callable[[int], Any] = Walker
    properties: ClassVar[Any] = Properties(True, True, True, inline=True, oracle=True, repeats=True)

    def tasks(self, split: str) -> Any:
        first = {"train": 0, "test": 100}[split]
        return [Task(id=f"corridor/{split}/{i}", seed=first + i) for i in range(3)]

    def start(self, task: Task) -> Any:
        return self.walker(task.seed)

    def plan(self, task: Task, taken: Sequence[str]) -> Any:
        cell = task.seed % 3 + 1 + sum({"right": 1, "left": -1}.get(action, 0) for action in taken)
        return ["right"] * (5 - cell) if 0 <= cell < 5 else None


def check(environment: Any, **settings: Any) -> Report:
    return check_environment(environment, **{"other_process": False, **settings})


def test_a_sound_environment_passes_also_in_another_process() -> None:
    report = check_environment(Corridor())
    assert report.ok, str(report)
    assert any("another process" in finding.promise for finding in report.findings)


class SynchronousWalker(Walker):
    def step(self, action: str) -> StepResult:  # type: ignore[override]
        self.cell += {"right": 1, "left": -1}.get(action, 0)
        return self.told(valid=action in ("left", "right"))

    def close(self) -> None: ...  # type: ignore[override]


class Undeclared(Corridor):
    properties: ClassVar[Any] = None


@pytest.mark.parametrize("environment", [Corridor(SynchronousWalker), Undeclared()])
def test_synchronous_steps_and_no_declared_properties_are_fine(environment: Corridor) -> None:
    report = check(environment)
    assert report.ok, str(report)


# --- walkers that break a promise ----------------------------------------------------------------------------------


class NoOpening(Walker):
    def __init__(self, seed: int) -> None:
        self.cell = 1


class RaisesAtTheFork(Walker):
    async def step(self, action: str) -> StepResult:
        if self.cell == 2:
            raise KeyError("fork")
        return await super().step(action)


class ChokesOnGarbage(Walker):
    async def step(self, action: str) -> StepResult:
        assert len(action) < 100, "too long"
        return await super().step(action)


class Tells(Walker):
    """Changes what a sound walker tells."""

    changes: ClassVar[dict[str, Any]] = {}

    async def step(self, action: str) -> StepResult:
        return replace(await super().step(action), **self.changes)


def telling(**changes: Any) -> Callable[[int], Any]:
    return type("Telling", (Tells,), {"changes": changes})


class SilentAboutSuccess(Walker):
    def told(self, valid: bool = True) -> StepResult:
        return replace(super().told(valid), success=None)


class OverAtOnce(Walker):
    def told(self, valid: bool = True) -> StepResult:
        return replace(super().told(valid), terminated=True, success=False)


class DoesNotKnowLeft(Walker):
    async def step(self, action: str) -> StepResult:
        return self.told(valid=False) if action == "left" else await super().step(action)


class CountsEpisodes(Walker):
    n = 0

    def told(self, valid: bool = True) -> StepResult:
        CountsEpisodes.n += 1
        return replace(super().told(valid), reply=f"Message {CountsEpisodes.n} of this process.")


class ForgetsTheState(Walker):
    def told(self, valid: bool = True) -> StepResult:
        return replace(super().told(valid), state_key=str(time.perf_counter_ns()))


class HashesText(Walker):
    def told(self, valid: bool = True) -> StepResult:
        return replace(super().told(valid), state_key=str(hash(f"cell {self.cell}")))


class LeaksThreads(Walker):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()


class LeaksFiles(Walker):
    held: ClassVar[list[int]] = []

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.held.append(os.open(os.devnull, os.O_RDONLY))


class ClosesOnce(Walker):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise ValueError("already closed")
        self.closed = True


class Slow(Walker):
    async def step(self, action: str) -> StepResult:
        time.sleep(0.006)
        return await super().step(action)


# --- environments that break a promise -----------------------------------------------------------------------------


class Thawed:
    """Not a dataclass at all."""

    properties = Properties(splits=("train",))
    tasks, start = Corridor.tasks, Corridor.start
    walker = Walker


@dataclass(frozen=True)
class Unpicklable(Corridor):
    lock: Any = field(default_factory=threading.Lock)


class NoTestSplit(Corridor):
    def tasks(self, split: str) -> Any:
        if split == "test":
            raise FileNotFoundError("test.json")
        return super().tasks(split)


class Shuffles(Corridor):
    n: ClassVar[list[int]] = [0]

    def tasks(self, split: str) -> Any:
        self.n[0] += 1
        listed = super().tasks(split)
        return listed if self.n[0] % 2 else listed[::-1]


class SameId(Corridor):
    def tasks(self, split: str) -> Any:
        return [replace(task, id="corridor") for task in super().tasks(split)]


class EvaluatesOnTrain(Corridor):
    def tasks(self, split: str) -> Any:
        return [Task(id=f"{split}/{i}", seed=i) for i in range(3)]


class Numbers(Corridor):
    def tasks(self, split: str) -> Any:
        return range(3)


class Empty(Corridor):
    def tasks(self, split: str) -> Any:
        return []


class Secretive(Corridor):
    def tasks(self, split: str) -> Any:
        return [replace(task, info={"set": {1, 2}}) for task in super().tasks(split)]


class WrongPlan(Corridor):
    def plan(self, task: Task, taken: Sequence[str]) -> Any:
        return ["left"] * 9


class TextPlan(Corridor):
    def plan(self, task: Task, taken: Sequence[str]) -> Any:
        return "right right"


class NoPlan(Corridor):
    def plan(self, task: Task, taken: Sequence[str]) -> Any:
        return None


class BoastsOfAnOracle(Corridor):
    plan: Any = None


class Arrays(Corridor):
    def tasks(self, split: str) -> Any:
        return [replace(task, info={"cells": np.arange(3)}) for task in super().tasks(split)]


class TextProperties(Corridor):
    properties: ClassVar[Any] = {"deterministic": True}


GALLERY: list[tuple[Any, str, str]] = [
    (Corridor(NoOpening), "start(): gives an episode with an opening", "corridor/train/0: `opening` is None"),
    (Corridor(RaisesAtTheFork), "step(): raises nothing", "KeyError: 'fork'"),
    (Corridor(ChokesOnGarbage), "step(): raises nothing", "AssertionError: too long"),
    (Corridor(telling(reply=None)), "StepResult.reply: is text", "got None"),
    (Corridor(telling(reward=float("nan"))), "StepResult.reward: is a finite number", "got nan"),
    (Corridor(telling(reward="1")), "StepResult.reward: is a finite number", "got '1'"),
    (Corridor(telling(terminated=None)), "StepResult.terminated: is a bool", "got None"),
    (Corridor(telling(state_key=7)), "StepResult.state_key: is text or None", "got 7"),
    (Corridor(telling(admissible_actions=("b", "a"))), "StepResult.admissible_actions", "got ('b', 'a')"),
    (Corridor(telling(admissible_actions=("a", "a"))), "StepResult.admissible_actions", "got ('a', 'a')"),
    (Corridor(telling(success=False)), "StepResult.success: None before the end", "got False"),
    (Corridor(telling(valid=True)), "step(): garbage is not valid", "'' counts as understood, answered by '"),
    (Corridor(SilentAboutSuccess), "StepResult.success: True or False at the end", "got None"),
    (Corridor(OverAtOnce), "opening: the episode is not over yet", "corridor/train/0"),
    (Corridor(DoesNotKnowLeft), "step(): understands every admissible action", "'left'"),
    (Corridor(CountsEpisodes), "deterministic: same actions, same transcript", "reply 'Message"),
    (Corridor(ForgetsTheState), "replayable: same actions, same state", "state_key '"),
    (Corridor(LeaksThreads), "close(): frees threads", "6 more threads after 6 closed episodes"),
    (Corridor(ClosesOnce), "close(): may be called twice", "ValueError: already closed"),
    (Corridor(Slow), "inline: a step takes under 5 ms", "median"),
    (Thawed(), "class: is a frozen dataclass", "@dataclass(frozen=True)"),
    (Unpicklable(), "class: can be pickled", "TypeError: cannot pickle '_thread.lock' object"),
    (NoTestSplit(), "tasks(): raises nothing", "split 'test': FileNotFoundError: test.json"),
    (Shuffles(), "tasks(): same tasks in the same order every time", "'corridor/train/0', then 'corridor/train/2'"),
    (SameId(), "tasks(): ids are unique", "'corridor' is more than once in 'train'"),
    (EvaluatesOnTrain(), "tasks(): no task is in two splits", "3 of 'train' are in 'test'"),
    (Numbers(), "tasks(): gives Task objects", "split 'train': got 0 (int), expected Task(id=...)"),
    (Empty(), "tasks(): lists at least one task", "none in split 'train'"),
    (Secretive(), "Task.info: holds plain JSON values", "not JSON serializable"),
    (Arrays(), "Task.info: holds plain JSON values", "Object of type ndarray is not JSON serializable"),
    (WrongPlan(), "plan(): solves the task", "corridor/train/0 after (): ['left', 'left'"),
    (TextPlan(), "plan(): gives a sequence of actions", "'right right'"),
    (NoPlan(), "plan(): knows a way for some task", "0 of 4 tasks"),
    (BoastsOfAnOracle(), "oracle: has a method plan(task, taken)", "`plan` is missing"),
    (TextProperties(), "properties: is a Properties object", "{'deterministic': True}"),
]


@pytest.mark.parametrize(("environment", "promise", "got"), GALLERY)
def test_broken_environments_are_caught(environment: Any, promise: str, got: str) -> None:
    report = check(environment)
    assert not report.ok
    found = [finding for finding in report.broken if finding.promise.startswith(promise)]
    assert found, str(report)
    assert got in found[0].detail


def test_one_fault_gives_one_finding() -> None:
    report = check(EvaluatesOnTrain())
    assert [finding.promise for finding in report.broken] == ["tasks(): no task is in two splits"]
    assert "BROKEN  tasks(): no task is in two splits" in str(report)
    assert "3 of 'train' are in 'test'" in str(report)


def test_a_state_key_that_never_changes_is_caught() -> None:
    report = check(Corridor(AlwaysHere))
    assert [finding.promise for finding in report.broken] == ["state_key: tells states apart"], str(report)


class AlwaysHere(Walker):
    def told(self, valid: bool = True) -> StepResult:
        return replace(super().told(valid), state_key="here")


def test_a_state_key_that_leaves_out_what_is_possible_is_caught() -> None:
    report = check(Corridor(OneWay))
    assert [finding.promise for finding in report.broken] == ["state_key: equal states have equal actions"], str(report)
    assert "has ('left', 'right'), then ('right',)" in report.broken[0].detail


class OneWay(Walker):
    """It may turn left once."""

    n_left = 0

    async def step(self, action: str) -> StepResult:
        if action == "left":
            self.n_left += 1
        return await super().step("right" if self.n_left > 1 else action)

    def told(self, valid: bool = True) -> StepResult:
        return replace(super().told(valid), admissible_actions=("right",) if self.n_left else ("left", "right"))


def test_leaked_file_descriptors_are_counted() -> None:
    try:
        report = check(Corridor(LeaksFiles))
    finally:
        for descriptor in LeaksFiles.held:
            os.close(descriptor)
    assert [finding.promise for finding in report.broken] == ["close(): frees file descriptors"], str(report)


def test_what_hangs_on_the_hash_seed_is_caught_in_another_process() -> None:
    report = check_environment(Corridor(HashesText))
    promise = "deterministic: same transcript and task ids in another process"
    assert [finding.promise for finding in report.broken] == [promise], str(report)


class Hangs(Walker):
    async def step(self, action: str) -> StepResult:
        time.sleep(30)
        return await super().step(action)


def test_a_step_that_hangs_is_named_and_does_not_hang_the_check() -> None:
    begin = time.monotonic()
    report = check(Corridor(Hangs), call_limit_s=0.3)
    assert time.monotonic() - begin < 25
    assert report.broken[-1].promise == "step(): returns"
    assert report.broken[-1].detail == "had not returned after 0.3 s"


class Endless(Walker):
    async def step(self, action: str) -> StepResult:
        self.cell = 1 + self.cell % 3
        return self.told(valid=action in ("left", "right"))


@dataclass(frozen=True)
class Treadmill(Corridor):
    walker: Callable[[int], Any] = Endless
    properties: ClassVar[Any] = Properties(thread_safe=True, repeats=True)
    max_steps: ClassVar[int] = 40


def test_an_environment_that_never_ends_is_cautioned_against() -> None:
    report = check(Treadmill())
    [caution] = report.cautions
    assert report.ok and "1 caution" in report.heading and "CAUTION" in str(report)
    assert "the longest after 40 random actions" in caution.detail and "terminated=True" in caution.detail
    assert not check(Treadmill(Walker)).cautions


class Stepless(Walker):
    step = None  # type: ignore[assignment]


class Closeless(Walker):
    close = None  # type: ignore[assignment]


@pytest.mark.parametrize(("walker", "lacking"), [(Stepless, "step"), (Closeless, "close")])
def test_an_episode_without_a_method_is_a_finding_with_its_line(walker: type[Walker], lacking: str) -> None:
    [finding] = check(Corridor(walker)).broken
    assert finding.promise == "start(): gives an episode with step and close"
    assert f"{walker.__name__} without {lacking}" in finding.detail and "test_check.py:" in finding.detail
