"""Calls on the event loop: what answers at once does, and what waits goes on where it was, within its limit."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from rlhf.rollout.executors import CallError, CallExecutor, CallTimeout, InlineLane


def called(function: Callable[..., Any], *args: Any, timeout_s: float = 10.0) -> Any:
    return asyncio.run(InlineLane().call(function, *args, timeout_s=timeout_s))


def itself(value: Any) -> Any:
    return value


async def counts(n: int, seen: list[int]) -> int:
    for i in range(n):
        seen.append(i)
        await asyncio.sleep(0.001 * (i % 2))
    return n


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_coroutine_goes_on_where_it_waited(n: int) -> None:
    seen: list[int] = []
    assert called(counts, n, seen) == n
    assert seen == list(range(n))


def test_what_is_no_coroutine_is_awaited_too() -> None:
    async def main() -> list[Any]:
        lane, future = InlineLane(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.001, future.set_result, "late")
        task = asyncio.ensure_future(counts(2, []))
        return [await lane.call(itself, one, timeout_s=10.0) for one in ("plain", future, task)]

    assert asyncio.run(main()) == ["plain", "late", 2]


def test_an_error_of_what_is_waited_for_reaches_the_coroutine() -> None:
    async def careful() -> str:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.001, future.set_exception, KeyError("lost"))
        try:
            await future
        except KeyError:
            await asyncio.sleep(0)
            return "found again"
        return "not raised"

    assert called(careful) == "found again"


def fails_at_once() -> Coroutine[Any, Any, None]:
    async def fails() -> None:
        raise ValueError("at once")

    return fails()


async def fails_later() -> None:
    await asyncio.sleep(0)
    raise ValueError("later")


async def has_a_limit_of_its_own() -> None:
    async with asyncio.timeout(0.001):
        await asyncio.sleep(10)


@pytest.mark.parametrize(
    ("function", "says"),
    [(fails_at_once, "at once"), (fails_later, "later"), (has_a_limit_of_its_own, "TimeoutError")],
)
def test_errors_are_the_call_s(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(CallError, match=says):
        called(function)


def test_what_waits_too_long_is_cancelled_and_cleans_up() -> None:
    ends: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ends.append("cleaned")

    with pytest.raises(CallTimeout, match=r"0\.01 s"):
        called(waits, timeout_s=0.01)
    assert ends == ["cleaned"]


def test_a_cancelled_caller_cancels_the_call() -> None:
    ends: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            ends.append("told")
            raise

    async def main() -> None:
        task = asyncio.ensure_future(InlineLane().call(waits, timeout_s=10.0))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ends == ["told"]


def test_the_limit_counts_from_the_call_on() -> None:
    async def works_and_waits() -> None:
        time.sleep(0.05)
        await asyncio.sleep(0.2)

    with pytest.raises(CallTimeout):
        called(works_and_waits, timeout_s=0.04)


def test_a_call_that_was_cut_keeps_nothing_alive() -> None:
    class Held:
        pass

    seen: list[weakref.ref[Held]] = []

    async def waits() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        await asyncio.sleep(10)

    async def main() -> None:
        with suppress(CallTimeout):
            await InlineLane().call(waits, timeout_s=0.01)

    gc.disable()
    try:
        asyncio.run(main())
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_coroutine_that_somebody_awaits_already_stays_theirs() -> None:
    async def main() -> list[Any]:
        shared = counts(3, [])
        first = asyncio.ensure_future(InlineLane().call(itself, shared, timeout_s=10.0))
        await asyncio.sleep(0)
        with pytest.raises(CallError, match="being awaited already"):
            await InlineLane().call(itself, shared, timeout_s=10.0)
        return await first

    assert asyncio.run(main()) == 3


def test_executors_of_one_owner_share_a_thread() -> None:
    running, most, owner = 0, 0, object()

    def step() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1

    async def play(of: object | None) -> None:
        executor = CallExecutor(owner=of)
        lanes = [executor.open() for _ in range(2)]
        await asyncio.gather(*(lane.call(step, timeout_s=10.0) for lane in lanes))
        await executor.close()

    async def main(of: object | None) -> None:
        await asyncio.gather(*(play(of) for _ in range(3)))

    asyncio.run(main(owner))
    assert most == 1
    asyncio.run(main(owner))  # on an event loop of its own
    assert most == 1
    asyncio.run(main(None))
    assert most > 1
