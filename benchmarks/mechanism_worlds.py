"""Worlds in which a method has what it is about, for `benchmarks/mechanisms.py` and `benchmarks/trees.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Literal

from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.games.key_door import Keyhole, KeyholeEpisode
from rlhf.data import Task
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nearer(Keyhole):
    """Keyhole that rewards each turn by how many actions fewer are left: 1, 0 or −1."""

    def start(self, task: Task) -> KeyholeEpisode:
        """Begin one attempt."""
        return NearerEpisode(self._house(task), compass=self.compass, max_steps=self.max_steps)


class NearerEpisode(KeyholeEpisode):
    """One attempt with a reward in each turn."""

    def act(self, action: str) -> StepResult:
        """Do one action."""
        before = len(self.way_out())
        result = super().act(action)
        return replace(result, reward=float(before - len(self.way_out())))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Told(Keyhole):
    """Keyhole whose tasks have a reference: the actions that solve it."""

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split."""
        return [replace(task, reference=", ".join(self.start(task).way_out())) for task in super().tasks(split)]


COLOURS = ("red", "green", "blue", "white")
ANIMALS = ("cat", "dog", "cow", "hen", "pig", "fox", "owl", "bee")
_FIRST_SEED = {"train": 0, "test": 2000}


@plain_dataclass(frozen=True)
class Corridor:
    """Say the colours that are shown, and once that of an animal, which has to be found out; the first mistake ends it.

    Attributes:
        asks: of the animal, in the last turn or in the first.
        n_turns: of an attempt without a mistake.
        any_colour: the colour of an animal is drawn for each task: what a start imitates, which then knows none.
    """

    asks: Literal["late", "early"] = "late"
    n_turns: int = 8
    any_colour: bool = False
    properties = Properties(deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True)

    def tasks(self, split: str) -> list[Task]:
        """256 of each split."""
        return [Task(f"corridor/{seed}", seed=seed) for seed in range(_FIRST_SEED[split], _FIRST_SEED[split] + 256)]

    def start(self, task: Task) -> Walk:
        """Begin one attempt."""
        return Walk(*self._drawn(task.seed))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give the colours that are left."""
        colours = self._drawn(task.seed)[1]
        return colours[len(taken) :] if list(taken) == colours[: len(taken)] else None

    def _drawn(self, seed: int) -> tuple[list[str], list[str]]:
        """Return what is shown in each turn, and what is right to say."""
        rng, at = random.Random(seed), 0 if self.asks == "early" else self.n_turns - 1
        said = rng.choices(COLOURS, k=self.n_turns - 1)
        shown = [f"Say {colour}." for colour in said]
        animal = rng.choice(ANIMALS)
        colour = rng.choice(COLOURS) if self.any_colour else COLOURS[ANIMALS.index(animal) % len(COLOURS)]
        return [*shown[:at], f"The {animal}?", *shown[at:]], [*said[:at], colour, *said[at:]]


class Walk:
    """One attempt."""

    def __init__(self, shown: Sequence[str], colours: list[str]) -> None:
        self.shown, self.colours, self.n_said = shown, colours, 0
        self.opening = StepResult(shown[0])

    async def step(self, action: str) -> StepResult:
        """Hear a colour."""
        right = action == self.colours[self.n_said]
        self.n_said += 1
        if right and self.n_said < len(self.colours):
            return StepResult(self.shown[self.n_said])
        return StepResult("The end.", float(right), True, success=right, valid=action in COLOURS)

    async def close(self) -> None:
        """Nothing is held open."""
