"""Program in the sandbox at a given level: limits, ending, and supervision."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rewards.sandbox.level import Isolation, Level
from rlhf.errors import RewardError

_ROOT = Path(__file__).resolve().parent.parent.parent
_BEGIN = "import sys; sys.path.insert(0, {root!r}); from rewards.sandbox.warden import main; main()"
#: Beyond the wall limit: what starting and ending may take before the process that watches is given up.
_GRACE_S = 20.0
_LOOK_S = 0.1
_MB = 1 << 20


class ExitReason(StrEnum):
    """Reason why a run ended."""

    OK = "ok"
    """By itself, with exit code 0."""
    WRONG_EXIT = "wrong_exit"
    """By itself, with another exit code."""
    CPU_LIMIT = "cpu_limit"
    WALL_LIMIT = "wall_limit"
    MEMORY_LIMIT = "memory_limit"
    PROCESS_LIMIT = "process_limit"
    FILE_LIMIT = "file_limit"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    """By a signal, such as that of a crash."""


#: What Python says when it runs into a limit of the kernel's.
_COMPLAINTS = {
    b"MemoryError": ExitReason.MEMORY_LIMIT,
    b"File too large": ExitReason.FILE_LIMIT,
    b"No space left on device": ExitReason.FILE_LIMIT,
    b"can't start new thread": ExitReason.PROCESS_LIMIT,
    b"Resource temporarily unavailable": ExitReason.PROCESS_LIMIT,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a run.

    Attributes:
        cpu_s: processor time of all its processes together.
        wall_s: time from start to end.
        memory_mb: address space of each process, and memory of all together.
        max_processes: processes and threads at a time.
        file_mb: each file.
        folder_mb: all files together, from `namespaces` on.
        output_kb: standard output, and standard error, each.
        max_files: files and folders it may make, from `namespaces` on.
        max_open_files: of each process at a time.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mb: int = 512
    max_processes: int = 16
    file_mb: int = 16
    folder_mb: int = 32
    output_kb: int = 1024
    max_files: int = 1024
    max_open_files: int = 64


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program.

    Attributes:
        ending: how it ended.
        code: exit code, or minus the signal that ended it; None where a limit did.
        stdout, stderr: what it wrote, cut at the bound.
        wall_s, cpu_s: time and processor time, what the sandbox itself takes included.
        memory_bytes: most memory that was seen.
        level: at which it ran; None in a sandbox of another kind.
    """

    ending: ExitReason
    code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float
    memory_bytes: int
    level: Level | None = None

    @property
    def ok(self) -> bool:
        """True if it ended by itself and well."""
        return self.ending is ExitReason.OK


class SandboxError(RewardError):
    """The sandbox itself failed; that says nothing about the program."""


def run_at(
    program: Sequence[str],
    stdin: bytes,
    files: Mapping[str, bytes],
    bounds: Bounds,
    isolation: Isolation,
    given_up: threading.Event | None = None,
) -> Finished:
    """Run `program` in the present thread; arguments and errors as `rewards.sandbox.run.run`.

    Setting `given_up` ends the program.
    """
    check_paths(files)
    folder = tempfile.mkdtemp(prefix="rlhf-sandbox-") if isolation.level is Level.RLIMITS else ""
    try:
        with tempfile.TemporaryFile() as order, tempfile.TemporaryFile() as typed:
            order.write(json.dumps(_order(program, files, bounds, isolation, folder)).encode())
            typed.write(stdin)
            for file in (order, typed):
                file.flush()
                file.seek(0)
            return _watched(order, typed, bounds, isolation, given_up or threading.Event())
    finally:
        if folder:
            _remove(folder)


def _order(
    program: Sequence[str], files: Mapping[str, bytes], bounds: Bounds, isolation: Isolation, folder: str
) -> dict[str, Any]:
    python = [isolation.python, "-s", "-S"]
    home = folder or "/work"
    return {
        "level": str(isolation.level),
        "python": isolation.python,
        "bubblewrap": isolation.bubblewrap,
        "visible": isolation.visible,
        "folder": folder,
        "program": [*python, *program[1:]] if program[0] == "python" else list(program),
        "files": {path: text.decode("latin-1") for path, text in files.items()},
        # The same hash seed each time: a program that depends on the order of a set gets one verdict, not two.
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        "cpu_s": bounds.cpu_s,
        "wall_s": bounds.wall_s,
        "memory_bytes": bounds.memory_mb * _MB,
        "max_processes": bounds.max_processes,
        "file_bytes": bounds.file_mb * _MB,
        "folder_bytes": bounds.folder_mb * _MB,
        "max_files": bounds.max_files,
        "max_open_files": bounds.max_open_files,
    }


