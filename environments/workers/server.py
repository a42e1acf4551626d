"""A worker process of `environments.workers.pool`: serves the calls of its episodes, one after another.

    python -m environments.workers.server DESCRIPTOR BELL PARENT MAX_MEMORY_MB DIES_WITH_THREAD

It speaks on a socket of its own; what a package prints goes where its errors go. Answers go out at once, but to wake
the parent for each would cost more than the answer, so it listens to a pipe, the bell: that rings when this process has
nothing else to do, and now and then while it has. A thread looks now and then whether the parent is still there, and
how much memory this process and those that it started take.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import itertools
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from environments.base import EpisodeCapabilities
from environments.validation import check_episode, checked_result
from environments.workers.protocol import ERROR, READY, TEXT, Frames, answer_of, frame, unpacked
from rlhf.data.untrusted import described
from rlhf.errors import RlhfError

#: Exit code of a worker that took more memory than it may.
TOO_MUCH_MEMORY = 86

_READ_BYTES = 1 << 16
_RING_EVERY_S = 0.001
_LOOK_EVERY_S = 0.2
_COUNT_CHILDREN_EVERY = 10  # looks: it means reading the list of all processes
_MOST_SAID_BYTES = 1 << 20
_CLOSE_LIMIT_S = 2.0
_PR_SET_PDEATHSIG = 1
#: Packages whose errors are known on the other side too; of any other, the words travel.
_OURS = ("rlhf", "environments")


class Server:
    """Serves one environment.

    Args:
        environment: as the recipe has it; None where it could not be loaded.
        refusal: why it could not be; raised by every call.
        channel: to the parent.
        bell: descriptor of the pipe that the parent listens to.
        watch: knows the memory.
    """

    def __init__(
        self, environment: Any, refusal: BaseException | None, channel: socket.socket, bell: int, watch: Watch
    ) -> None:
        self._environment, self._refusal, self._watch = environment, refusal, watch
        self._channel, self._bell = channel, bell
        self._n_untold, self._rang_at = 0, 0.0
        self._needs_loop = False
        self._episodes: dict[int, Any] = {}
        self._lists: dict[str, tuple[int, Iterator[Any]]] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "start": self.start,
            "step": self.step,
            "close": self.close,
            "method": self.method,
            "tasks": self.tasks,
        }

    async def serve(self, frames: Frames) -> None:
        """Answer calls until the parent closes the channel, then close what is left open."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        loop.call_soon(self._need_loop)
        await self._send(frame(READY, None))
        self._ring()
        data = b""
        while True:
            for number, payload in frames.feed(data):
                await self._send(await self._answered(number, payload))
                self._ring_if_due()
            data = await self._received()
            if not data:
                break
        for episode in list(self._episodes.values()):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await _settled(episode.close())

    async def _received(self) -> bytes:
        """Wait for bytes, by the event loop only while the environment uses it, as that is slower."""
        if self._n_untold:
            try:
                return self._channel.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._ring()
        if self._needs_loop:
            return await asyncio.get_running_loop().sock_recv(self._channel, _READ_BYTES)
        return self._channel.recv(_READ_BYTES)

    async def _send(self, data: bytes) -> None:
        try:
            n = self._channel.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            n = 0
        if n == len(data):
            return
        self._ring()  # there is no room until the parent has read
        if self._needs_loop:
            await asyncio.get_running_loop().sock_sendall(self._channel, data[n:])
        else:
            self._channel.sendall(data[n:])

    def _ring(self) -> None:
        """Let the parent read what was sent."""
        self._n_untold, self._rang_at = 0, time.monotonic()
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # rung often enough; or nobody is there any more
            os.write(self._bell, b"!")

    def _ring_if_due(self) -> None:
        """Wake the parent after half of the episodes, so that both processes work at once."""
        self._n_untold += 1
        if 2 * self._n_untold >= len(self._episodes) or time.monotonic() - self._rang_at > _RING_EVERY_S:
            self._ring()

    def _need_loop(self) -> None:
        """Called when the loop runs at all, which it does once something is waited for."""
        self._needs_loop = True
        self._channel.setblocking(False)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
        self._need_loop()
        return asyncio.Task(work, loop=loop, **how)

    async def _answered(self, number: int, payload: bytes) -> bytes:
        try:
            if self._refusal is not None:
                raise self._refusal
            name, *arguments = pickle.loads(payload)
            value = self._calls[name](*arguments)
            value = await value if inspect.isawaitable(value) else value
            return frame(number, answer_of(checked_result(value, "step") if name == "step" else value))
        except BaseException as error:  # whatever an environment raises is told, and the worker goes on
            if isinstance(error, MemoryError):  # it may have grown to its bound since the watch last looked
                self._watch.end_if_full()
            is_known = type(error).__module__.partition(".")[0] in _OURS and issubclass(type(error), RlhfError)
            return frame(number, (ERROR, error) if is_known else (TEXT, described(error)))

    async def start(self, key: int, task: Any) -> Any:
        """Begin an episode, and give its opening."""
        episode = await _settled(self._environment.start(task))
        check_episode(episode, self._environment.start)
        try:
            opening = checked_result(EpisodeCapabilities(episode).opening, "opening", self._environment.start)
        except BaseException:
            await _settled(episode.close())  # nobody hears of it
            raise
        self._episodes[key] = episode
        return opening

    def step(self, key: int, action: str) -> Any:
        """Do one action."""
        return self._episodes[key].step(action)

    async def close(self, key: int) -> float:
        """Free an episode, and give the megabytes that are in use."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            await _settled(episode.close())
        return self._watch.total_mb()

    def method(self, name: str, *arguments: Any) -> Any:
        """Call what else the environment offers, as `plan`."""
        return getattr(self._environment, name)(*arguments)

    def tasks(self, split: str, first: int, n: int) -> list[Any]:
        """List `n` tasks of a split from number `first` on; fewer at its end."""
        at, tasks = self._lists.pop(split, (-1, iter(())))
        if at != first:
            tasks = itertools.islice(self._environment.tasks(split), first, None)
        found = list(itertools.islice(tasks, n))
        self._lists[split] = (first + len(found), tasks)
        return found


class Watch:
    """Watchdog that ends this process without its parent, or beyond its memory limit."""

    def __init__(self, parent: int, max_memory_mb: int) -> None:
        self._parent, self._max_mb = parent, max_memory_mb
        self._process = psutil.Process()
        self._children_mb = 0.0
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def total_mb(self) -> float:
        """Memory of this process now, and of its children when they were looked at last."""
        return float(self._process.memory_info().rss) / 2**20 + self._children_mb

    def _look(self) -> None:
        for i in itertools.count():
            if os.getppid() != self._parent:
                self._end(0)
            if i % _COUNT_CHILDREN_EVERY == 0:
                self._children_mb = self._count_children()
            self.end_if_full()
            self._forget_what_was_said()
            time.sleep(_LOOK_EVERY_S)

    def end_if_full(self) -> None:
        """End this process if it has more memory than it may have."""
        if (mb := self.total_mb()) > self._max_mb:
            print(f"it took {mb:.0f} MB of the {self._max_mb} MB it may have", file=sys.stderr, flush=True)
            self._end(TOO_MUCH_MEMORY)

    def _count_children(self) -> float:
        total = 0
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += child.memory_info().rss
        return total / 2**20

    def _forget_what_was_said(self) -> None:
        """Empty the file of errors where it grows large: only the last lines are ever told."""
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > _MOST_SAID_BYTES:
                os.ftruncate(2, 0)

    def _end(self, code: int) -> None:
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(code)


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _limit_memory(max_memory_mb: int) -> None:
    """Let a single call for very much memory fail at once; the watch sees what grows."""
    most = 2 * max_memory_mb * 2**20 + 2**30
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _die_with_parent() -> None:
    """Let the kernel kill this process with the thread that started it; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(descriptor: int, bell: int, parent: int, max_memory_mb: int, dies_with_thread: int) -> None:
    """Serve the environment that the parent sends first."""
    # Not ignored, which the children of this process would inherit.
    signal.signal(signal.SIGINT, lambda number, stack: None)
    if dies_with_thread:
        _die_with_parent()
    watch = Watch(parent, max_memory_mb)
    _limit_memory(max_memory_mb)
    channel = socket.socket(fileno=descriptor)
    for one in (descriptor, bell):
        os.set_inheritable(one, False)
    os.set_blocking(bell, False)
    frames = Frames()
    while (data := channel.recv(_READ_BYTES)) and (job := next(frames.feed(data), None)) is None:
        pass
    if not data or job is None:
        return
    environment, refusal = None, None
    try:
        [environment] = unpacked(pickle.loads(job[1]))
    except Exception as error:
        refusal = error
    asyncio.run(Server(environment, refusal, channel, bell, watch).serve(frames))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
