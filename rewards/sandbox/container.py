"""Container of Docker or Podman for each program, begun and ended by the engine's command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from shutil import which
from typing import IO, Annotated, Literal
from weakref import WeakKeyDictionary

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.sandbox.confined import Bounds, ExitReason, Finished, SandboxError, by_message
from rlhf.data.clock import waiting_for_turn
from rlhf.errors import RecipeError
from rlhf.settings import STRICT

#: What starting and ending a container may take, beyond the time of the program.
_GRACE_S = 60.0
#: Between two looks at the program.
_LOOK_S = 0.02
#: Copies the files, says that the program begins, and becomes it; after the time in front of it it is killed, so that a
#: container ends also where whoever began it was killed. An image without `timeout` does without.
_BEGIN = (
    't="$1"; shift; cp -R /given/. /work/ && echo "$0" >&2 && '
    'if command -v timeout >/dev/null; then exec timeout -s KILL "$t" "$@"; else exec "$@"; fi'
)
#: Exit codes of a process that a limit of the kernel's ended: 128 and the signal.
_BY_SIGNAL = {128 + 24: ExitReason.CPU_LIMIT, 128 + 25: ExitReason.FILE_LIMIT}
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Container, asyncio.Semaphore]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Container:
    """A fresh container for each program, without network and privileges, removed when the program ends."""

    engine: Literal["docker", "podman"] | None = None
    """The program that makes containers; null takes the one that is there, Docker first."""
    image: str = "python:3.13-slim"
    """Image that programs run in, with `python3` and `sh`; it has to be on this machine, as nothing is pulled."""
    max_concurrent: Annotated[int, Field(ge=1)] = 4
    """Containers at a time; other programs queue."""

    def __str__(self) -> str:
        return f"container of {self.image}"

    def refuse_absent(self, where: str) -> None:
        """Raise RecipeError where there is no such engine, it does not answer, or the image is not there."""
        wrong = _wrong(self.engine, self.image)
        if wrong:
            raise RecipeError(
                "this machine cannot run programs in a container",
                where=where,
                got=wrong,
                expected="docker or podman, with the image",
                hint=f"{self.engine or 'docker'} pull {self.image}; or remove the key for this machine's own sandbox",
            )

    async def run(
        self, program: Sequence[str], *, stdin: bytes, files: Mapping[str, bytes], bounds: Bounds
    ) -> Finished:
        """Run one program; a limit that only the wall clock can show ends the container."""
        slots = _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(
            self, asyncio.Semaphore(self.max_concurrent)
        )
        with waiting_for_turn():
            await slots.acquire()
        try:
            with tempfile.TemporaryDirectory(prefix="rlhf-container-") as folder:
                await asyncio.to_thread(_write, Path(folder), files)
                return await self._run(program, stdin, folder, bounds)
        finally:
            slots.release()

    async def _run(self, program: Sequence[str], stdin: bytes, folder: str, bounds: Bounds) -> Finished:
        token = f"rlhf-{secrets.token_hex(8)}"
        engine = _found(self.engine)
        # Files rather than pipes: nobody has to read them for the program to go on, or to end.
        with tempfile.TemporaryFile() as typed, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            typed.write(stdin)
            typed.seek(0)
            begun = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *command(engine, self.image, token, folder, program, bounds),
                stdin=typed, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
            try:
                limit = await _watched(process, out, err, token, bounds)
            finally:
                await _end(engine, token, process)
            most = bounds.output_kb * 1024
            stdout, complaint = (os.pread(file.fileno(), most + len(token), 0) for file in (out, err))
        said, mark, stderr = complaint.partition(token.encode() + b"\n")
        if not mark:
            got = said.decode(errors="replace").strip()[-500:] or f"exit code {process.returncode}"
            raise SandboxError("a program could not be run", where=f"the sandbox ({self})", got=got)
        wall_s, code = time.monotonic() - begun, process.returncode or 0
        ending = limit or _BY_SIGNAL.get(code) or (ExitReason.WRONG_EXIT if code else ExitReason.OK)
        ending = by_message(ExitReason.KILLED if ending is ExitReason.WRONG_EXIT and code > 128 else ending, stderr)
        is_own = ending in (ExitReason.OK, ExitReason.WRONG_EXIT)
        return Finished(ending, code if is_own else None, stdout[:most], stderr[:most], wall_s, 0.0, 0)


async def _watched(
    process: asyncio.subprocess.Process, out: IO[bytes], err: IO[bytes], token: str, bounds: Bounds
) -> ExitReason | None:
    """Wait for the end, or for a limit; the program's own time begins with it, not with its container."""
    deadline, has_begun = time.monotonic() + bounds.wall_s + _GRACE_S, False
    while process.returncode is None:
        if max(os.fstat(file.fileno()).st_size for file in (out, err)) > bounds.output_kb * 1024 + len(token):
            return ExitReason.OUTPUT_LIMIT
        if not has_begun and token.encode() in os.pread(err.fileno(), 4096, 0):
            deadline, has_begun = time.monotonic() + bounds.wall_s, True
        if time.monotonic() > deadline:
            return ExitReason.WALL_LIMIT
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await process.wait()
    return None


