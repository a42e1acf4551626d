"""The places a run writes its metrics to, and how they are read back."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rlhf.digests import Mark
from rlhf.errors import DataError, disk, whole
from rlhf.metrics import describe, present_name


@dataclass(frozen=True, slots=True)
class LogLine:
    """Metrics of one call.

    Attributes:
        step: optimiser step, counted as the caller counts.
        stage: stage of the recipe.
        time: seconds since 1970.
        values: by name; None stands for a value that was not finite.
    """

    step: int
    stage: str
    time: float
    values: Mapping[str, float | None]


class Sink(Protocol):
    """A place that log lines go to."""

    def write(self, line: LogLine) -> None:
        """Keep one line. Raises CheckpointError when it cannot."""

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Drop what was logged after a step of a stage, and beyond `n_lines` where given."""

    def close(self) -> None:
        """Flush and free."""


@dataclass(frozen=True)
class Metrics:
    """Checks names and passes each line to every sink.

    Attributes:
        sinks: where lines go; none is fine.
    """

    sinks: Sequence[Sink] = field(default_factory=tuple)

    def log(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        """Log `values` (numbers, or arrays of one number) at `step`.

        Raises:
            DataError: an unknown name, or a value that is no number.
            CheckpointError: a sink cannot be written.
        """
        line = LogLine(step, stage, time.time(), checked(values))
        for sink in self.sinks:
            sink.write(line)

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Drop what was logged after `step` of `stage`, later stages included, before a resume.

        An empty `stage` forgets everything. `n_lines` is the number of lines to keep at most, which also tells lines of
        one step apart.
        """
        for sink in self.sinks:
            sink.rewind(stage, step, n_lines)

    def marks(self) -> dict[str, Mark]:
        """Length and digest of each log file, by name."""
        return {sink.path.name: sink.mark for sink in self.sinks if isinstance(sink, JsonlSink)}

    def close(self, *, has_failed: bool = False) -> None:
        """Close every sink; after a failed run, by `fail` where a sink has it."""
        for sink in self.sinks:
            (getattr(sink, "fail", sink.close) if has_failed else sink.close)()


def checked(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics as plain numbers, None where one is not finite. Raises DataError for an unknown name or no number."""
    return {name: _number(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> float | None:
    describe(name)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise DataError("a metric is not a number", where=name, got=repr(value)[:80], expected="a float") from error
    return number if math.isfinite(number) else None


class JsonlSink:
    """Appends one JSON object per line: `{"step": 3, "stage": "policy_gradient", "time": ..., "rollout/success": 0.5}`.

    Each line is flushed. A line torn by a killed process is dropped when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with disk("metrics", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(self.path)
            self._open()

    def _open(self) -> None:
        self._file: IO[bytes] = self.path.open("ab")
        self._digest, self._n_bytes = hashlib.sha256(), 0
        self._take_in(self.path.read_bytes() if self.path.is_file() else b"")  # a device has no end

    def _take_in(self, content: bytes) -> None:
        self._digest.update(content)
        self._n_bytes += len(content)

    @property
    def mark(self) -> Mark:
        """Of all lines so far, as they were written."""
        return Mark(self._n_bytes, self._digest.hexdigest())

    def write(self, line: LogLine) -> None:
        """Append and flush one line."""
        record = {"step": line.step, "stage": line.stage, "time": round(line.time, 3), **line.values}
        content = json.dumps(record).encode() + b"\n"
        with disk("metrics", self.path):
            self._file.write(content)
            self._file.flush()
        self._take_in(content)

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Drop lines after the last one of `stage` up to `step`; from its first where there is none."""
        self.close()
        n_kept = _n_kept(read_metrics(self.path), stage, step)
        n_kept = n_kept if n_lines is None else min(n_kept, n_lines)
        with whole("metrics", self.path) as partial:
            texts = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            partial.write_text("".join(texts[:n_kept]), "utf-8")
        with disk("metrics", self.path):
            self._open()

    def close(self) -> None:
        """Close the file."""
        with disk("metrics", self.path):
            self._file.close()


def _n_kept(lines: Sequence[LogLine], stage: str, step: int) -> int:
    if not stage:
        return 0
    reached = [i for i, line in enumerate(lines) if line.stage == stage and line.step <= step]
    if reached:
        return reached[-1] + 1
    return next((i for i, line in enumerate(lines) if line.stage == stage), len(lines))


def _drop_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[LogLine]:
    """Read the lines of a `metrics.jsonl`, oldest first; a torn last line is left out.

    Raises:
        DataError: a line in the middle is no log line.
    """
    text = Path(path).read_text(encoding="utf-8")
    return list(_log_lines(text[: text.rfind("\n") + 1].splitlines(), path))


def _log_lines(texts: Iterable[str], path: Path) -> Iterator[LogLine]:
    for number, text in enumerate(texts, start=1):
        try:
            yield log_line(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("not a log line", where=f"{path}:{number}", got=text[:80]) from error


def log_line(record: dict[str, Any]) -> LogLine:
    """Log line of a record of `metrics.jsonl`; what an earlier release logged gets its present name.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the record is no log line.
    """
    step, stage, at = int(record.pop("step")), str(record.pop("stage")), float(record.pop("time"))
    return LogLine(step, stage, at, {present_name(name): value for name, value in record.items()})


class TensorboardSink:
    """TensorBoard event files, one folder per stage, so that stages show as separate runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def write(self, line: LogLine) -> None:
        """Write one scalar per finite value."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=v) for name, v in line.values.items() if v is not None]
        event = Event(wall_time=line.time, step=line.step, summary=Summary(value=values))
        with disk("metrics", self.folder):
            self._writer(line.stage).add_event(event)

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Purge points of `stage` after `step` in TensorBoard, by a session-start event.

        Event files are only appended to: points of other stages stay, and are drawn over.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for name in [stage] if stage else [p.name for p in self.folder.glob("*") if p.is_dir()]:
            start = Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
            with disk("metrics", self.folder):
                self._writer(name).add_event(start)

    def close(self) -> None:
        """Flush and close every event file."""
        with disk("metrics", self.folder):
            for writer in self._writers.values():
                writer.close()
        self._writers.clear()

    def _writer(self, stage: str) -> Any:
        if stage not in self._writers:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            with disk("metrics", self.folder):
                self._writers[stage] = EventFileWriter(str(self.folder / stage))
        return self._writers[stage]
