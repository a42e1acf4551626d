"""Operating-system side of a worker: start, end and cause of death of its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass

import psutil

from environments.workers.server import TOO_MUCH_MEMORY
from rlhf.child_process import kill_group, python_command, python_environment

#: How long a worker that is let go may take to close what it has open.
EXIT_S = 3.0

#: How long a process that has closed its channel may take to be gone, on the event loop.
_GONE_S = 0.15

_MOST_SAID = 500


@dataclass(frozen=True, slots=True)
class Bounds:
    """Memory and time limits of one worker.

    Attributes:
        call_timeout_s: of one call.
        max_memory_mb: of the process and its children.
    """

    call_timeout_s: float
    max_memory_mb: int


class Process:
    """A process that runs `environments.workers.server`, and the channel to it.

    Attributes:
        popen: the process.
        channel: the socket to it, not blocking.
        bell: a pipe that it writes to when there are answers to be read, and that ends with it; not blocking.
        closed: whether nothing of it is left here.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._said = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  it lives as long as the process
        ours, theirs = socket.socketpair()
        self.bell, rings = os.pipe()
        try:
            self.popen = _started(theirs, rings, self._said.fileno(), bounds.max_memory_mb)
        except BaseException:
            ours.close()
            os.close(self.bell)
            self._said.close()
            raise
        finally:
            theirs.close()
            os.close(rings)
        ours.setblocking(False)
        os.set_blocking(self.bell, False)
        self.channel, self.closed = ours, False
        self._descendants: list[psutil.Process] = []

    def note_descendants(self) -> None:
        """Remember what it has started, while that can be found out."""
        with contextlib.suppress(psutil.Error):
            self._descendants = psutil.Process(self.popen.pid).children(recursive=True)

    def kill(self, *, ended_itself: bool = False) -> str:
        """End the process and its children, free what it held here, and say how it ended.

        On an event loop nothing is waited for but for a moment; a thread sees it through.
        """
        if self.closed:
            return ""
        self.closed = True
        if ended_itself:  # the channel is closed a little before the process is gone
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_GONE_S)
        code = self.popen.poll()
        self.channel.close()
        os.close(self.bell)
        how = "it closed its channel" if ended_itself and code is None else _in_words(code)
        how += self._last_said()
        self._said.close()
        ending = threading.Thread(target=self._end, name=f"end of worker {self.popen.pid}")
        ending.start()
        if not _is_on_loop():
            ending.join()
        return how

    def _end(self) -> None:
        if self.popen.poll() is None:
            self.note_descendants()
        for child in self._descendants:
            with contextlib.suppress(psutil.Error):
                child.kill()
        kill_group(self.popen, EXIT_S)

    def _last_said(self) -> str:
        """The last lines of what the process printed, if any."""
        with contextlib.suppress(OSError):
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - 4 * _MOST_SAID))
            text = self._said.read().decode("utf-8", "replace").strip()
            if text:
                return "; it said last: " + " | ".join(text.splitlines()[-3:])[-_MOST_SAID:]
        return ""


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _started(channel: socket.socket, rings: int, said: int, max_memory_mb: int) -> subprocess.Popen[bytes]:
    # The kernel's signal comes when the thread that starts it ends; only that of the main thread lives long enough.
    dies_with_thread = threading.current_thread() is threading.main_thread()
    numbers = (channel.fileno(), rings, os.getpid(), max_memory_mb, int(dies_with_thread))
    return subprocess.Popen(
        python_command("environments.workers.server", *numbers),
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=(channel.fileno(), rings),
        env=python_environment(PYTHONHASHSEED="0"),
        start_new_session=True,  # Ctrl-C is for the run, which ends its workers itself
    )


def _in_words(code: int | None) -> str:
    if code is None:
        return "it does not end"
    if code == TOO_MUCH_MEMORY:
        return "it took more memory than environment.max_memory_mb allows"
    if code >= 0:
        return f"it ended itself with exit code {code}"
    name = signal.Signals(-code).name
    why = {
        "SIGKILL": "by kill -9, or by the kernel for want of memory",
        "SIGSEGV": "a crash of native code",
        "SIGABRT": "native code gave up",
        "SIGBUS": "a crash of native code, or no room in memory or on disk",
    }.get(name)
    return f"killed by {name}" + (f": {why}" if why else "")
