"""The controller of groups with workers that die, come back late or never, and with engines that are busy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhf.asynchrony import controller as module
from rlhf.asynchrony.admission import AdmissionLimit
from rlhf.asynchrony.controller import Controller, GroupLostError, Job, ServersLostError, WorkerLostError
from rlhf.asynchrony.pipeline import Rules
from rlhf.data import ScoredGroup, Task
from rlhf.errors import EngineError, TrainingError
from rlhf.inference.vllm.instance import Load

TASKS = [Task("t/0", 0), Task("t/1", 1), Task("t/0", 0), Task("t/3", 3)]
RULES = Rules(n_per_step=4, n_steps=4)


@dataclass
class Plays:
    """A worker that asks `do` for each group, and `back` when it is to come back."""

    name: str
    do: Callable[[Job], Awaitable[None]]
    back: Callable[[], Awaitable[None]]
    places: int = 8
    jobs: list[Job] = field(default_factory=list)

    async def play(self, job: Job, count: Callable[[int, int], None]) -> ScoredGroup:
        self.jobs.append(job)
        await self.do(job)
        return ScoredGroup(job.task.id, (), (), ())

    async def wait_ready(self) -> None:
        await self.back()


async def nothing(*_: Any) -> None:
    pass


async def dies(job: Job) -> None:
    raise WorkerLostError("a rollout worker has died", where="it", got="SIGKILL")


async def never() -> None:
    raise EngineError("a rollout worker cannot start", where="it", got="No module named 'minigrid'", hint="install it")


def opened(*workers: Plays, limit: AdmissionLimit | None = None) -> Controller:
    return Controller(RULES, slice(0, 4), 4, list(workers), limit)


async def begin(controller: Controller) -> None:
    await controller.open(0)
    await controller.offer({0: TASKS, 1: TASKS})


def test_a_job_holds_one_task_and_how_often_it_came_before() -> None:
    async def run() -> None:
        worker = Plays("a", nothing, nothing)
        controller = opened(worker)
        await begin(controller)
        await controller.due(5.0)
        assert [(job.number, job.task.id, job.n_before) for job in worker.jobs[:4]] == [
            *((0, "t/0", 0), (0, "t/1", 0), (0, "t/0", 1), (0, "t/3", 0))
        ]
        await controller.close()

    asyncio.run(run())


def test_one_that_cannot_come_back_is_named_with_its_reason_and_the_others_go_on() -> None:
    async def run() -> None:
        lost, other = Plays("worker 0", dies, never), Plays("worker 1", nothing, nothing)
        controller = opened(lost, other)
        await begin(controller)
        due = await controller.due(5.0)
        assert not isinstance(due, str) and due.ordinals == (0, 1, 2, 3)
        await controller.train(due.ordinals)
        assert (await controller.counts()).lost == {
            "worker 0": "a rollout worker cannot start: No module named 'minigrid'"
        }
        assert "worker 0 (a rollout worker cannot start: No module named 'minigrid')" in controller._waited_for()
        await controller.close()

    asyncio.run(run())


def test_where_none_comes_back_the_run_ends_with_all_reasons() -> None:
    async def run() -> None:
        controller = opened(Plays("worker 0", dies, never), Plays("worker 1", dies, never))
        await begin(controller)
        try:
            with pytest.raises(EngineError, match="no rollout worker is left") as caught:
                await controller.due(5.0)
        finally:
            await controller.close()
        assert caught.value.where == "worker 0, worker 1" and "minigrid" in caught.value.got
        assert caught.value.hint == "install it"

    asyncio.run(run())


@pytest.mark.parametrize("n_rounds", range(6))
def test_a_stop_is_heard_at_every_moment_of_a_change(n_rounds: int) -> None:
    # However many rounds of the loop lie between what is waited for and the cancellation.
    async def run() -> None:
        at_work = asyncio.Event()
        controller = opened(Plays("a", lambda job: at_work.wait(), nothing))  # type: ignore[arg-type,return-value]
        await begin(controller)
        waiting = asyncio.create_task(controller.due(5.0))
        for _ in range(10):
            await asyncio.sleep(0)
        controller._changed.set()
        for _ in range(n_rounds):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await controller.close()

    asyncio.run(run())


@pytest.mark.parametrize("n_rounds", range(8))
def test_nothing_begins_once_it_is_closed(n_rounds: int) -> None:
    async def run() -> None:
        worker = Plays("a", nothing, nothing, places=1)
        controller = opened(worker)
        await begin(controller)
        for _ in range(n_rounds):
            await asyncio.sleep(0)
        await controller.close()
        n = len(worker.jobs)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(worker.jobs) == n and not controller._playing

    asyncio.run(run())


def lost(times: int, make: Callable[[], GroupLostError]) -> Callable[[Job], Awaitable[None]]:
    """Work on one group that loses its worker so many times."""
    left = [times]

    async def do(job: Job) -> None:
        if (job.number, job.task.id) == (0, "t/1") and left[0]:
            left[0] -= 1
            raise make()

    return do


def first_step(worker: Plays) -> Any:
    """What the first step trains."""

    async def run() -> Any:
        controller = opened(worker)
        await begin(controller)
        try:
            return await controller.due(5.0)
        finally:
            await controller.close()

    return asyncio.run(run())


def test_a_task_that_kills_its_workers_four_times_is_named() -> None:
    def dying(times: int) -> Plays:
        return Plays("a", lost(times, lambda: WorkerLostError("it has died", got="SIGKILL")), nothing)

    assert first_step(dying(3)).ordinals == (0, 1, 2, 3)
    with pytest.raises(TrainingError, match="every process that plays this task dies") as caught:
        first_step(dying(4))
    assert caught.value.where == "t/1" and "started 4 times" in caught.value.got


def test_servers_that_come_and_go_are_not_the_fault_of_a_task_and_end_the_run_by_name() -> None:
    def unserved(times: int) -> Plays:
        return Plays("a", lost(times, lambda: ServersLostError("no server had the weights", got="refused")), nothing)

    assert first_step(unserved(15)).ordinals == (0, 1, 2, 3)
    with pytest.raises(EngineError, match="the servers were lost before a group was played") as caught:
        first_step(unserved(16))
    assert "t/1" in caught.value.where and "16 times" in caught.value.got


def test_one_that_comes_back_late_plays_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)

    async def run() -> None:
        state = {"n_deaths": 0, "n_asked": 0}

        async def dies_once(job: Job) -> None:
            if not state["n_deaths"]:
                state["n_deaths"] = 1
                await dies(job)

        async def third_time() -> None:
            state["n_asked"] += 1
            if state["n_asked"] < 3:
                await never()

        controller = opened(
            Plays("worker 0", dies_once, third_time, places=1), Plays("worker 1", stuck, nothing, places=1)
        )
        await begin(controller)
        while controller.groups.keys() != {0, *range(2, 8)} and controller.groups.keys() != set(range(1, 8)):
            assert isinstance(await controller.due(0.05), str)
        assert state["n_asked"] == 3 and not (await controller.counts()).lost
        await controller.close()

    async def stuck(job: Job) -> None:
        await asyncio.sleep(60)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_busy_engines_hold_new_groups_back_and_that_is_said() -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def waits(job: Job) -> None:
            await gate.wait()

        worker, limit = Plays("a", waits, nothing), AdmissionLimit(most=4)
        controller = opened(worker, limit=limit)
        await begin(controller)
        await asyncio.sleep(0)
        assert len(worker.jobs) == 4, "no more at a time than the limit, whatever places there are"
        for _ in range(2):
            controller.observe([Load("server", running=2, waiting=5)])
        assert limit.now == 3
        assert "at most 3 at a time, as 5 requests wait at the engines" in await controller.due(0.01)
        await controller.hold()
        controller.observe([Load("server", waiting=5)])
        controller.observe([Load("server", waiting=5)])
        assert limit.now == 3, "requests wait while weights arrive"
        gate.set()
        await controller.close()

    asyncio.run(run())


def test_preempted_requests_cut_the_limit_and_idle_engines_raise_it_again() -> None:
    limit = AdmissionLimit(most=8)
    limit.observe([Load("a", n_preempted=7)], n_playing=8)
    assert limit.now == 8, "what was before"
    limit.observe([Load("a", n_preempted=9)], n_playing=8)
    assert (limit.now, limit.reason) == (6, "2 were preempted there")
    limit.observe([Load("a", n_preempted=9, cache=0.95)], n_playing=6)
    assert limit.now == 6, "the cache is full"
    for _ in range(5):
        limit.observe([Load("a", n_preempted=9, cache=0.5)], n_playing=limit.now)
    assert (limit.now, limit.reason) == (8, "")
    limit.observe([], n_playing=0)
    for _ in range(40):
        limit.observe([Load("a", waiting=1)], n_playing=1)
    assert limit.now == 1
