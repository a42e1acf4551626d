"""Contract checks: findings, their report, and the checker that makes the calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, is_dataclass
from typing import Any

from rlhf.data.untrusted import is_from_outside, message_of, shown
from rlhf.errors import raised_at


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise of a contract, kept or broken.

    Attributes:
        ok: whether the promise was kept.
        promise: the call and what it promises, such as `tasks(): ids are unique`.
        detail: what was got; for a kept promise, what was looked at.
        is_caution: what is legal and probably not meant: no promise, and `ok`.
    """

    ok: bool
    promise: str
    detail: str = ""
    is_caution: bool = False

    @property
    def word(self) -> str:
        """Word of the outcome: kept, BROKEN or CAUTION."""
        return "CAUTION" if self.is_caution else "kept" if self.ok else "BROKEN"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one part.

    Attributes:
        subject: what was checked, for the reader.
        findings: in the order in which the promises were first tried.
    """

    subject: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if every promise was kept. A report that looked at nothing is not ok."""
        return bool(self.findings) and not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that are not ok."""
        return tuple(finding for finding in self.findings if not finding.ok)

    @property
    def cautions(self) -> tuple[Finding, ...]:
        """The findings that are legal and probably not meant."""
        return tuple(finding for finding in self.findings if finding.is_caution)

    @property
    def heading(self) -> str:
        """Name of the subject, and the numbers of promises kept and of cautions."""
        n, n_cautions = len(self.findings) - len(self.cautions), len(self.cautions)
        more = f", {counted(n_cautions, 'caution')}" if n_cautions else ""
        return f"{self.subject}: {n - len(self.broken)} of {n} promises kept{more}"

    def __str__(self) -> str:
        lines = [self.heading]
        for finding in self.findings:
            lines.append(f"  {finding.word:<6}  {finding.promise}")
            lines += [f"            {line}" for line in finding.detail.splitlines()]
        return "\n".join(lines)


class ContractChecker:
    """Collects the findings of a contract check.

    A promise may be tried many times; it is listed once, and its first failure is what stays. The check runs in a
    thread of its own with its own event loop, so that it can be started from anywhere and a call that never returns
    can be named.
    """

    def __init__(self, subject: str, call_limit_s: float = 60.0) -> None:
        self.subject, self.call_limit_s = subject, call_limit_s
        self._findings: dict[str, Finding] = {}
        self._calling: tuple[str, float] | None = None

    @property
    def report(self) -> Report:
        """Findings so far."""
        return Report(self.subject, tuple(self._findings.values()))

    def note(self, ok: bool, promise: str, got: str = "", *, seen: str = "") -> bool:
        """Record whether `promise` was kept, and return that.

        Args:
            ok: whether it was kept.
            promise: the call and what it promises.
            got: what to tell if it was broken.
            seen: what to tell if it was kept.
        """
        before = self._findings.get(promise)
        if before is None or (before.ok and not ok):
            self._findings[promise] = Finding(ok, promise, seen if ok else got)
        return ok

    def caution(self, what: str, detail: str) -> None:
        """Record what breaks no promise and is probably not meant."""
        self._findings[what] = Finding(True, what, detail, is_caution=True)

    async def call(self, promise: str, function: Callable[..., Any], *args: Any, during: str = "") -> tuple[bool, Any]:
        """Call `function`, awaiting what it gives if need be; an exception breaks `promise`.

        Args:
            promise: what is promised, such as `step(): raises nothing`.
            function: sync or async.
            args: its arguments.
            during: what the reader needs to repeat the call.

        Returns:
            whether it returned, and what.
        """
        self._calling = (promise, time.monotonic())
        try:
            value = function(*args)
            if inspect.isawaitable(value):
                value = await value
        except BaseException as error:
            if is_from_outside(error):
                raise
            # A stranger's part is on trial here: whatever it raises is a finding, and the walk goes on.
            self.note(False, promise, f"{during}: {describe(error)}" if during else describe(error))
            return False, None
        finally:
            self._calling = None
        self.note(True, promise)
        return True, value

    def run(self, steps: Callable[[], Coroutine[Any, Any, None]]) -> Report:
        """Run `steps` to the end, or until one call takes longer than the limit."""
        errors: list[BaseException] = []

        def body() -> None:
            try:
                asyncio.run(steps())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body, name="contract check", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            calling = self._calling
            if calling is not None and time.monotonic() - calling[1] > self.call_limit_s:
                name = calling[0].partition(":")[0]
                self.note(False, f"{name}: returns", f"had not returned after {self.call_limit_s:g} s")
                return self.report
        if errors:
            raise errors[0]
        return self.report


def is_frozen(part: object) -> bool:
    """True if an object is of a frozen dataclass."""
    kind: Any = type(part)
    return is_dataclass(part) and bool(kind.__dataclass_params__.frozen)


def describe(error: BaseException) -> str:
    """Type, message and place of an exception on one line."""
    text = one_line(message_of(error))
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + raised_at(error)


def one_line(said: str) -> str:
    """A message on one line, with semicolons where it has several."""
    return "; ".join(" ".join(line.split()) for line in said.splitlines() if line.strip())


def counted(n: int, what: str) -> str:
    """Say how many there are: `1 case`, `2 cases`, `1,000 cases`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def shorten(value: object, limit: int = 100) -> str:
    """`repr` of a value, cut to `limit` characters; its type where it has no `repr`."""
    try:
        text = repr(value)
    except BaseException as error:
        if is_from_outside(error):
            raise
        text = shown(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
