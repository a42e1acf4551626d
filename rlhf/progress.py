"""Progress bars that say what is waited for. Everything goes to one console, by default standard error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from rlhf.terminal import CleanConsole

_STDERR = 2

#: Seconds without a line after which one says what is waited for, where there is no bar.
_SILENCE_S = 30.0


class RichProgress:
    """Progress bar of the present stage; without a terminal, an occasional line."""

    def __init__(self, console: CleanConsole, *, every: int = 10) -> None:
        self.console, self.every = console, every
        self._bars = Bars(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            TextColumn("{task.fields[waiting]}", style="dim", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: Any = None
        self._name, self._total, self._done, self._last = "", 0, 0, ""
        self._began, self._said_at = (0.0, 0), time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, name: str, total: int, done: int) -> None:
        """Begin a bar of `total` steps of which `done` are over."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._name, self._total, self._done = name, total, done
        self._began = (time.monotonic(), done)
        self._task = self._bars.add_task(name, total=total, completed=done, last="", waiting="")

    def advance(self, note: str) -> None:
        """Advance by a step."""
        self._done += 1
        self._last = note
        if self._task is not None:
            self._bars.update(self._task, completed=self._done, last=note, waiting="")
        is_due = self._done == self._total or self._done % max(self.every, self._total // 20) == 0
        if not self.console.is_terminal and (is_due or time.monotonic() - self._said_at > _SILENCE_S):
            self.say(f"{self._name} {self._done}/{self._total}  {note}{self._left()}")

    def _left(self) -> str:
        """The time left by the mean of the steps so far, as a bar says it."""
        began, before = self._began
        left = (time.monotonic() - began) / (self._done - before) * (self._total - self._done)
        return f"  {timedelta(seconds=round(left))} left" if left >= 1 else ""

    def at(self, done: int, note: str) -> None:
        """Show this many steps as nearly done on the bar; `advance` counts them."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, last=note)

    def note(self, text: str) -> None:
        """Show a status line that the next one replaces; without a terminal only after a while of silence."""
        if self._task is not None:
            self._bars.update(self._task, waiting=text)
        if not self.console.is_terminal and time.monotonic() - self._said_at > _SILENCE_S:
            self.say(f"{self._name} {self._done}/{self._total}  {text}" if self._name else text)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Write to the present standard error, wherever this process's own is led inside."""
        try:
            is_standard = self.console.file.fileno() == _STDERR
        except (OSError, ValueError):  # no file of the system's
            is_standard = False
        if not is_standard:
            yield
            return
        before = self.console.file
        with os.fdopen(os.dup(_STDERR), "w", encoding="utf-8") as kept:
            self.console.file = kept
            try:
                yield
            finally:
                self.console.file = before

    def rollout(self, counts: Any) -> None:
        """Progress of the episodes now running."""
        self.note(str(counts))

    def say(self, text: str) -> None:
        """Print a line."""
        self._said_at = time.monotonic()
        self.console.print(text, soft_wrap=True)
