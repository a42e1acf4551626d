"""Random garbage results of environments, rewards and agents.

Everything here is refused by a contract; nothing of it is merely odd. Those that come last in `OUTRIGHT` misbehave when
they are asked for anything: their truth value, their length, their number, their text, their class.
"""

from __future__ import annotations

import asyncio
import decimal
import fractions
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from environments.base import StepResult
from rlhf.data import Task, Verdict
from tests.rollout.small_world import Corridor, CorridorEpisode

#: Bytes of a text that is beyond all bounds; the full number of cases draws ones of up to 100 MB.
LONG = 5 * 2**20
#: Seconds for which a call hangs, where it may.
HANGS_S = 4.0


class Unwilling:
    """Raises, whatever it is asked."""

    def _no(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("I would rather not")

    __bool__ = __float__ = __int__ = __len__ = __iter__ = __repr__ = __str__ = __eq__ = __lt__ = __call__ = _no  # type: ignore[assignment]
    __array__ = __add__ = __getattr__ = __hash__ = _no  # type: ignore[assignment]
    __class__ = property(_no)  # type: ignore[assignment]


class Leaving(Unwilling):
    """Wants to end everything, whatever it is asked."""

    def _no(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt("I am leaving")

    __bool__ = __float__ = __len__ = __iter__ = __repr__ = __str__ = __eq__ = __hash__ = _no  # type: ignore[assignment]
    __class__ = property(_no)  # type: ignore[assignment]


class Sly(StepResult):
    """Looks solved where one asks, and is made without its fields."""

    success = terminated = True  # type: ignore[assignment]
    reward = 1.0  # type: ignore[assignment]


class Rude(BaseException):
    """An exception whose message cannot be read, and is longer than memory."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def long(rng: random.Random, most: int) -> str:
    """A text of more bytes than any may have."""
    unit = rng.choice(["a", " ", "é", "<|im_end|>"])
    return unit * (rng.randrange(LONG, most + 1) // len(unit.encode()) + 1)


OUTRIGHT: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: 3,
    lambda: b"solved",
    lambda: {"reply": "Out.", "success": True, "terminated": True},
    lambda: ("Out.", 1.0, True),
    lambda: [StepResult("Out.", 1.0, True, success=True)],
    lambda: StepResult,
    lambda: object(),
    lambda: np.ones(3),
    lambda: np.array(True),
    lambda: object.__new__(Sly),
    lambda: (x for x in "generator"),
    lambda: "Out.",
    Unwilling,
    Leaving,
)
NO_NUMBER: tuple[Callable[[], Any], ...] = (
    lambda: float("nan"),
    lambda: float("-inf"),
    lambda: 10**400,
    lambda: 1 << 10**7,
    lambda: 1 + 2j,
    lambda: "1.0",
    lambda: None,
    lambda: decimal.Decimal(1),
    lambda: fractions.Fraction(1, 3),
    lambda: np.ones(2),
    lambda: np.array(1.0),
    lambda: np.float32("inf"),
    lambda: np.complex64(1),
    lambda: np.datetime64("2026-01-01"),
    lambda: [1.0],
    Unwilling,
    Leaving,
)
NO_TRUTH: tuple[Callable[[], Any], ...] = (
    lambda: "no",
    lambda: "False",
    lambda: "",
    lambda: 0,
    lambda: 1,
    lambda: 1.0,
    lambda: float("nan"),
    lambda: np.array([True, False]),
    lambda: np.array(True),
    lambda: np.int64(1),
    lambda: [],
    lambda: object(),
    Unwilling,
    Leaving,
)
NO_TEXT: tuple[Callable[[], Any], ...] = (
    lambda: 5,
    lambda: b"Out.",
    lambda: ["Out."],
    lambda: np.array("Out."),
    Unwilling,
    Leaving,
)
NO_TEXTS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "go north",
    lambda: ("go north", 3),
    lambda: {"go north"},
    lambda: ("a",) * (LONG + 1),
    lambda: [""] * (2 * LONG),
    lambda: [Unwilling()],
    Unwilling,
    Leaving,
)


def broken_result(rng: random.Random, most_bytes: int = LONG) -> Any:
    """What looks like a solved step's result but for one field."""
    name = rng.choice([field.name for field in fields(StepResult)])
    odd: Any
    if name in ("terminated", "truncated", "valid"):
        odd = rng.choice((*NO_TRUTH, lambda: None))()
    elif name == "success":
        odd = rng.choice(NO_TRUTH)()
    elif name == "reward":
        odd = rng.choice(NO_NUMBER)()
    elif name == "admissible_actions":
        odd = rng.choice((*NO_TEXTS, lambda: (long(rng, most_bytes),)))()
    else:
        more = () if name == "state_key" else (lambda: None,)
        odd = rng.choice((*NO_TEXT, *more, lambda: long(rng, most_bytes)))()
    return replace(StepResult("Out.", 1.0, terminated=True, success=True), **{name: odd})


def broken_verdict(rng: random.Random, most_bytes: int = LONG) -> Any:
    """What is no reward of an attempt of three turns."""
    found = Verdict(1.0, per_turn=(0.0, 0.0, 1.0))
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice((*NO_NUMBER, lambda: long(rng, most_bytes)))()
    if kind == 1:
        object.__setattr__(found, "value", rng.choice(NO_NUMBER)())
    elif kind == 2:
        object.__setattr__(found, "why", rng.choice((*NO_TEXT, lambda: None))())
    else:
        turns: tuple[Callable[[], Any], ...] = (
            lambda: (1.0,),
            lambda: (0.0, 0.0, 2.0),
            lambda: (1e308, 1e308, -1e308),
            lambda: (0.0, 1.0, rng.choice(NO_NUMBER)()),
            lambda: np.array([0.0, 0.0, 1.0]),
            lambda: iter((0.0, 0.0, 1.0)),
            lambda: [0.0] * 10**6,
            Unwilling,
        )
        object.__setattr__(found, "per_turn", rng.choice(turns)())
    return found


def raised(rng: random.Random) -> BaseException:
    """An exception, most of which end a program where nobody expects them."""
    return rng.choice(
        (
            ValueError("odd"),
            RuntimeError("x" * LONG),
            MemoryError(),
            RecursionError("deep"),
            StopIteration(3),
            TimeoutError(),
            AssertionError(Unwilling()),
            asyncio.CancelledError(),
            GeneratorExit(),
            SystemExit(3),
            KeyboardInterrupt(),
            BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()]),
            Rude(),
        )
    )


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in one call: something is returned, raised, or does not come.

    Attributes:
        seed: of what it is.
        broken: draws what is returned.
        may_hang: whether it may hang for longer than the limit.
        most_bytes: of a text.
    """

    seed: int
    broken: Callable[..., Any]
    may_hang: bool = False
    most_bytes: int = LONG

    def happen(self) -> Any:
        """Return or raise something, or wait."""
        rng = random.Random(self.seed)
        kind = rng.random()
        if self.may_hang and kind < 0.005:
            threading.Event().wait(HANGS_S)
        if kind < 0.3:
            raise raised(rng)
        return self.broken(rng, self.most_bytes)

    async def happen_later(self) -> Any:
        """The same after a while, of a coroutine that may not hear that it is cancelled."""
        rng = random.Random(self.seed)
        if rng.random() < 0.05:
            deaf_until = time.monotonic() + HANGS_S
            while self.may_hang and time.monotonic() < deaf_until:
                try:
                    await asyncio.sleep(0.1)
                except BaseException:
                    continue
        await asyncio.sleep(0)
        return self.happen()


def broken_answer(rng: random.Random, most_bytes: int = LONG) -> Any:
    """What an environment should not answer."""
    return rng.choice(OUTRIGHT)() if rng.random() < 0.3 else broken_result(rng, most_bytes)


@dataclass(frozen=True)
class Garbage(Corridor):
    """A corridor in which every second task meets garbage: in its start, a step, or a step that waits.

    Attributes:
        n: tasks.
        hangs: whether some calls hang.
        most_bytes: of a text.
    """

    n: int = 100
    hangs: bool = False
    most_bytes: int = LONG

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"corridor/{split}/{i}", seed=i, reference="secret") for i in range(self.n)]

    def start(self, task: Task) -> Any:
        odd = Trouble(task.seed, broken_answer, self.hangs, self.most_bytes)
        opening = (odd.happen(),) if task.seed % 2 and task.seed % 7 == 0 else ()
        episode = GarbageEpisode(self, task, odd)
        episode.opening = opening[0] if opening else episode.opening
        return episode


class GarbageEpisode(CorridorEpisode):
    environment: Garbage

    def __init__(self, environment: Garbage, task: Task, trouble: Trouble) -> None:
        super().__init__(environment, task)
        self.n_steps, self.trouble = 0, trouble

    async def step(self, action: str) -> Any:
        self.n_steps += 1
        if self.task.seed % 2 and self.n_steps > self.task.seed % 3:
            later = self.task.seed % 5 == 0
            return await self.trouble.happen_later() if later else self.trouble.happen()
        return await super().step(action)


@dataclass(frozen=True)
class Endless(Corridor):
    """A corridor in which the second task's first step answers 100 MB, or goes wrong with its process."""

    ends: str = ""

    def start(self, task: Task) -> Any:
        return EndlessEpisode(self, task)


class EndlessEpisode(CorridorEpisode):
    environment: Endless

    async def step(self, action: str) -> Any:
        if self.task.seed != 1:
            return await super().step(action)
        if self.environment.ends == "hangs":
            time.sleep(60)
        elif self.environment.ends == "closes its channel":
            os.closerange(3, 64)
            time.sleep(60)
        elif self.environment.ends == "dies":
            self.kept = bytearray(2**30)
            os._exit(3)
        return StepResult("word " * (20 * 2**20))
