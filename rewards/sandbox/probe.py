"""Finds the isolation level of this machine: each is tried for real, once for each process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from shutil import which

from rewards.sandbox.confined import Bounds, ExitReason, run_at
from rewards.sandbox.level import Isolation, Level
from rlhf.errors import RecipeError, RewardError

_PLACES = "/usr/local/bin:/usr/bin:/bin"
#: What every program needs of a machine, beside the interpreter's own folder.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_BOUNDS = Bounds(cpu_s=5.0, wall_s=20.0)
#: It begins another process, writes and reads a file, and says whether it sees what it should not.
_PROGRAM = """
import os, sys
if os.fork() == 0:
    os._exit(0)
os.wait()
with open("file", "w") as file:
    file.write("written")
print(open("file").read(), os.path.exists(sys.argv[1]), os.path.exists("/proc/self"), os.getuid() == 0)
"""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Isolation that this machine offers.

    Attributes:
        isolations: the working ones, best first; at least one.
        why_not: of each level that is out of reach, the reason.
    """

    isolations: tuple[Isolation, ...]
    why_not: Mapping[Level, str]

    @property
    def isolation(self) -> Isolation:
        """The best."""
        return self.isolations[0]

    def at(self, level: Level) -> Isolation | None:
        """Sandbox at `level`, if that is possible."""
        return next((isolation for isolation in self.isolations if isolation.level is level), None)

    def at_least(self, level: Level, where: str) -> Isolation:
        """Return the best way. Raises RecipeError, about the key `where`, if that is below `level`."""
        if self.isolation.level >= level:
            return self.isolation
        reasons = "; ".join(f"{level}: {why}" for level, why in sorted(self.why_not.items()))
        raise RecipeError(
            "this machine cannot isolate programs as well as the recipe demands",
            where=where,
            got=f"{self.isolation.level} ({reasons})",
            expected=str(level),
            hint="see docs/sandbox.md for what each level needs; or lower min_level, if you trust what is run",
        )

    def record(self) -> dict[str, object]:
        """Return it as plain values, for the record of a run."""
        return {
            "level": str(self.isolation.level),
            "python": self.isolation.python,
            "out_of_reach": {str(level): reason for level, reason in self.why_not.items()},
        }


def probe_isolation() -> ProbeResult:
    """Try each level on this machine, once per process. Raises RewardError where none works."""
    with _lock:
        return _probe_isolation()


@cache
def _probe_isolation() -> ProbeResult:
    isolations: list[Isolation] = []
    why_not: dict[Level, str] = {}
    if sys.platform != "linux":
        raise _nothing("it runs " + sys.platform, "Linux")
    for level in sorted(Level, reverse=True):
        reasons = []
        for isolation in _candidates(level):
            reason = _try(isolation)
            if not reason:
                isolations.append(isolation)
                break
            reasons.append(reason)
        else:
            why_not[level] = "; ".join(reasons) or "bwrap is not installed"
    if not isolations:
        raise _nothing("; ".join(f"{level}: {why}" for level, why in why_not.items()), "at least rlimits")
    return ProbeResult(tuple(isolations), why_not)


def _candidates(level: Level) -> Iterator[Isolation]:
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    own = () if prefix == "/" or f"{prefix}/".startswith("/usr/") else (prefix,)
    visible = tuple(path for path in (*_SYSTEM, *own) if os.path.lexists(path))
    bubblewrap = which("bwrap", path=f"{_PLACES}:{os.environ.get('PATH', '')}") or ""
    if level is Level.BUBBLEWRAP and not bubblewrap:
        return
    yield Isolation(level, python, visible, bubblewrap if level is Level.BUBBLEWRAP else "")
    system = which("python3", path=_PLACES)
    if level is Level.RLIMITS and system and os.path.realpath(system) != python:
        # Root's own interpreter may lie where the user that the program becomes cannot go.
        yield Isolation(level, os.path.realpath(system), visible)


def _try(isolation: Isolation) -> str:
    """Run a program; return why this isolation does not work, or an empty text."""
    try:
        finished = run_at(("python", "probe.py", __file__), b"", {"probe.py": _PROGRAM.encode()}, _BOUNDS, isolation)
    except RewardError as error:
        return error.got or str(error)
    sees = isolation.level is Level.RLIMITS
    words = finished.stdout.decode(errors="replace").split()
    if finished.ending is not ExitReason.OK:
        return f"{finished.ending}: {finished.stderr.decode(errors='replace').strip()[-300:]}"
    if words[:1] != ["written"] or words[3:] != ["False"] or (not sees and words[1:3] != ["False", "False"]):
        return f"a program sees what it should not: {' '.join(words)}"
    return ""


def _nothing(got: str, expected: str) -> RewardError:
    return RewardError(
        "this machine has no sandbox for programs that a policy writes",
        where="the sandbox",
        got=got,
        expected=expected,
        hint="see docs/sandbox.md for what each level needs",
    )