def _watched(
    order: IO[bytes], typed: IO[bytes], bounds: Bounds, isolation: Isolation, given_up: threading.Event
) -> Finished:
    control, hold = os.pipe()
    heard, said = os.pipe()
    handed = (order.fileno(), control, said)
    command = [isolation.python, "-I", "-S", "-c", _BEGIN.format(root=str(_ROOT)), *map(str, handed)]
    try:
        warden = subprocess.Popen(
            command,
            stdin=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=handed,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        os.close(hold)
        os.close(heard)
        raise SandboxError("a program could not be started", where="the sandbox", got=str(error)) from error
    finally:
        os.close(control)
        os.close(said)
    told = _Told(hold)
    begun = time.monotonic()
    try:
        _listen(warden, heard, told, bounds, given_up)
    finally:
        is_overdue = warden.poll() is None and not told.report and not given_up.is_set()
        told.stop_program()
        os.close(heard)
        with contextlib.suppress(subprocess.TimeoutExpired):
            warden.wait(timeout=_GRACE_S)
        warden.kill()
        warden.wait()
        for stream in (warden.stdout, warden.stderr):
            if stream is not None:
                stream.close()
    if not told.report and (is_overdue or (warden.returncode < 0 and not given_up.is_set())):
        # It runs our own few lines, so who stops it is the program, where it is the same user, or the kernel for it.
        ending, wall_s = ExitReason.WALL_LIMIT if is_overdue else ExitReason.KILLED, time.monotonic() - begun
        return Finished(ending, None, bytes(told.stdout), bytes(told.stderr), wall_s, 0.0, 0, isolation.level)
    return told.finished(isolation)


class _Told:
    """Output of the three pipes, and the pipe that tells the warden that the caller still waits."""

    def __init__(self, hold: int) -> None:
        self.report, self.stdout, self.stderr = bytearray(), bytearray(), bytearray()
        self.is_too_long = False
        self._hold: int | None = hold

    def stop_program(self) -> None:
        """Have the warden end the program, if that has not ended."""
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def finished(self, isolation: Isolation) -> Finished:
        stdout, stderr = bytes(self.stdout), bytes(self.stderr)
        try:
            found = json.loads(self.report)
        except ValueError:
            found = {"error": "the warden process ended without a report"}
        if "error" in found:
            complaint = " ".join(stderr[-500:].decode(errors="replace").split())
            raise SandboxError(
                "a program could not be run",
                where=f"the sandbox ({isolation.level})",
                got=f"{found['error']}; {complaint}" if complaint else found["error"],
            )
        name = "output_limit" if self.is_too_long else found["ending"]
        if name == "cancelled":
            raise SandboxError("the run was cancelled", where=f"the sandbox ({isolation.level})")
        ending = by_message(ExitReason(name), stderr)
        code = found.get("code") if ending in (ExitReason.OK, ExitReason.WRONG_EXIT, ExitReason.KILLED) else None
        return Finished(
            ending, code, stdout, stderr, found["wall_s"], found["cpu_s"], found["memory_bytes"], isolation.level
        )


def _listen(
    warden: subprocess.Popen[bytes], heard: int, told: _Told, bounds: Bounds, given_up: threading.Event
) -> None:
    """Read until the report is complete, the warden is overdue, or the caller gave up."""
    most = bounds.output_kb * 1024
    assert warden.stdout is not None and warden.stderr is not None
    deadline = time.monotonic() + bounds.wall_s + _GRACE_S
    with selectors.DefaultSelector() as selector:
        selector.register(heard, selectors.EVENT_READ, told.report)
        selector.register(warden.stdout, selectors.EVENT_READ, told.stdout)
        selector.register(warden.stderr, selectors.EVENT_READ, told.stderr)
        while selector.get_map() and time.monotonic() < deadline and not given_up.is_set():
            has_ended = warden.poll() is not None  # asked first: what it said last is then there to be read
            events = selector.select(0 if has_ended else _LOOK_S)
            if not events and has_ended:
                break  # what still holds the pipes is no child of the warden's
            for key, _ in events:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                room = len(chunk) if key.data is told.report else most - len(key.data)
                key.data.extend(chunk[:room])
                if len(chunk) > room:
                    told.is_too_long = True
                    told.stop_program()


def by_message(ending: ExitReason, stderr: bytes) -> ExitReason:
    """Limit that a Python program hit, by its last error line; a label, never a verdict."""
    if ending is not ExitReason.WRONG_EXIT:
        return ending
    last = stderr.rstrip().rpartition(b"\n")[2]
    for said, limit in _COMPLAINTS.items():
        if said in last:
            return limit
    return ending


def check_paths(files: Mapping[str, bytes]) -> None:
    """Raise RewardError where a path leads out of the program's folder."""
    for path in files:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise RewardError(
                "a file of a program must be inside its folder",
                where="the sandbox",
                got=repr(path),
                expected="a relative path without ..",
            )


def _remove(folder: str) -> None:
    """Remove what a program left, whatever it did to it."""
    # Not in Python, which counts on folders being less deep than a program can make them.
    subprocess.run(["rm", "-rf", folder], check=False, capture_output=True)
    if os.path.lexists(folder):
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", folder], check=False, capture_output=True)
