"""A team that the policy builds for each task, role by role and link by link, and that works along its links.

Source: MasHost, arXiv 2506.08507, in which a policy grows a directed graph of agents; HRPO trains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Agent, Capabilities, History, PolicyHandle
from agents.chat import ChatAgent
from agents.composition import refuse_outermost, view_of, with_observation
from agents.memory.base import as_text
from agents.parsing import split_thoughts
from rlhf.checking import CheckContext
from rlhf.data import Action, Generation, Message, Role
from rlhf.settings import STRICT

#: Roles of the calls that build the team, and of its members; the last member acts as the recipe's `actor` does.
BUILD, MEMBER = "build", "member"
#: Note of the team, on the turn that built it: one edit a line, as it was understood.
TEAM = "team"

_ADD = re.compile(r"^\W*add\s+([\w-]{1,30})\s*:\s*(.+)$", re.IGNORECASE)
_LINK = re.compile(r"^\W*link\s+([\w-]{1,30})\s*->\s*([\w-]{1,30})\W*$", re.IGNORECASE)
_DONE = re.compile(r"^\W*done\W*$", re.IGNORECASE)


@plain_dataclass
class Graph:
    """Roles and links of a team, without cycles.

    Attributes:
        roles: name and instruction of each, in the order they were added.
        links: who is read by whom.
        edits: as they were understood, a line each.
    """

    roles: dict[str, str] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)
    edits: list[str] = field(default_factory=list)

    def edit(self, line: str, most: int) -> str:
        """Make the edit that `line` names; returns what is wrong with it, empty where nothing is."""
        if found := _ADD.match(line):
            name, instruction = found[1].lower(), " ".join(found[2].split())
            if name in self.roles:
                return f"There is a role {name} already."
            if len(self.roles) == most:
                return f"There are {most} roles, and no more may be."
            self.roles[name] = instruction
            self.edits.append(f"add {name}: {instruction}")
            return ""
        if found := _LINK.match(line):
            first, second = found[1].lower(), found[2].lower()
            if missing := [name for name in (first, second) if name not in self.roles]:
                return f"There is no role {missing[0]}."
            if first in self._after(second) or (first, second) in self.links:
                return "That link is there already." if (first, second) in self.links else "That would be a cycle."
            self.links.append((first, second))
            self.edits.append(f"link {first} -> {second}")
            return ""
        return "Write 'add NAME: INSTRUCTION', 'link NAME -> NAME' or 'done'."

    def _after(self, name: str) -> set[str]:
        """Return `name` and all that hear of it, by whatever way."""
        found, new = set[str](), {name}
        while new:
            found |= new
            new = {b for a, b in self.links if a in new} - found
        return found

    def order(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Give each role and those that it reads, after all of these; of equals, the one that was added first."""
        left = dict(self.roles)
        while left:
            name = next(n for n in left if not any(b == n and a in left for a, b in self.links))
            del left[name]
            yield name, tuple(a for a in self.roles if (a, name) in self.links)

    @property
    def last(self) -> tuple[str, ...]:
        """Roles that nobody reads but the actor."""
        return tuple(name for name in self.roles if all(a != name for a, _ in self.links))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Team:
    """Has the policy grow a graph of roles for the task, then lets them speak in the order of its links each turn.

    Before the first action the policy makes one edit a call: `add NAME: INSTRUCTION`, `link NAME -> NAME`, `done`. An
    edit that cannot be made, such as one that closes a cycle, is answered in the next call and counts. Then, in every
    turn, each role reads its instruction, what has happened, and what the roles that are linked to it say; `actor`
    reads what the last ones say behind its observation, and acts. Without a role it acts alone.

    The team is a note of the turn that built it, so that episodes can be replayed. Calls have the roles `build`,
    `member`, and those of the actor: `train_roles: [build]` trains the graph alone, `advantage: {kind: hrpo}` with the
    reward `team_cost` charges each edit as it is made.
    """

    actor: Agent = Field(default_factory=ChatAgent)
    """Agent that acts: of any kind, by default `chat`."""
    build_system: str = "You build a team of experts that advise an agent. Make it as small as the task allows."
    """Instruction of the calls that build. Empty: no system message at all."""
    ask: str = "Next edit (add NAME: INSTRUCTION, link NAME -> NAME, or done):"
    """The last line of what they are shown."""
    max_roles: Annotated[int, Field(ge=1, le=16)] = 4
    """Most roles of a team."""
    max_edits: Annotated[int, Field(ge=1, le=64)] = 8
    """Calls that build it; then it is as it is."""
    max_chars: Annotated[int, Field(ge=1)] = 300
    """Longest edit, and longest word of a member; what goes beyond is cut."""

    names: ClassVar[tuple[str, ...]] = (BUILD, MEMBER)

    def __post_init__(self) -> None:
        """Refuse an actor that acts in no other agent."""
        refuse_outermost("actor", self.actor)

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about turns that may need more calls than the limits allow."""
        most, allowed = self.max_edits + self.max_roles + 1, context.recipe.limits.max_generations_per_turn
        if context.parent is None and most > allowed:
            yield f"agent: a team may take {most} calls in its first turn, limits.max_generations_per_turn is {allowed}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs of a demonstration besides actions: those of the actor."""
        return tuple(Capabilities(self.actor).needs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that its calls can have; none where the actor does not say its own."""
        inner = tuple(Capabilities(self.actor).roles)
        return (*self.names, *inner) if inner else ()

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Build the team where there is none yet, hear its members, and act."""
        generations: list[Generation] = []
        notes = [turn.action.notes[TEAM] for turn in history.turns if TEAM in turn.action.notes]
        graph, is_new = Graph(), not notes
        for line in notes[0].splitlines() if notes else ():
            graph.edit(line, self.max_roles)
        if is_new:
            await self._build(graph, history, policy, generations)
        advice = await self._advice(graph, history, policy, generations)
        told = with_observation(history, "\n".join([history.observation, *advice])) if advice else history
        action = await self.actor.act(told, policy)
        left = {**action.notes, TEAM: "\n".join(graph.edits)} if is_new else action.notes
        return replace(action, generations=(*generations, *action.generations), notes=left)

    async def _build(self, graph: Graph, history: History, policy: PolicyHandle, generations: list[Generation]) -> None:
        wrong = ""
        for _ in range(self.max_edits):
            question = "\n".join(filter(None, [history.opening, *graph.edits, wrong, self.ask]))
            said = await self._say(self.build_system, question, BUILD, history, policy, generations)
            if _DONE.match(said):
                return
            wrong = graph.edit(said, self.max_roles)

    async def _advice(
        self, graph: Graph, history: History, policy: PolicyHandle, generations: list[Generation]
    ) -> list[str]:
        """Messages of the last members, after hearing the others."""
        past = view_of(self.actor).past(history)
        known = "\n".join(filter(None, [as_text(past[:-1]), past[-1].observation]))
        said: dict[str, str] = {}
        for name, reads in graph.order():
            question = "\n".join([known, *(f"{other}: {said[other]}" for other in reads), f"{name}:"])
            said[name] = await self._say(graph.roles[name], question, MEMBER, history, policy, generations)
        return [f"{name}: {said[name]}" for name in graph.last]

    async def _say(
        self,
        system: str,
        question: str,
        role: str,
        history: History,
        policy: PolicyHandle,
        generations: list[Generation],
    ) -> str:
        first: Sequence[Message] = (Message(Role.SYSTEM, system),) if system else ()
        shown = (*first, *history.task.messages, Message(Role.USER, question))
        reply = await policy.generate(shown, role=role)
        generations.append(reply.generation)
        return " ".join(split_thoughts(reply.text).answer.split())[: self.max_chars]
