"""An agent's program: a process of its own interpreter, with limits, ended with all that it began."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from environments.base import AgentFailed

#: Processes that run, for the end of this one.
_running: set[int] = set()
#: Variables of this process that a program of another interpreter must not have.
_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS")
_THEIRS = ("OPENAI_", "ANTHROPIC_", "RLHF_")
_TAIL = 2000


class Program:
    """A process of an agent.

    Args:
        command: to run; what is no path is looked for as a shell does.
        variables: beside those that this process has, without those of its own interpreter.
        memory_mb: address space; None for any.
        cpu_s: processor time; None for any.
        folder: to run it in; None for the present one.
        on_end: called when it has ended.

    Attributes:
        code: exit status; None while it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        memory_mb: int | None = None,
        cpu_s: float | None = None,
        folder: Path | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._command, self._variables = list(command), dict(variables)
        self._memory_mb, self._cpu_s, self._folder, self._on_end = memory_mb, cpu_s, folder, on_end
        self._log = tempfile.TemporaryFile(prefix="rlhf-agent-")  # noqa: SIM115  closed with the process
        self._watching: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.code: int | None = None

    async def start(self, stdin: bytes = b"") -> None:
        """Start it, and give it what it reads. Raises AgentFailed where there is no such program."""
        kept = {k: v for k, v in os.environ.items() if k not in _OWN and not k.startswith(_THEIRS)}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=kept | self._variables,
                cwd=self._folder,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailed(
                "the agent's program cannot be started",
                where="environment.command",
                got=f"{self._command[0]}: {error.strerror or error}",
                expected="a program, found by PATH or by its path",
                hint="name its interpreter: command: [/path/to/venv/bin/python, agent.py]",
            ) from error
        _running.add(self._process.pid)
        self._limit(self._process.pid)
        self._feeding = asyncio.create_task(self._feed(stdin))
        self._watching = asyncio.create_task(self._watch())

    async def _feed(self, stdin: bytes) -> None:
        """Write what it reads, while it does not read too."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(stdin)
            await self._process.stdin.drain()
            self._process.stdin.close()

    def _limit(self, pid: int) -> None:
        if sys.platform != "linux":
            return
        import resource

        with contextlib.suppress(ProcessLookupError):
            if self._memory_mb is not None:
                resource.prlimit(pid, resource.RLIMIT_AS, (self._memory_mb * 2**20,) * 2)
            if self._cpu_s is not None:
                n = max(1, int(self._cpu_s))
                resource.prlimit(pid, resource.RLIMIT_CPU, (n, n + 1))

    async def _watch(self) -> None:
        assert self._process is not None
        self.code = await self._process.wait()
        _running.discard(self._process.pid)
        self._on_end()

    @property
    def said(self) -> str:
        """The end of what it wrote."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace").strip()

    @property
    def complaint(self) -> str:
        """Exit status and last output, for an error message."""
        return f"the agent's program ended with status {self.code}: {self.said[-600:] or 'it wrote nothing'}"

    async def close(self) -> None:
        """End it and what it began."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await process.wait()
            _running.discard(process.pid)
        for task in (self._watching, self._feeding):
            if task is not None:
                task.cancel()
        self._log.close()


def is_there(name: str, folder: Path | None) -> bool:
    """True if a command of this name can be started in a folder."""
    inside = str((folder or Path()) / name) if os.path.dirname(name) else name
    return shutil.which(inside) is not None


@atexit.register
def _end_all() -> None:
    for pid in _running:
        with contextlib.suppress(OSError):
            os.killpg(pid, 9)
