"""A partner who wants something and has not said all of it: ask, then submit.

    Help me with a lamp. Its colour is to be red. Open: material, shape, size.
    > ask material
    The material is to be wood.
    > ask size
    I do not mind the size.
    > ask shape
    The shape is to be round.
    > submit red, wood, round, small
    All 4 points are as I want them.

The partner follows rules and answers what it is asked, no more. It is made after ColBench (Zhou and others, arXiv
2503.15478), in which a policy works with a model that knows the hidden reference; as there, what is submitted is
compared with the reference, and a policy that guesses instead of asking loses points.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.core.normalise import named, plain, words
from environments.core.procedural import Attempt, RecallsByReplay, digest, draw_for
from environments.core.seed_splits import Seeded
from rlhf.data import Task
from rlhf.settings import STRICT

_THINGS = words("bag bench bowl box chair clock cup desk lamp poster rug shelf sign table tent vase")
#: Points of a design, and the values that each may have; no value is of two points.
POINTS: Mapping[str, tuple[str, ...]] = {
    "colour": words("blue green red white"),
    "edge": words("plain ragged rounded sharp"),
    "finish": words("dull glossy painted waxed"),
    "material": words("glass metal stone wood"),
    "pattern": words("checked dotted flowered striped"),
    "shape": words("long oval round square"),
    "size": words("huge large small tiny"),
    "style": words("classic modern rustic simple"),
}
_POINT_OF = {value: point for point, values in POINTS.items() for value in values}
_SUBMIT = re.compile(r"^\W*(?:i )?(?:submit|final answer|answer)\b", re.IGNORECASE)
_SET = re.compile(r"^\W*(?:set|choose|make)\b", re.IGNORECASE)


@plain_dataclass(frozen=True, slots=True)
class Wish:
    """Random draw of one task.

    Attributes:
        thing: what it is about.
        wanted: points and their values, in alphabetical order.
        told: points that the partner tells at the start.
        free: points that may have any value.
    """

    thing: str
    wanted: tuple[tuple[str, str], ...]
    told: tuple[str, ...]
    free: tuple[str, ...]

    @property
    def reference(self) -> str:
        """Wanted result, in words."""
        return ", ".join(f"any {p}" if p in self.free else f"{p} {value}" for p, value in self.wanted)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Collaborate(RecallsByReplay, Seeded):
    """Ask a partner what is wanted, then submit it; the partner follows rules."""

    n_points: Annotated[int, Field(ge=1, le=8)] = 4
    """Points that the thing has; each has four values."""
    n_told: Annotated[int, Field(ge=0, le=8)] = 1
    """Points that the partner tells at the start."""
    n_free: Annotated[int, Field(ge=0, le=8)] = 1
    """Points that may have any value; the partner says so when it is asked."""
    partner: Literal["open", "terse"] = "open"
    """`open` answers about all points that a question names, `terse` about the first of them alone."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Questions that the partner answers; null is any number."""
    max_steps: Annotated[int, Field(ge=1)] = 12
    """The episode is cut after so many steps; what was not submitted by then counts for nothing."""

    @model_validator(mode="after")
    def _agrees(self) -> Collaborate:
        """Refuse more told and free points than there are, and too few steps to ask for the rest."""
        if self.n_told + self.n_free > self.n_points:
            raise ValueError(
                f"n_told and n_free are {self.n_told + self.n_free} together, and n_points {self.n_points}"
            )
        if self.max_steps < self.n_points - self.n_told + 1:
            least = self.n_points - self.n_told + 1
            raise ValueError(f"to ask for all and submit takes {least} steps, and max_steps is {self.max_steps}")
        return self

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split; the reference is what the partner wants. Raises EnvError for another split."""
        prefix = f"collaborate/{self.n_points}-{self.n_told}-{self.n_free}/{split}"
        return [
            Task(id=f"{prefix}/{seed}", seed=seed, reference=self._wish(seed).reference) for seed in self.seeds(split)
        ]

    def start(self, task: Task) -> CollaborateEpisode:
        """Begin one attempt."""
        return CollaborateEpisode(self._wish(task.seed), self)

    def _wish(self, seed: int) -> Wish:
        return _drawn(seed, self.n_points, self.n_told, self.n_free)


@lru_cache(maxsize=8192)
def _drawn(seed: int, n_points: int, n_told: int, n_free: int) -> Wish:
    return draw_for("collaborate", seed, lambda rng: draw(rng, n_points, n_told, n_free))


def draw(rng: random.Random, n_points: int, n_told: int, n_free: int) -> Wish:
    """Draw a thing, its points, and what is wanted of each."""
    points = rng.sample(list(POINTS), n_points)
    wanted = tuple((point, rng.choice(POINTS[point])) for point in sorted(points))
    told, free = sorted(points[:n_told]), sorted(points[n_told : n_told + n_free])
    return Wish(rng.choice(_THINGS), wanted, tuple(told), tuple(free))


class CollaborateEpisode(Attempt):
    """Conversation that a submission ends.

    `ask POINT`, or a question that names points or values; `set VALUE` notes one down; `submit` hands in what is noted
    down, after what stands behind it. Of a point that two values are named for, the last holds. The score is the share
    of points that are as wanted, and a free point is so with any value. The key of a state tells the wish, what has
    been answered, and what is noted down.
    """

    def __init__(self, wish: Wish, settings: Collaborate) -> None:
        super().__init__(settings.max_steps)
        self._wish, self._settings, self._name = wish, settings, digest(repr(wish))
        self._wanted = dict(wish.wanted)
        self._noted: dict[str, str] = {}
        self._answered: set[str] = set()
        self._n_asked = 0
        told = " ".join(f"Its {point} is to be {self._wanted[point]}." for point in wish.told)
        rest = ", ".join(point for point in self._wanted if point not in wish.told)
        said = " ".join(filter(None, [f"Help me with a {wish.thing}.", told, f"Open: {rest}." if rest else ""]))
        self.opening = self.opened(said)

    def do(self, action: str) -> tuple[str, bool]:
        """Ask, note down, or submit."""
        values = [value for value in named(action, _POINT_OF) if _POINT_OF[value] in self._wanted]
        if _SUBMIT.match(action) and plain(action):
            return self._submitted(values), True
        if _SET.match(action) and values:
            self._noted.update({_POINT_OF[value]: value for value in values})
            return f"Noted: {', '.join(f'{point} {value}' for point, value in sorted(self._noted.items()))}.", True
        own = list(dict.fromkeys([*named(action, self._wanted), *(_POINT_OF[value] for value in values)]))
        if not own:
            return f"I do not understand. Ask about {', '.join(self._wanted)}, or submit.", False
        self._n_asked += 1
        if self._settings.patience is not None and self._n_asked > self._settings.patience:
            return "I have no time for more questions.", True
        own = own[:1] if self._settings.partner == "terse" else own
        self._answered.update(own)
        return " ".join(self._answer(point) for point in own), True

    def _answer(self, point: str) -> str:
        if point in self._wish.free:
            return f"I do not mind the {point}."
        return f"The {point} is to be {self._wanted[point]}."

    def _submitted(self, values: Sequence[str]) -> str:
        self._noted.update({_POINT_OF[value]: value for value in values})
        n = sum(
            point in self._noted and (point in self._wish.free or self._noted[point] == value)
            for point, value in self._wanted.items()
        )
        self.score = n / len(self._wanted)
        self.done, self.solved = True, n == len(self._wanted)
        if self.solved:
            return f"All {n} points are as I want them."
        return f"{n} of {len(self._wanted)} points are as I want them."

    def way_out(self) -> tuple[str, ...] | None:
        """Return the remaining questions, and the answer to submit."""
        if self.done:
            return () if self.solved else None
        open_points = [p for p in self._wanted if p not in self._wish.told and p not in self._answered]
        patience = self._settings.patience
        n_left = len(open_points) if patience is None else max(0, patience - self._n_asked)
        asks = [f"ask {point}" for point in open_points[: min(n_left, self.steps_left - 1)]]
        return (*asks, f"submit {', '.join(self._wanted.values())}")

    def worth_keeping(self) -> str:
        """Say what was told and answered: `shape round; any size`."""
        known = {*self._wish.told, *self._answered}
        return "; ".join(
            f"any {p}" if p in self._wish.free else f"{p} {v}" for p, v in self._wanted.items() if p in known
        )

    def state(self) -> str:
        """Return the wish, the answers, the notes, and whether they are submitted."""
        noted = "+".join(f"{point}={value}" for point, value in sorted(self._noted.items()))
        tired = self._settings.patience is not None and self._n_asked >= self._settings.patience
        end = "submitted" if self.done else "tired" if tired else ""
        return f"{self._name}/{'+'.join(sorted(self._answered))}/{noted}/{end}"

    def possible(self) -> tuple[str, ...]:
        """Return questions about one point each, values to note down, and the submission of these."""
        asks = [f"ask {point}" for point in self._wanted]
        notes = [f"set {value}" for point in self._wanted for value in POINTS[point]]
        return tuple(sorted([*asks, *notes, "submit"]))
