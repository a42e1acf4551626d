"""Profile of some steps: a trace, and a table of seconds by part.

    profile/1-policy_gradient-000003.json.gz    Chrome trace of a step, for https://ui.perfetto.dev or chrome://tracing
    profile/table.txt                           seconds and shares of the parts of a step
    profile/table.json                          the same of each step

A clock hears of the spans of a step (`rlhf.spans`). Each second belongs to the innermost one, and to `other` outside of
all, so that the parts add up to the wall clock. Evaluations, deliveries, checkpoints and the like keep what goes on
inside of them. On a GPU the clock waits at both ends of a span until the GPU is idle: kernels count where they were
launched.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlhf.errors import RecipeError, disk
from rlhf.spans import Part, heard_by
from rlhf.training.checkpoints.store import State
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.stages.supervised import Supervised

#: Spans that keep what goes on inside of them.
_WHOLE = frozenset({"critic", "delivery", "evaluation", "checkpoint", "store", "reward models"})
#: Spans whose operators are no part of a trace: they would be its greater part.
_BARE = (_WHOLE - {"critic"}) | {"rollout", "scoring"}
#: Spans of a part of which the trace of a step has operators; of later ones it has the range alone.
MAX_WITH_OPERATORS = 16
#: Bytes of a trace before it is packed. Of a longer one the shortest events go.
MAX_BYTES = 64 * 2**20
_OTHER = "other"


class StepClock:
    """Adds up the seconds of the parts of a step, from when it is made.

    Attributes:
        seconds: so far, by part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, bool]] = [(_OTHER, True)]
        self._n: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._begun = self._since = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Seconds from when the clock was made to its last turn."""
        return self._since - self._begun

    @contextmanager
    def span(self, part: Part) -> Iterator[None]:
        """See `rlhf.spans.span`. What other threads do is no part of a step."""
        outer, outer_has = self._open[-1]
        if outer in _WHOLE or threading.get_ident() != self._thread:
            yield
            return
        self.turn()
        self._n[part] += 1
        _operators(True)  # else the range itself would not be recorded
        with record_function(part):
            has = part not in _BARE and self._n[part] <= MAX_WITH_OPERATORS
            self._open.append((part, has))
            _operators(has)
            try:
                yield
            finally:
                self.turn()
                self._open.pop()
                _operators(True)
        _operators(outer_has)

    def turn(self) -> None:
        """Give the seconds since the last turn to the part that is open."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, part = time.perf_counter(), self._open[-1][0]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


def _operators(on: bool) -> None:
    """Record operators of this thread, or not any more."""
    torch.autograd._enable_record_function(on)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """Profile of a step: number from 1, wall clock, seconds of its parts, and trace name."""

    step: int
    wall_s: float
    seconds: Mapping[str, float]
    trace: str


