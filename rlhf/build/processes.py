"""Processes of a training run, by its recipe."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf import processes
from rlhf.errors import TrainingError
from rlhf.inference.fingerprint import fingerprint
from rlhf.processes import ProcessGroup
from rlhf.recipe import Recipe
from rlhf.recipe.compatibility import check_processes
from rlhf.recipe.view import stages_of
from rlhf.training.backends.sharding import layout_of, sharding_of
from rlhf.training.policy.model import Policy, Pretrained
from rlhf.training.policy.sharded_load import ShardedLoad, can_be_sharded
from rlhf.training.stages.policy_gradient import PolicyGradient


@contextmanager
def joined(recipe: Recipe) -> Iterator[ProcessGroup]:
    """Context in which this process has joined the launcher's process group, or runs alone.

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


def sharded_load(recipe: Recipe, found: Path | None) -> ShardedLoad | None:
    """Sharded loader for the policy of a recipe or checkpoint; None where each process loads it whole.

    None where each process loads all of it: one alone, a policy from scratch, trainers that hold it whole or lay it out
    in several ways, a critic, which may begin as a copy of it, and files that only transformers can read.
    """
    settings = recipe.policy
    if processes.current().n == 1 or not isinstance(settings, Pretrained):
        return None
    layout = layout_of(stage.trainer for stage in recipe.stages)
    if layout is None or any(stage.critic is not None for _, stage in stages_of(recipe, PolicyGradient)):
        return None
    local = Path(settings.path).expanduser()
    source = str(local) if local.exists() else settings.path
    if found is not None and settings.lora is None:
        source = str(found / "policy")
    return ShardedLoad(layout) if can_be_sharded(source) else None


def check_alike(policy: Policy) -> None:
    """Raise TrainingError where the processes begin with different weights."""
    own = fingerprint(policy.model) if policy.load is None else policy.load.digest
    found = processes.current().gather(own, "the policy")
    if len(set(found)) > 1:
        raise TrainingError(
            "the processes begin with different policies",
            where="policy",
            got=", ".join(f"{name} in process {rank}" for rank, name in enumerate(found)),
            expected="the same weights in each",
            hint="give all of them the same model files",
        )


class StopRequest:
    """Request, made in another thread, that the task which hears it ends as on Ctrl-C."""

    def __init__(self) -> None:
        self.is_made = False
        self._stop: Callable[[], object] = lambda: None
        self._lock = threading.RLock()  # a signal handler may ask while its own thread does

    def make(self) -> None:
        """Ask; a task that has not begun ends when it begins."""
        with self._lock:
            self.is_made = True
            self._stop()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Context in which the running task is cancelled when the request is made."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        with self._lock:
            self._stop = partial(loop.call_soon_threadsafe, task.cancel)
            if self.is_made:
                self._stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = lambda: None


#: Set by whoever runs a task in a thread, which no signal reaches.
STOP_REQUEST: ContextVar[StopRequest | None] = ContextVar("stop_request", default=None)


@contextmanager
def stopped_by_term() -> Iterator[None]:
    """Context in which SIGTERM cancels the running task as Ctrl-C does (batch systems send it first).

    Where this is not the main thread, which alone may say what a signal does, it stays as it is, and a `StopRequest` is
    heard.
    """
    if threading.current_thread() is not threading.main_thread():
        request = STOP_REQUEST.get()
        with request.heard() if request else nullcontext():
            yield
        return
    task, loop, is_asked = asyncio.current_task(), asyncio.get_running_loop(), False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked  # not `task.cancelling()`, which a timeout that is just over raises too
        if task is not None and not is_asked:
            is_asked = True
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
    """Context in which the first SIGINT or SIGTERM stops all processes after a step, the next at once.

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
