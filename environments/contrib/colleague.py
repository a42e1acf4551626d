"""Collaborative programming: write a function by asking a simulated colleague what it should do.

    Write the Python function fee(weight). Your colleague knows what it should return: ask about the limit, ...
    > ask limit
    The limit is 20.
    > ask above
    Above the limit it is 3 times weight.
    > def fee(weight): return 3 * weight if weight >= 20 else 7

What is hidden is drawn by seed: a limit, whether it belongs to what is above, and what holds on either side. The
colleague is a rule; the program runs in the sandbox, on calls that are not shown. After the programs of ColBench,
arXiv 2503.15478, in the small, whose colleague is a language model that reads a reference.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.core.procedural import Attempt, Drawn, digest
from rewards.code.sandboxed_reward import program_of
from rewards.sandbox.calls import FunctionCall, call_all
from rewards.sandbox.run import Bounds
from rlhf.data import Task
from rlhf.settings import STRICT

Form = Literal["times", "plus", "always"]
_NAMES = (("fee", "weight"), ("price", "pieces"), ("fare", "distance"), ("bonus", "points"), ("rent", "days"))
_FORMS: tuple[Form, ...] = ("times", "plus", "always")
_QUESTIONS = ("above", "at", "below", "limit")
_ASK = re.compile(r"^ask\W+(\w+)")
_UNKNOWN = (
    "Unknown action. Write 'ask limit', 'ask at', 'ask below', 'ask above', or the function, which ends the talk."
)


@plain_dataclass(frozen=True)
class Wanted:
    """A function as the colleague has it in mind.

    Attributes:
        name, argument: of the function.
        limit: where its two parts meet.
        is_above: whether the limit itself belongs to the upper part.
        below, above: form of each part, and its number.
    """

    name: str
    argument: str
    limit: int
    is_above: bool
    below: tuple[Form, int]
    above: tuple[Form, int]

    def value(self, x: int) -> int:
        """Value of the function."""
        form, n = self.above if x > self.limit or (x == self.limit and self.is_above) else self.below
        return {"times": n * x, "plus": x + n, "always": n}[form]

    def program(self) -> str:
        """The function in one line."""
        sign, x = ">=" if self.is_above else ">", self.argument
        parts = {"times": "{n} * {x}", "plus": "{x} + {n}", "always": "{n}"}
        upper, lower = (parts[form].format(n=n, x=x) for form, n in (self.above, self.below))
        return f"def {self.name}({x}): return {upper} if {x} {sign} {self.limit} else {lower}"

    def told(self, question: str) -> str:
        """The colleague's answer."""
        if question == "limit":
            return f"The limit is {self.limit}."
        if question == "at":
            return f"The limit itself counts as {'above' if self.is_above else 'below'}."
        form, n = self.above if question == "above" else self.below
        said = {"times": f"{n} times {self.argument}", "plus": f"{self.argument} plus {n}", "always": f"always {n}"}
        return f"{question.capitalize()} the limit it is {said[form]}."


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Colleague(Drawn):
    """Write a Python function by asking a colleague what it should do; runs in the sandbox."""

    max_limit: Annotated[int, Field(ge=10, le=1000)] = 50
    """Highest limit."""
    max_steps: Annotated[int, Field(ge=2)] = 6
    """Questions, and the program."""
    cpu_s: Annotated[float, Field(gt=0, le=60)] = 4.0
    """Processor time of the program."""

    name: ClassVar[str] = "colleague"

    @property
    def properties(self) -> Properties:
        """Properties: the step that runs the program starts a process, so it runs in a thread."""
        return replace(super().properties, inline=False)

    @property
    def level(self) -> str:
        """Level: the highest limit."""
        return str(self.max_limit)

    def draw(self, rng: random.Random) -> Wanted:
        """Draw two parts that differ where they meet."""
        while True:
            below, above = ((rng.choice(_FORMS), rng.randint(2, 9)) for _ in range(2))
            made = Wanted(*rng.choice(_NAMES), rng.randint(5, self.max_limit), rng.random() < 0.5, below, above)
            if replace(made, is_above=not made.is_above).value(made.limit) != made.value(made.limit):
                return made

    def told(self, instance: Wanted) -> str:
        """The function by what it does: none is in two splits, whatever it is called."""
        return repr((instance.limit, instance.is_above, instance.below, instance.above))

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split; the reference is the function, for privileged critics."""
        return [replace(task, reference=self.instance(task).program()) for task in super().tasks(split)]

    def start(self, task: Task) -> ColleagueEpisode:
        """Begin one attempt at a task."""
        return ColleagueEpisode(self.instance(task), self)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Ask what was not asked yet, as far as there are steps, and write the function; None after another one."""
        wanted: Wanted = self.instance(task)
        written = [_written(action) for action in taken if _written(action)]
        if written:
            return () if written[0] == wanted.program() else None
        left = [f"ask {one}" for one in _QUESTIONS if f"ask {one}" not in taken]
        n = self.max_steps - len(taken) - 1
        return None if n < 0 else (*left[:n], wanted.program())


class ColleagueEpisode(Attempt):
    """One attempt: questions, and a program that is run on hidden calls. The score is the share of correct results."""

    def __init__(self, wanted: Wanted, settings: Colleague) -> None:
        super().__init__(settings.max_steps)
        self._wanted, self._settings, self._name = wanted, settings, digest(repr(wanted))
        self.asked = set[str]()
        self._share = 0.0
        self.opening = self.opened(
            f"Write the Python function {wanted.name}({wanted.argument}). Your colleague knows what it should return. "
            "Write 'ask limit', 'ask at', 'ask below' or 'ask above', then the function, which ends the talk."
        )

    async def step(self, action: str) -> StepResult:
        """Do one action; a program runs before it is answered."""
        if not self.over and (program := _written(action)):
            self._share = await self._right(program)
        return self.act(action)

    async def _right(self, program: str) -> float:
        """Share of the calls whose value is right: around the limit, and far from it."""
        limit = self._wanted.limit
        given = (0, limit // 2, limit - 1, limit, limit + 1, 2 * limit, 3 * limit + 1)
        bounds = Bounds(cpu_s=self._settings.cpu_s, wall_s=2 * self._settings.cpu_s)
        returned = await call_all(program, [FunctionCall(self._wanted.name, (x,)) for x in given], bounds)
        same = [_is(one.coded, self._wanted.value(x)) for x, one in zip(given, returned, strict=True)]
        return sum(same) / len(same)

    def do(self, action: str) -> tuple[str, bool]:
        """Answer a question, or end with a program."""
        if _written(action):
            self.done, self.score, self.solved = True, self._share, self._share == 1.0
            return f"{self._share:.0%} of the calls returned what they should.", True
        said = action.strip().rpartition("\n")[2]  # a reply that argues first asks in its last line
        asked = _ASK.match(said.strip(" <>\"'`.").casefold())
        if asked is None or asked[1] not in _QUESTIONS:
            return _UNKNOWN, False
        self.asked.add(asked[1])
        return self._wanted.told(asked[1]), True

    def state(self) -> str:
        """Return the task, what was asked, and whether a program was written."""
        return f"{self._name}/{','.join(sorted(self.asked))}{f'/{self.score}' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Nothing can be listed: a program may be anything."""
        return ()


def _written(action: str) -> str:
    """The program of an action: a block, or what begins with `def`; empty where there is none."""
    return program_of(action) or (action.strip() if action.strip().startswith("def ") else "")


def _is(coded: str, right: int) -> bool:
    """True if a value as JSON is that number, as an int or a float."""
    return coded in (str(right), f"{right}.0")
