"""Reason for Future, Act for Now (RAFA): plan by imagined rollouts, take the first step.

Source: RAFA, arXiv 2309.17382.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.chat import ChatAgent
from agents.memory.base import as_text
from agents.memory.full import FullHistory
from agents.parsing import split_thoughts
from rlhf.data import Action, Generation, Message, Role
from rlhf.settings import STRICT

#: Roles of the calls: which actions there are, what one of them would lead to, and how good that would be.
PROPOSE, IMAGINE, VALUE = "propose", "imagine", "value"
#: Note of the actions that the best imagined future begins with.
PLANNED = "planned"

_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MOST = 10.0


@plain_dataclass(frozen=True, slots=True)
class Future:
    """Actions, and what the policy thinks they lead to.

    Attributes:
        steps: (action, imagined reply) from now on.
        value: of where they lead, between 0 and 1; 0 while nobody has asked.
    """

    steps: tuple[tuple[str, str], ...] = ()
    value: float = 0.0

    @property
    def text(self) -> str:
        """Text of the imagined future."""
        return "".join(f"\n> {action}\n{imagined}" for action, imagined in self.steps)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasonForFuture:
    """Plans by simulation in each turn (RAFA), and takes the first action of the best plan.

    One policy has three parts. It proposes at most B actions, says what each would lead to, and says how good the state
    that comes of it is, from 0 to 10. A beam search keeps the best B futures of each length up to U; of equals the one
    that was thought of first. What was really done and seen stands before all of it, and nothing imagined outlives its
    turn but a note of the plan.

    With B = U = 2 there are at most 2 + 4 = 6 imagined steps in a turn, and 13 calls: 3 that propose, 6 that imagine, 4
    that value the ends. In general a turn makes at most `max_calls` of them, which `limits.max_generations_per_turn`
    has to allow. A value that cannot be read counts as 0. Where no action is proposed, the turn is invalid, and the
    policy reads why.

    The paper goes on with a plan until enough has been learnt; here every turn has a new one, as in its experiments.
    """

    #: Roles that its calls can have.
    roles: ClassVar[tuple[str, ...]] = (PROPOSE, IMAGINE, VALUE)

    executor: ChatAgent = Field(default_factory=ChatAgent)
    """Executor of actions: the keys of an agent of kind `chat`, with the memory `full`."""
    breadth: Annotated[int, Field(ge=1, le=16)] = 2
    """B, the actions that are proposed in a state, and the futures that are kept."""
    depth: Annotated[int, Field(ge=1, le=8)] = 2
    """U, the steps that are imagined."""
    ask_propose: str = "Name up to {n} different actions that could be taken now, each on a line of its own."
    """Prompt for candidate actions; `{n}` stands for B."""
    ask_imagine: str = "What will be seen after that action? Answer with the observation alone."
    """Prompt for an imagined observation."""
    ask_value: str = "How good is it to be here, from 0 (hopeless) to 10 (done)? Answer with a number."
    """Prompt for a value."""
    max_imagined_chars: Annotated[int, Field(ge=1)] = 400
    """Longest imagined observation; what goes beyond is cut."""

    def __post_init__(self) -> None:
        """Refuse a memory that would not be asked, and thoughts that are gone where proposals are read."""
        if self.executor.think == "require":
            raise ValueError(
                "executor.think is require, expected off: proposals are read line by line, without thoughts"
            )
        if not isinstance(self.executor.memory, FullHistory):
            raise ValueError("executor.memory is another than full, expected full: rafa shows all executed turns")

    @property
    def max_calls(self) -> int:
        """Most calls of the policy in one turn."""
        n_states, calls = 1, 0
        for level in range(self.depth):
            grown = n_states * self.breadth
            is_valued = level == self.depth - 1 or grown > self.breadth
            calls += n_states + grown + grown * is_valued
            n_states = min(grown, self.breadth)
        return calls

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Plan, and take the first action of the plan."""
        turn = _Turn(self, history, policy)
        best = await turn.best()
        if not best.steps:
            return Action("", tuple(turn.generations), turn.problem)
        planned = ", ".join(action for action, _ in best.steps)
        return Action(best.steps[0][0], tuple(turn.generations), notes={PLANNED: f"{planned} ({best.value:.2g})"})


class _Turn:
    """The search of one turn."""

    def __init__(self, agent: ReasonForFuture, history: History, policy: PolicyHandle) -> None:
        self._agent, self._history, self._policy = agent, history, policy
        past = agent.executor.past(history)
        self._known = "\n".join(filter(None, [as_text(past[:-1]), past[-1].observation]))
        self.generations: list[Generation] = []
        self.problem = ""

    async def best(self) -> Future:
        """Return the best future; one without steps where the policy proposes nothing."""
        n, depth = self._agent.breadth, self._agent.depth
        beam = [Future()]
        for level in range(depth):
            grown = [await self._imagined(f, action) for f in beam for action in await self._proposed(f)]
            if not grown:
                break
            if level == depth - 1 or len(grown) > n:
                grown = [await self._valued(future) for future in grown]
            beam = sorted(grown, key=lambda future: -future.value)[:n]  # stable: of equals, the one thought of first
        return beam[0]

    async def _proposed(self, future: Future) -> list[str]:
        """Up to B different actions; none where nothing that was said can be read as one."""
        reader, is_now = self._agent.executor, not future.steps
        possible = self._history.admissible_actions if is_now else ()
        said = await self._said(future.text, self._agent.ask_propose.replace("{n}", str(self._agent.breadth)), PROPOSE)
        read = [reader.read(_BULLET.sub("", line), possible) for line in said.splitlines() if line.strip()]
        found = list(dict.fromkeys(parsed.text for parsed in read if parsed.error is None))
        if is_now and not found:
            self.problem = (read[0] if read else reader.read("", possible)).error or "No action was taken."
        return found[: self._agent.breadth]

    async def _imagined(self, future: Future, action: str) -> Future:
        said = await self._said(f"{future.text}\n> {action}", self._agent.ask_imagine, IMAGINE)
        return Future((*future.steps, (action, said[: self._agent.max_imagined_chars])))

    async def _valued(self, future: Future) -> Future:
        found = _NUMBER.search(await self._said(future.text, self._agent.ask_value, VALUE))
        value = float(found[0]) / _MOST if found else 0.0
        return Future(future.steps, value if value <= 1 else 0.0)

    async def _said(self, imagined: str, ask: str, role: str) -> str:
        system = self._agent.executor.system
        shown: Sequence[Message] = (
            *((Message(Role.SYSTEM, system),) if system else ()),
            *self._history.task.messages,
            Message(Role.USER, f"{self._known}{imagined}\n\n{ask}"),
        )
        reply = await self._policy.generate(shown, role=role)
        self.generations.append(reply.generation)
        return split_thoughts(reply.text).answer.strip()
