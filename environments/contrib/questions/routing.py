"""Routing: ask the cheapest expert that knows the topic, then answer.

    penny costs 1, knows: rivers. duke costs 10, knows: birds, rivers. ...
    What is the code of the river Quor? Ask an expert by name: 'ask penny', or 'answer' and the code.

Experts are rules and not models, so that who knows what is certain; what is learnt is whom to ask. The reward
`cost_aware` reads the costs from the replies. After Router-R1, arXiv 2506.09033, whose experts are language models:
those are `mcp` tools, or an `external` world.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.procedural import Attempt, Drawn, digest
from rlhf.data import Task
from rlhf.settings import STRICT

_EXPERTS = ("baron", "clerk", "duke", "farmer", "knight", "penny", "sage", "smith")
_TOPICS = ("bird", "bridge", "river", "song", "star", "stone", "tower", "tree")
_NAMES = ("Ald", "Bel", "Dru", "Kas", "Mes", "Ner", "Quor", "Sil", "Tar", "Vor", "Wen")
_CODES = tuple(a + b for a in ("fa", "ki", "lo", "mu", "pe", "ra", "so", "ti") for b in ("bel", "dan", "gor", "nix"))
_ASK, _ANSWER = re.compile(r"^(?:ask|call)\W+(\w+)"), re.compile(r"^answer\W+(\w+)")
_UNKNOWN = "Unknown action. Write 'ask' and the name of an expert, or 'answer' and the code."


@plain_dataclass(frozen=True)
class Exchange:
    """Experts with their prices and topics, and a question.

    Attributes:
        experts: name, price, numbers of the topics that it knows, and the code that it gives.
        topic: number of the topic asked about.
        thing: what is asked about.
        code: that is right.
    """

    experts: tuple[tuple[str, int, tuple[int, ...], str], ...]
    topic: int
    thing: str
    code: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Routing(Drawn):
    """Ask experts of unlike price for a code, one who knows and as cheap as can be; pure Python."""

    experts: Annotated[int, Field(ge=2, le=8)] = 4
    """Number of experts. The dearest knows everything, the others some topics; who does not know says a wrong code."""
    topics: Annotated[int, Field(ge=2, le=8)] = 4
    """Number of topics."""
    max_steps: Annotated[int, Field(ge=2)] = 4
    """Questions and the answer."""

    name: ClassVar[str] = "routing"

    @property
    def level(self) -> str:
        """Level: number of experts and of topics."""
        return f"{self.experts}-{self.topics}"

    def draw(self, rng: random.Random) -> Exchange:
        """Draw experts, of whom the dearest knows everything, and a question."""
        names = rng.sample(_EXPERTS, self.experts)
        prices = sorted(rng.sample(range(1, 40), self.experts))
        topic, code = rng.randrange(self.topics), rng.choice(_CODES)
        everything = tuple(range(self.topics))
        known = [tuple(sorted(rng.sample(everything, rng.randint(1, self.topics - 1)))) for _ in prices[:-1]]
        wrong = [one for one in _CODES if one != code]
        experts = [
            (name, price, knows, code if topic in knows else rng.choice(wrong))
            for name, price, knows in zip(names, prices, [*known, everything], strict=True)
        ]
        return Exchange(tuple(sorted(experts)), topic, rng.choice(_NAMES), code)

    def start(self, task: Task) -> RoutingEpisode:
        """Begin one attempt at a task."""
        return RoutingEpisode(self.instance(task), self)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split; the reference is the code."""
        return [replace(task, reference=self.instance(task).code) for task in super().tasks(split)]

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Ask the cheapest who knows, and answer; None where too few steps are left."""
        exchange: Exchange = self.instance(task)
        episode = self.start(task)
        episode.after(taken)
        if episode.over:
            return () if episode.solved else None
        best = min((e for e in exchange.experts if exchange.topic in e[2]), key=lambda e: e[1])[0]
        path = (*(() if best in episode.asked else (f"ask {best}",)), f"answer {exchange.code}")
        return path if len(path) <= episode.steps_left else None


class RoutingEpisode(Attempt):
    """One attempt: experts are asked until a code is answered. The key tells who was asked, and how often."""

    def __init__(self, exchange: Exchange, settings: Routing) -> None:
        super().__init__(settings.max_steps)
        self._exchange, self.asked, self.spent = exchange, list[str](), 0
        told = " ".join(
            f"{name} costs {price}, knows: {', '.join(f'{_TOPICS[i]}s' for i in knows)}."
            for name, price, knows, _ in exchange.experts
        )
        question = f"What is the code of the {_TOPICS[exchange.topic]} {exchange.thing}?"
        self.opening = self.opened(f"{told}\n{question} Ask an expert by name: 'ask NAME', or 'answer CODE'.")

    def do(self, action: str) -> tuple[str, bool]:
        """Ask an expert, or answer."""
        said = action.strip().strip("<>\"'`.").casefold()
        if found := _ANSWER.match(said):
            self.done, self.solved = True, found[1] == self._exchange.code
            self.score = float(self.solved)
            return ("Right." if self.solved else "Wrong.") + f" Spent {self.spent} in all.", True
        asked = _ASK.match(said)
        expert = next((e for e in self._exchange.experts if asked and e[0] == asked[1]), None)
        if expert is None:
            return _UNKNOWN, False
        self.asked.append(expert[0])
        self.spent += expert[1]
        return f"{expert[0]}: the code is {expert[3]}. Cost: {expert[1]}", True

    def state(self) -> str:
        """Return the question, who was asked, and whether there was an answer."""
        return f"{digest(repr(self._exchange))}/{','.join(self.asked)}{'/answered' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Return every expert that may be asked, and every code that was heard."""
        heard = {f"answer {e[3]}" for e in self._exchange.experts if e[0] in self.asked}
        return tuple(sorted({*(f"ask {e[0]}" for e in self._exchange.experts), *heard}))
