"""From a recipe to the processes that train it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlhf import processes
from rlhf.errors import TrainingError
from rlhf.inference.fingerprint import fingerprint
from rlhf.processes import Processes
from rlhf.recipe import Recipe
from rlhf.recipe.compatibility import check_processes
from rlhf.training.backends.settings import sharding_of
from rlhf.training.policy.model import Policy


@contextmanager
def joined(recipe: Recipe) -> Iterator[Processes]:
    """Inside, this process is one of those that a launcher has started for the recipe, or alone where there are none.

    Raises:
        RecipeError: there are several, and a part of the recipe works in one only.
    """
    wanted: list[Any] = [s.trainer for s in recipe.stages if sharding_of(s.trainer).processes]
    n = processes.n_wanted()
    if processes.current().n > 1 or (n == 1 and not wanted):
        yield processes.current()
        return
    check_processes(recipe, n)
    yield processes.join(max(kind.timeout_s for kind in wanted))
    if n > 1:
        processes.leave()


def check_alike(policy: Policy) -> None:
    """Raise TrainingError where the processes begin with different weights."""
    found = processes.current().gather(fingerprint(policy.model), "the policy")
    if len(set(found)) > 1:
        raise TrainingError(
            "the processes begin with different policies",
            where="policy",
            got=", ".join(f"{name} in process {rank}" for rank, name in enumerate(found)),
            expected="the same weights in each",
            hint="give all of them the same model files",
        )


@contextmanager
def stopped_by_term() -> Iterator[None]:
    """Inside, SIGTERM cancels the running task, as Ctrl-C does: batch systems send it some time before they kill.

    Where this is not the main thread, which alone may say what a signal does, it stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None) -> None:
        if task is not None and not task.cancelling():
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits

    def trouble(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A signal may cancel a future while a thread's result is being set; nobody waits for that result any more.
        late = isinstance(context.get("exception"), asyncio.InvalidStateError)
        if not (late and task is not None and task.cancelling()):
            loop.default_exception_handler(context)

    before, handler = signal.signal(signal.SIGTERM, stop), loop.get_exception_handler()
    loop.set_exception_handler(trouble)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        loop.set_exception_handler(handler)


@contextmanager
def stopping_together() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM is kept until all processes have finished a step; the next one stops at once.

    A single process stops in its own way.
    """
    here = processes.current()
    if here.n == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if here.stops:
            raise KeyboardInterrupt
        here.stops = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
