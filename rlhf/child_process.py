"""Child processes in groups of their own, with bounded line reading and group kill."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

#: Of Linux: the signal that a process gets when its parent has ended.
_PR_SET_PDEATHSIG = 1
#: Looked up here, as a child between fork and exec may load nothing.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def python_command(module: str, *arguments: object) -> list[str]:
    """The command that runs a module; without -P the current folder would come before all others."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def python_environment(**own: str) -> dict[str, str]:
    """Variables with which a Python child finds modules where this process does, and those given."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path), **own}


def run_python(code: str, limit_s: float, **own: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process, with variables of its own. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=python_environment(**own),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a process wrote to its standard error, else its exit code."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def is_healthy(url: str) -> bool:
    """True if a server of this machine answers at `url`/health in 5 s; proxies of the environment are not asked."""
    from urllib.request import ProxyHandler, build_opener  # slow to import, and few processes ask

    try:
        with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:  # URLError is one
        return False


def kill_group(process: subprocess.Popen[Any], wait_s: float | None = None) -> None:
    """Kill the group that a process leads, and wait for the process, at most so long."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that starts it ends: a `preexec_fn`, on Linux."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """Process that leads its own group (Ctrl-C stays with its parent), read in bounded lines.

    Args:
        command: what is run.
        options: of `subprocess.Popen`; standard input and output are pipes.

    Attributes:
        popen: the process.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        pipe = subprocess.PIPE
        self.popen: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, start_new_session=True, **options
        )
        self._buffer = bytearray()

    def line(self, deadline: float, most: int = 1 << 20) -> bytes | None:
        """Next line without its end; None at the end, at the deadline, or beyond `most` bytes.

        `deadline` is a time of `time.monotonic`.
        """
        assert self.popen.stdout is not None
        descriptor, poller = self.popen.stdout.fileno(), select.poll()  # select.select refuses descriptors from 1024 on
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return None
            chunk = os.read(descriptor, 65_536)
            if not chunk or len(self._buffer) > most:
                return None
            self._buffer += chunk
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        return bytes(line)

    def kill(self) -> None:
        """Kill the group and close the pipes."""
        kill_group(self.popen)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was left to write has nobody to read it
                    pipe.close()
