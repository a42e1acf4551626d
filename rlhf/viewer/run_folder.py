"""A run folder that is read while it grows: new lines of its log, its state, its findings.

The log is read from where the last look ended. A torn last line is waited for; a log that became shorter, or another
file, is read anew under another `epoch`. Whatever else is missing or damaged is said in `problems` and left out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf.evaluation.changes import CHANGES, parse_changes
from rlhf.evaluation.contrib.findings import TRAINER_AND_ENGINE, Finding, findings
from rlhf.evaluation.folder import PLAN, RECIPE, SUMMARY
from rlhf.evaluation.run_data import RunData, has_interval
from rlhf.finite import finite_json
from rlhf.lock_owner import LOCK, STALE_S, life, read_path
from rlhf.sinks import LogLine, log_line

#: `stopped`: nothing writes it and it has no result; its process was ended or killed.
State = Literal["running", "finished", "stopped", "gone"]
METRICS, RESULT = "metrics.jsonl", "result.json"
#: Bytes of a log that are read at a time.
_BLOCK = 1 << 22
#: Seconds for which what the lock says, and what the findings are, is taken for true.
_STATE_S, _FINDINGS_S = 0.5, 2.0


def is_run(folder: Path) -> bool:
    """True if a folder holds a run or an evaluation."""
    return any((folder / name).is_file() for name in (METRICS, RECIPE, RESULT, PLAN))


@dataclass
class RunLog:
    """The lines of a `metrics.jsonl` so far.

    Attributes:
        path: of the log, which may not be there yet.
        lines: oldest first.
        epoch: changes when the log is read anew, so that line numbers of before mean nothing.
        n_bad: lines that are no log lines, left out.
    """

    path: Path
    lines: list[LogLine] = field(default_factory=list)
    epoch: int = 0
    n_bad: int = 0
    _at: int = 0
    _inode: int = 0

    def poll(self) -> int:
        """Read what was appended; return the number of new lines, all of them after a new beginning."""
        try:
            stat = self.path.stat()
        except OSError:
            return 0
        if stat.st_ino != self._inode or stat.st_size < self._at:
            self.epoch += bool(self._inode)
            self.lines, self.n_bad, self._at, self._inode = [], 0, 0, stat.st_ino
        before = len(self.lines)
        while stat.st_size > self._at and self._read_block():
            pass
        return len(self.lines) - before

    def _read_block(self) -> bool:
        """Read whole lines of one block; False where the rest is a torn line."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                block = file.read(_BLOCK)
                while (end := block.rfind(b"\n") + 1) == 0 and (more := file.read(_BLOCK)):
                    block += more
        except OSError:
            return False
        for text in block[:end].split(b"\n")[:-1]:
            line = _line(text)
            self.n_bad += line is None
            self.lines += [] if line is None else [line]
        self._at += end
        return end > 0


def _line(text: bytes) -> LogLine | None:
    try:
        line = log_line(json.loads(text))
        values = {k: float(v) if isinstance(v, int | float) and isfinite(v) else None for k, v in line.values.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return replace(line, values=values)


class RunFolder:
    """One run or evaluation that is looked at again and again, from several threads."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.id = folder, name or folder.name
        self.log = RunLog(folder / METRICS)
        self.problems: dict[str, str] = {}
        self._turn = threading.RLock()
        self._read: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._state: tuple[float, State] = (-_STATE_S, "gone")
        self._found: tuple[float, Any, list[Finding]] = (-_FINDINGS_S, None, [])

    def poll(self) -> RunData:
        """Look at what is there now; nothing in it raises."""
        with self._turn:
            self.log.poll()
            if self.log.n_bad:
                self.problems[METRICS] = f"{self.log.n_bad} lines are no log lines, and left out"
            settings, result = self._parsed(RECIPE, yaml.safe_load), self._parsed(RESULT, finite_json)
            points = {k: v for k, v in result.items() if has_interval(v)}
            return RunData(
                folder=self.folder,
                lines=list(self.log.lines),
                results=points,
                facts={k: v for k, v in result.items() if k not in points},
                settings=settings,
                changes=self._parsed(CHANGES, parse_changes).get("changes", ()),
            )

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json` of an evaluation; empty for a run."""
        with self._turn:
            return self._parsed(SUMMARY, json.loads)

    def state(self) -> State:
        """State of the run: being written, by the heartbeat of its lock, or how it ended."""
        with self._turn:
            if time.monotonic() - self._state[0] >= _STATE_S:
                self._state = (time.monotonic(), self._state_now())
            return self._state[1]

    def _state_now(self) -> State:
        if not self.folder.is_dir():
            return "gone"
        if _is_written(self.folder / LOCK):
            return "running"
        return "finished" if any((self.folder / name).is_file() for name in (RESULT, SUMMARY)) else "stopped"

    def findings(self, run: RunData) -> list[Finding]:
        """Cautions of a run in plain words: the gap of trainer and engine, then the worst first."""
        with self._turn:
            at, of, found = self._found
            now = (len(run.lines), self.log.epoch, tuple(run.results))
            if now != of and time.monotonic() - at >= _FINDINGS_S:
                problems = list[str]()
                found = findings(run, problems.append)
                self.problems.pop("findings", None)
                self.problems |= {"findings": "; ".join(problems)} if problems else {}
                order = ("problem", "look", "fine")
                found = sorted(found, key=lambda one: (one.name != TRAINER_AND_ENGINE, order.index(one.level)))
                self._found = (time.monotonic(), now, found)
            return found

    def _parsed(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        """The mapping in a file, empty where there is none; what it was before where it cannot be read now."""
        path, (known, values) = self.folder / name, self._read.get(name, ((0, 0), {}))
        try:
            stat = path.stat()
            if (stat.st_mtime_ns, stat.st_size) == known:
                return values
            found = parse(path.read_text("utf-8"))
        except FileNotFoundError:  # also moved aside, as by a run that is extended
            self.problems.pop(name, None)
            self._read.pop(name, None)
            return {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            self.problems[name] = f"it cannot be read: {str(error)[:200]}"
            return values
        if not isinstance(found, dict):
            self.problems[name] = "it holds no mapping"
            return values
        self.problems.pop(name, None)
        self._read[name] = ((stat.st_mtime_ns, stat.st_size), found)
        return found


def _is_written(lock: Path) -> bool:
    """True if the owner of a lock lives; unlike `locks.owner_of`, this writes nothing."""
    owner = read_path(lock)
    try:
        if owner is None or owner.is_of_here:
            return owner is not None and life(owner, lock, by_kernel=False)[0]
        return time.time() - lock.stat().st_mtime <= STALE_S
    except OSError:
        return False