@dataclass
class Profiler:
    """Profiles steps `first` to `first + n - 1`, counted from 0, of stage number `stage`.

    Attributes:
        folder: where traces and tables go.
        is_warm: whether a step of the stage goes before the first that is profiled.
        steps: profiled so far.
    """

    folder: Path
    stage: int
    first: int
    n: int
    is_warm: bool
    steps: list[ProfiledStep] = field(default_factory=list)

    @contextmanager
    def at(self, stage: int, label: str, step: int, say: Callable[[str], None]) -> Iterator[None]:
        """Context that profiles a step if it is selected; the profile of one that fails is discarded.

        Args:
            stage: its index.
            label: of the stage.
            step: counted from 0.
            say: shows the user the table, after the last of the steps.
        """
        if stage != self.stage or not self.first <= step < self.first + self.n:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the library behind it tells of every start and stop
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        trace = profile(activities=[ProfilerActivity.CPU, *cuda])
        trace.start()
        try:
            with record_function(f"step {step + 1}"):
                clock = StepClock()
                with heard_by(clock):
                    yield
                clock.turn()
        finally:
            _operators(True)
            trace.stop()
        name = f"{label}-{step + 1:06d}.json.gz"
        self.steps.append(ProfiledStep(step + 1, clock.wall_s, clock.seconds, name))
        with disk("the profile", self.folder):
            self.folder.mkdir(exist_ok=True)
            _write_trace(trace, self.folder / name)
            text = self._write_table(label)
        if len(self.steps) == self.n:
            say(f"{text}\nprofile: {self.folder}")

    def _write_table(self, label: str) -> str:
        """Write both tables of the steps so far; returns the text."""
        names = f"step {self.steps[0].step}" if len(self.steps) == 1 else f"steps {self.steps[0].step}"
        names += f" to {self.steps[-1].step}" if len(self.steps) > 1 else ""
        warm = "the one before is left out as warm-up" if self.is_warm else "the first one is not left out as warm-up"
        text = f"{names} of {label}; {warm}\n{table(self.steps)}"
        whole = sum(one.wall_s for one in self.steps)
        found: dict[str, Any] = {
            "stage": label,
            "is_warm": self.is_warm,
            "wall_s": whole,
            "seconds": totals(self.steps),
            "shares": {part: seconds / whole for part, seconds in totals(self.steps).items()},
            "steps": [
                {"step": s.step, "wall_s": s.wall_s, "seconds": dict(s.seconds), "trace": s.trace} for s in self.steps
            ],
        }
        (self.folder / "table.txt").write_text(text + "\n", encoding="utf-8")
        (self.folder / "table.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        return text


def totals(steps: Sequence[ProfiledStep]) -> dict[str, float]:
    """Total seconds of each part that took any, in the order of a step."""
    sums = {part: sum(one.seconds.get(part, 0.0) for one in steps) for part in (*get_args(Part), _OTHER)}
    return {part: seconds for part, seconds in sums.items() if seconds > 0}


def table(steps: Sequence[ProfiledStep]) -> str:
    """Table of the parts: seconds a step, share, minimum and maximum."""
    n, whole = len(steps), sum(one.wall_s for one in steps)
    lines = [f"{'':<15}{'s a step':>10}{'share':>8}{'least':>10}{'most':>10}"]
    for part, seconds in totals(steps).items():
        of_each = [one.seconds.get(part, 0.0) for one in steps]
        share = f"{seconds / whole:.1%}"
        lines.append(f"{part:<15}{seconds / n:>10.3f}{share:>8}{min(of_each):>10.3f}{max(of_each):>10.3f}")
    walls = [one.wall_s for one in steps]
    lines.append(f"{'wall clock':<15}{whole / n:>10.3f}{'100.0%':>8}{min(walls):>10.3f}{max(walls):>10.3f}")
    return "\n".join(lines)


def _write_trace(trace: Any, path: Path) -> None:
    """Write a trace, of no more than `MAX_BYTES` before it is packed."""
    plain = path.with_suffix("")  # without .gz
    trace.export_chrome_trace(str(plain))
    if plain.stat().st_size > MAX_BYTES:
        found = json.loads(plain.read_text(encoding="utf-8"))
        found["traceEvents"] = _longest(found["traceEvents"], MAX_BYTES / plain.stat().st_size)
        plain.write_text(json.dumps(found), encoding="utf-8")
    with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def _longest(events: Sequence[Mapping[str, Any]], share: float) -> list[Mapping[str, Any]]:
    """Leave that share of the events: ranges, names of threads, and of the others the longest."""
    kept = [e for e in events if e.get("ph") == "M" or "user_annotation" in e.get("cat", "")]
    others = [e for e in events if e.get("ph") == "X" and "user_annotation" not in e.get("cat", "")]
    others.sort(key=lambda e: -float(e.get("dur", 0.0)))
    return kept + others[: max(int(share * len(events)) - len(kept), 0)]


def profiler_of(stages: Sequence[Any], n: int, folder: Path, state: State) -> Profiler:
    """Profiler of `n` steps of a run: of its last policy-gradient stage, else its last supervised one.

    The first step that this process makes of the stage is left out where there are more than `n`: it warms up.

    Args:
        stages: of the recipe.
        n: steps.
        folder: of the run.
        state: where the run stands.

    Raises:
        RecipeError: there is no such stage, or fewer steps of it are left.
    """
    where = f"--profile {n}"
    kinds = (PolicyGradient, Supervised)
    known = [(i, one) for i, one in enumerate(stages) if not (isinstance(one, Supervised) and one.data)]
    fitting = [i for kind in reversed(kinds) for i, one in known if isinstance(one, kind)]
    if not fitting:
        raise RecipeError(
            "no stage of the recipe has steps that can be profiled",
            where=where,
            got=", ".join(type(one).__name__ for one in stages),
            expected="a policy_gradient stage, or a supervised one whose steps are known before its data is read",
            hint="leave out --profile",
        )
    index = fitting[-1]
    of_stage = n_steps(stages[index])
    is_over = state.stage > index or (state.stage == index and state.finished)
    done = of_stage if is_over else state.step if state.stage == index else 0
    left = of_stage - done
    if not 1 <= n <= left:
        raise RecipeError(
            "this number of steps cannot be profiled",
            where=where,
            got=f"{n} steps",
            expected=f"1 to {left}, the remaining steps of stages.{index}" if left else "a run with steps left",
            hint=f"--profile {min(max(n, 1), left)}"
            if left
            else "give the stage more: rlhf train --resume RUN steps=N",
        )
    return Profiler(folder / "profile", index, done + (left > n), n, left > n)


def n_steps(stage: PolicyGradient | Supervised) -> int:
    """Number of steps of a stage: rounds of attempts, or updates."""
    if isinstance(stage, PolicyGradient):
        return stage.steps
    if stage.rejection_sampling is not None:
        return stage.rejection_sampling.rounds
    return stage.epochs * -(-stage.n_demonstrations // stage.batch_size)
