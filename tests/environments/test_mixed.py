"""Mixtures: shares of tasks, limits and rewards of parts, and what is passed on."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.base import properties_of
from environments.check import check_environment
from environments.contrib.long_memory import LongMemory
from environments.games.key_door import Keyhole
from environments.wrappers.mixed import Mixed, Share
from rewards.combinators.of_part import OfPart
from rewards.shaping.outcome import Outcome as OutcomeReward
from rlhf.data import Outcome, Score, ScoredGroup, Task, Trajectory
from rlhf.errors import EnvError
from rlhf.metrics import METRICS
from rlhf.rollout.runner import RolloutBatch

ROOMS, STORY = Keyhole(rows=2, columns=2, n_train=40), LongMemory(n_train=40)


def mixed(**keys: Any) -> Mixed:
    return Mixed(parts={"rooms": Share(environment=ROOMS, **keys), "story": Share(environment=STORY)})


def test_it_keeps_the_contract_of_an_environment() -> None:
    report = check_environment(mixed(weight=3), other_process=False)
    assert report.ok, str(report)
    assert properties_of(mixed()).oracle and mixed().max_steps == max(ROOMS.max_steps, STORY.max_steps)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
def test_every_beginning_of_the_list_holds_the_shares(weights: list[float]) -> None:
    parts = {f"p{i}": Share(environment=ROOMS, weight=w) for i, w in enumerate(weights)}
    names = [task.info["part"] for task in Mixed(parts=parts).tasks("train")]
    counts = list(accumulate(names, lambda seen, name: seen | {name: seen.get(name, 0) + 1}, initial={}))
    for n, seen in enumerate(counts):
        for i, weight in enumerate(weights):
            assert abs(seen.get(f"p{i}", 0) - n * weight / sum(weights)) < len(weights)
    assert max(Counter(names).values()) == 40, "until a part is used up"


def test_a_task_is_its_parts_own_and_its_demonstrations_too() -> None:
    made = mixed()
    task = next(task for task in made.tasks("test") if task.info["part"] == "rooms")
    [own] = [t for t in ROOMS.tasks("test") if f"rooms/{t.id}" == task.id]
    assert made.own(task) == (ROOMS, own)
    assert made.start(task).opening == ROOMS.start(own).opening
    assert made.plan(task, ()) == ROOMS.plan(own, ()) and made.subgoal(task, ()) == "fetch the key"
    story = next(task for task in made.tasks("test") if task.info["part"] == "story")
    assert made.recall(story, ["next"]) and made.recall(task, ()) == made.subgoal(story, ()) == ""
    with pytest.raises(EnvError, match="of another environment"):
        made.start(own)


def test_a_part_has_a_limit_of_its_own() -> None:
    made = mixed(max_steps=2)
    task = next(task for task in made.tasks("train") if task.info["part"] == "rooms")

    async def play() -> list[Any]:
        episode = made.start(task)
        return [await episode.step("look") for _ in range(2)]

    first, second = asyncio.run(play())
    assert not first.truncated and second.truncated and second.success is False

    async def goes_on() -> None:
        episode = made.start(task)
        for _ in range(3):
            await episode.step("look")

    with pytest.raises(EnvError, match="the episode is over"):
        asyncio.run(goes_on())


def test_a_plan_ends_within_the_limit_of_the_part() -> None:
    free = mixed()
    task = next(t for t in free.tasks("train") if t.info["part"] == "rooms")
    path = free.plan(task, ())
    assert path is not None and len(path) > 2
    for limit in (len(path) - 1, len(path)):
        made = mixed(max_steps=limit)
        assert made.plan(task, ()) == (path if limit == len(path) else None)
        assert made.plan(task, path[:1]) == (path[1:] if limit == len(path) else None)


def test_a_part_with_a_limit_may_step_without_await() -> None:
    class Plain(Keyhole):
        def start(self, task: Task) -> Any:
            episode = super().start(task)
            return SimpleNamespace(opening=episode.opening, step=lambda _: episode.opening, close=lambda: None)

    made = Mixed(parts={"a": Share(environment=Plain(max_steps=9), max_steps=1), "b": Share(environment=LongMemory())})
    [task] = [task for task in made.tasks("train")[:2] if task.id.startswith("a/")]

    async def play() -> Any:
        episode = made.start(task)
        result = await episode.step("look")
        await episode.close()
        return result

    assert asyncio.run(play()).truncated
    share = Share(environment=Plain(max_steps=9), max_steps=20)
    assert Mixed(parts={"a": share, "b": share}).max_steps == 9  # the lower of both


@pytest.mark.parametrize("name", ["a/b", "", "two words"])
def test_a_name_that_could_not_stand_in_an_id_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a part"):
        Mixed(parts={name: Share(environment=ROOMS), "b": Share(environment=STORY)})


def test_a_mixture_within_a_mixture_is_refused() -> None:
    outer = Mixed(parts={"a": Share(environment=mixed()), "b": Share(environment=ROOMS)})
    with pytest.raises(EnvError, match="have a part already"):
        outer.tasks("train")


def test_success_is_kept_for_each_part() -> None:
    def group(task_id: str, *solved: bool) -> ScoredGroup:
        ends = [Outcome.SOLVED if x else Outcome.FAILED for x in solved]
        trajectories = tuple(Trajectory(task_id, i, "", (), end) for i, end in enumerate(ends))
        return ScoredGroup(task_id, trajectories, tuple(Score({}, (), 0.0) for _ in ends))

    groups = (group("rooms/1", True, False), group("rooms/2", True, True), group("story/1", False, False))
    found = {k: v for k, v in RolloutBatch(groups, 1.0).metrics().items() if k.startswith("success_of/")}
    assert found == {"success_of/rooms": 0.75, "success_of/story": 0.0} and "success_of/*" in METRICS
    assert not any(k.startswith("success_of/") for k in RolloutBatch(groups[:2], 1.0).metrics())


def test_a_reward_of_one_part_is_nothing_to_the_others() -> None:
    reward = OfPart(part="rooms", reward=OutcomeReward(failure=-1.0))
    lost = Trajectory("t", 0, "", (), Outcome.FAILED)
    said = [asyncio.run(reward(Task("t", info={"part": part}), lost)) for part in ("rooms", "story")]
    assert [verdict.value for verdict in said] == [-1.0, 0.0]


def test_a_part_may_start_asynchronously_and_be_cut() -> None:
    class Slow:
        properties = properties_of(Keyhole())

        def __init__(self) -> None:
            self.inner = Keyhole()

        def tasks(self, split: str) -> Any:
            return self.inner.tasks(split)

        async def start(self, task: Task) -> Any:
            return self.inner.start(task)

    mixed = Mixed(parts={"slow": Share(environment=Slow(), max_steps=1), "b": Share(environment=LongMemory())})
    [task] = [task for task in mixed.tasks("train")[:2] if task.id.startswith("slow/")]

    async def play() -> Any:
        episode = await mixed.start(task)
        return await episode.step("look")

    assert asyncio.run(play()).truncated