def command(engine: str, image: str, name: str, folder: str, program: Sequence[str], bounds: Bounds) -> list[str]:
    """Arguments that run `program` in a container called `name`, on the files of `folder`, within `bounds`."""
    cpu_s, file_bytes = int(-(-bounds.cpu_s // 1)), bounds.file_mb << 20
    python = ["python3", "-s", *program[1:]]
    limits = {
        "cpu": f"{cpu_s}:{cpu_s + 1}", "fsize": f"{file_bytes}:{file_bytes}", "core": "0:0",
        "nofile": f"{bounds.max_open_files}:{bounds.max_open_files}",
    }  # fmt: skip
    variables = {"HOME": "/work", "TMPDIR": "/work", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    return [
        *(engine, "run", "--rm", "--interactive", "--init", "--pull", "never", "--name", name),
        *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", "65534:65534", "--pids-limit", str(bounds.max_processes + 1), "--cpus", "1"),
        *("--memory", f"{bounds.memory_mb}m", "--memory-swap", f"{bounds.memory_mb}m"),
        *(word for key, value in limits.items() for word in ("--ulimit", f"{key}={value}")),
        *("--tmpfs", f"/work:rw,exec,nosuid,nodev,size={bounds.folder_mb}m,nr_inodes={bounds.max_files},mode=1777"),
        *("--mount", f"type=bind,source={folder},target=/given,readonly", "--workdir", "/work"),
        *(word for key, value in variables.items() for word in ("--env", f"{key}={value}")),
        *(image, "sh", "-c", _BEGIN, name, str(int(bounds.wall_s + _GRACE_S))),
        *(python if program[0] == "python" else program),
    ]


async def _end(engine: str, name: str, process: asyncio.subprocess.Process) -> None:
    """End the container, where it has not ended by itself."""
    if process.returncode is None:
        removing = await asyncio.create_subprocess_exec(
            engine, "rm", "--force", name, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await removing.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    for inner in (folder, *folder.rglob("*")):
        inner.chmod(0o755 if inner.is_dir() else 0o644)  # the user inside is another


def _found(engine: str | None) -> str:
    return next((path for name in ([engine] if engine else ["docker", "podman"]) if (path := which(name))), "")


@lru_cache(maxsize=16)
def _wrong(engine: str | None, image: str) -> str:
    """Why nothing can be run, or an empty text; asked once for each process."""
    found = _found(engine)
    if not found:
        return f"{engine or 'neither docker nor podman'} is not installed"
    try:
        asked = subprocess.run([found, "image", "inspect", image], capture_output=True, text=True, timeout=_GRACE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found}: {error}"
    return f"{found}: {asked.stderr.strip()[-300:]}" if asked.returncode else ""
