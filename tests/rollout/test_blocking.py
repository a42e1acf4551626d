"""Cancellation, blocking calls and the watchdog: real cancellations end a run, a part's own only its attempt."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.chat import ChatAgent
from environments.base import StepResult
from environments.workers.pool import Processes
from rewards.combinators.combine import Combine, Part
from rewards.shaping.outcome import EnvironmentReward
from rlhf.commands.output import warnings_told
from rlhf.data import Action, Outcome, SamplingParams, Task, Trajectory, Turn
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.blocking import ON_LOOP, Watchdog
from rlhf.rollout.executors import CallError, CallTimeout, InlineLane
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.blocked_loop import standing
from tests.rollout.garbage import Endless
from tests.rollout.small_world import INLINE, THREADS, Corridor, Plain, tokenizer
from tests.rollout.trouble import Troubled
from tests.tiers import tiered

LIMITS = Limits(step_timeout_s=20.0, start_timeout_s=20.0, episode_timeout_s=60.0, max_retries=0)
ROOT = Path(__file__).resolve().parents[2]


async def rollout(environment: Any, agent: Any = None, limits: Limits = LIMITS, n: int = 3) -> list[Trajectory]:
    engine = ScriptedEngine(lambda text: "go north", tokenizer=tokenizer())
    tasks = Corridor().tasks("test")[:n]
    parts = (environment, agent or Plain(), engine, Renderer(tokenizer()), limits, SamplingParams())
    groups = await run_groups(tasks, *parts, group_size=1, seed=1)
    return [group[0] for group in groups]


# --- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("properties", [INLINE, THREADS], ids=["inline", "threads"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
def test_what_an_environment_raises_ends_its_attempt_and_nothing_else(error: Any, properties: Any, waits: bool) -> None:
    async def later(environment: Any) -> None:
        await asyncio.sleep(0.001)
        raise error

    def at_once(environment: Any) -> None:
        raise error

    environment = Troubled(properties=properties, trouble=later if waits else at_once, seeds=frozenset({1}))
    found = asyncio.run(rollout(environment))
    assert [t.outcome for t in found] == [Outcome.SOLVED, Outcome.ENV_ERROR, Outcome.SOLVED]
    assert error.__name__ in found[1].detail


def test_a_future_that_an_environment_cancels_itself_is_its_own_error() -> None:
    async def cancels(environment: Any) -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.001, future.cancel)
        await future

    found = asyncio.run(rollout(Troubled(properties=INLINE, trouble=cancels, seeds=frozenset({1}))))
    assert [t.outcome for t in found] == [Outcome.SOLVED, Outcome.ENV_ERROR, Outcome.SOLVED]


@pytest.mark.parametrize("where", ["environment", "agent", "reward"])
def test_a_real_cancellation_still_ends_everything(where: str) -> None:
    begun = asyncio.Event()

    async def waits(*_: Any) -> Any:
        begun.set()
        await asyncio.sleep(60)

    class Waiting(Plain):
        async def act(self, history: Any, policy: Any) -> Any:
            return await waits()

    async def main() -> None:
        work: Any = rollout(Troubled(properties=INLINE, trouble=waits))
        if where == "agent":
            work.close()
            work = rollout(Corridor(), Waiting())
        elif where == "reward":
            work.close()
            played = Trajectory("t", 0, "", (Turn(Action("a"), "b"),), Outcome.FAILED)
            work = score_group(Task("t"), [played], {"r": WeightedReward("r", 1.0, waits)}, timeout_s=60.0)
        running = asyncio.ensure_future(work)
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 20


def test_ctrl_c_in_an_inline_step_still_ends_the_run() -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys, time
        sys.path[:0] = ["tests/rollout", "."]
        from test_blocking import rollout
        from tests.rollout.trouble import Troubled
        def trouble(environment):
            print("begun", flush=True)
            time.sleep(0.5)
        try:
            asyncio.run(rollout(Troubled(trouble=trouble), n=8))
            print("went on")
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert run.stdout is not None and run.stdout.readline() == "begun\n"
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=120)
    assert said.splitlines()[-1] == "interrupted"


def test_a_coroutine_that_hears_no_cancellation_is_left_behind() -> None:
    asked = []

    async def deaf() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                asked.append(1)

    async def main() -> None:
        with pytest.raises(CallTimeout, match=r"0\.05 s"):
            await InlineLane().call(deaf, timeout_s=0.05)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await asyncio.sleep(0)  # nothing of it is left to cancel this

    begun = time.monotonic()
    asyncio.run(main())
    assert asked and time.monotonic() - begun < 10


def test_a_limit_of_a_parts_own_is_no_cancellation() -> None:
    async def patient() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            await asyncio.sleep(1.0)  # longer than one that is cancelled may take
        return "done"

    assert asyncio.run(InlineLane().call(patient, timeout_s=20.0)) == "done"


def test_limits_of_a_parts_own_one_after_the_other_are_no_cancellation() -> None:
    # Whatever the moment at which one of them is over: the loop is busy, so that several things are due at once.
    async def polls(offset_s: float) -> str:
        await asyncio.sleep(offset_s)
        for _ in range(60):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await asyncio.sleep(60)
        return "done"

    async def busy() -> None:
        draw = random.Random(0)
        while True:
            time.sleep(draw.uniform(0.005, 0.04))
            await asyncio.sleep(0)

    async def main() -> list[str]:
        beside = asyncio.create_task(busy())
        calls = [InlineLane().call(polls, i / 1000, timeout_s=60.0) for i in range(30)]
        found = await asyncio.gather(*calls)
        beside.cancel()
        return found

    assert asyncio.run(main()) == ["done"] * 30


def test_an_inline_call_that_comes_back_too_late_is_a_timeout() -> None:
    with pytest.raises(CallTimeout, match=r"0\.01 s"):
        asyncio.run(InlineLane().call(time.sleep, 0.05, timeout_s=0.01))


def test_a_message_that_cannot_be_read_is_no_trouble() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def raises() -> None:
        raise Mute

    with pytest.raises(CallError, match="Mute: its message raises RuntimeError"):
        asyncio.run(InlineLane().call(raises, timeout_s=1.0))


# --- who blocks ------------------------------------------------------------------------------------------------------


def blocked(agent: Any = None, reward: Any = None, **environment: Any) -> list[str]:
    """The cautions of a rollout and of scoring it."""

    async def main() -> None:
        found = await rollout(Troubled(seeds=frozenset({1}), **environment), agent)
        judge = {"r": WeightedReward("slow", 1.0, reward or (lambda task, t: 1.0))}
        await score_group(Task(found[0].task_id), found[:1], judge, timeout_s=20.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
    assert not any(ON_LOOP.values())
    return [str(one.message) for one in caught if "blocks the event loop" in str(one.message)]


def sleeps(*_: Any) -> None:
    time.sleep(2.0)


class Pondering(Plain):
    async def act(self, history: Any, policy: Any) -> Any:
        action = await super().act(history, policy)
        if history.task.seed == 1 and not history.turns:
            time.sleep(2.0)
        return action


class Slow:
    inline = True

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        time.sleep(2.0)
        return 1.0


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"trouble": sleeps}, "environment Troubled"),
        ({"agent": Pondering()}, "agent Pondering"),
        ({"reward": Slow()}, "reward slow"),
    ],
    ids=["environment", "agent", "reward"],
)
def test_an_inline_part_that_blocks_the_loop_is_named(parts: Any, name: str) -> None:
    [caution] = blocked(**parts)
    assert caution.startswith(f"{name} blocks the event loop") and "1 s" in caution


def test_a_part_that_comes_along_is_not_named_and_one_of_ones_own_within_it_is() -> None:
    def stands(part: object) -> list[str]:
        said: list[str] = []

        async def main() -> None:
            with Watchdog(said.append, blocked_s=0.1):
                await InlineLane("it", part).call(time.sleep, 0.5, timeout_s=None)

        asyncio.run(main())
        return said

    assert not stands(ChatAgent()) and not stands(Combine(parts={"done": Part(reward=EnvironmentReward())}))
    assert len(stands(Slow())) == len(stands(Combine(parts={"slow": Part(reward=Slow())}))) == 1


def test_what_the_toolkit_warns_of_is_printed_as_a_caution(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        with Watchdog(blocked_s=0.1):
            await InlineLane("x").call(time.sleep, 0.5, timeout_s=None)

    with pytest.warns(RuntimeWarning) as others, warnings_told():
        asyncio.run(main())
        warnings.warn("of another", RuntimeWarning, stacklevel=1)
    assert "caution x blocks the event loop" in capsys.readouterr().err
    assert [str(one.message) for one in others] == ["of another"]


def test_who_waits_or_works_in_a_thread_is_not_named() -> None:
    async def waits(environment: Any) -> None:
        await asyncio.sleep(1.5)

    assert not blocked(trouble=waits)
    assert not blocked(trouble=sleeps, properties=THREADS)


def test_the_watchdog_says_it_while_the_loop_stands() -> None:
    said: list[float] = []

    async def main() -> None:
        with Watchdog(lambda text: said.append(time.monotonic()), blocked_s=0.1):
            await InlineLane("x").call(time.sleep, 1.0, timeout_s=None)

    asyncio.run(main())
    assert len(said) == 1 and time.monotonic() - said[0] > 0.3


# --- what runs elsewhere ---------------------------------------------------------------------------------------------


def long(n_bytes: int) -> Any:
    return lambda environment: StepResult("word " * (n_bytes // 5))


@pytest.mark.parametrize("n_mb", [10, 100])
@pytest.mark.parametrize("properties", [INLINE, THREADS], ids=["inline", "threads"])
def test_a_reply_beyond_all_bounds_is_an_error_and_stands_in_nobodys_way(properties: Any, n_mb: int) -> None:
    environment = Troubled(properties=properties, trouble=long(n_mb * 2**20), seeds=frozenset({1}))
    stood = standing(lambda: rollout(environment))
    assert [t.outcome for t in stood.result] == [Outcome.SOLVED, Outcome.ENV_ERROR, Outcome.SOLVED]
    assert "StepResult.reply is too long" in stood.result[1].detail
    assert stood.longest_s < (0.8 if properties is THREADS else 5.0)  # inline, making it is on the loop


def test_a_reply_longer_than_the_context_is_the_policys_doing_and_is_not_tokenised() -> None:
    environment = Troubled(properties=THREADS, trouble=long(3 * 2**20), seeds=frozenset({1}))
    stood = standing(lambda: rollout(environment, limits=replace(LIMITS, max_context=2048)))
    assert [t.outcome for t in stood.result] == [Outcome.SOLVED, Outcome.TOKEN_LIMIT, Outcome.SOLVED]
    assert "a message is longer than the context" in stood.result[1].detail
    assert len(stood.result[1].turns) == 2 and stood.longest_s < 0.8


def test_an_answer_of_a_worker_process_stands_in_nobodys_way() -> None:
    environment = Processes(environment=Endless(properties=THREADS), n_workers=1)
    try:
        stood = standing(lambda: rollout(environment))
    finally:
        environment.close()
    assert [t.outcome for t in stood.result] == [Outcome.SOLVED, Outcome.ENV_ERROR, Outcome.SOLVED]
    assert "StepResult.reply is too long" in stood.result[1].detail and stood.longest_s < 0.8


@pytest.mark.parametrize("ends", tiered(["hangs", "closes its channel", "dies"], "dies"))
def test_the_end_of_a_worker_process_stands_in_nobodys_way(ends: str) -> None:
    limits = replace(LIMITS, step_timeout_s=1.0, max_retries=1)
    environment = Processes(environment=Endless(properties=THREADS, ends=ends), n_workers=2)
    try:
        stood = standing(lambda: rollout(environment, limits=limits))
    finally:
        environment.close()
    assert [t.outcome.is_infrastructure_error for t in stood.result] == [False, True, False]
    assert stood.longest_s < 0.8
