"""A planner that names subgoals and an executor that pursues them: one policy, two prompts.

Sources: GLIDER, arXiv 2505.19761; EPO, arXiv 2408.16090; options: Sutton, Precup, Singh, 1999.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Agent, Capabilities, History, PolicyHandle
from agents.chat import PASSED_ON, ChatAgent
from agents.composition import refuse_outermost, since, view_of, written
from agents.memory.base import DemonstrationInputs, Exchange
from agents.memory.subgoals import SUBGOAL, Subgoals
from agents.parsing import split_thoughts
from rlhf.checking import CheckContext
from rlhf.data import Action, Generation, Message, Role
from rlhf.settings import STRICT

#: Role of a call that names a subgoal; see `Generation.role`.
PLAN = "plan"
#: Note of how the subgoal before ended, on the turn in which the next is named; a line each, as the subgoals have,
#: where a turn names several.
ENDED = "subgoal ended"
#: How a subgoal ended that the executor called done; others ran out of turns.
REACHED = "done"


@plain_dataclass(frozen=True, slots=True)
class Pursued:
    """A subgoal that was, or is being, pursued.

    Attributes:
        subgoal: the planner's words.
        first: the turn in which it was named.
        ended: how it ended; empty while it is pursued.
    """

    subgoal: str
    first: int
    ended: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PlannerExecutor:
    """Asks for a subgoal, then for actions towards it until it ends, then for the next.

    A subgoal ends when the executor says so (the action `done`), or after `max_turns_per_subgoal` turns. The planner is
    shown the opening, every subgoal so far with how it ended, and the newest observation. The executor is shown what
    `executor` shows of the turns since the subgoal was named, with the subgoal in front: it knows nothing of the rest.

    The calls that name subgoals have the role `plan`, which `advantage: {kind: two_level}` goes by.
    """

    executor: Agent = Field(default_factory=ChatAgent)
    """Executor of subgoals: an agent of any kind that names none itself; by default `chat`. One that is not of that
    kind acts as in an episode that began when the subgoal was named."""
    plan_system: str = "You plan for an agent in a text environment. Name the next subgoal, on one line."
    """Instruction of the planner. Empty: no system message at all."""
    ask: str = "Next subgoal:"
    """The last line of what the planner is shown."""
    done: Annotated[str, Field(min_length=1)] = "done"
    """The action by which the executor ends a subgoal; the environment never sees it."""
    show_ends: bool = False
    """Show the planner the observation in which each subgoal ended: a recipe that was read."""
    show_opening: bool = True
    """Show the executor the opening too."""
    max_turns_per_subgoal: Annotated[int, Field(ge=1)] = 8
    """Turns after which a subgoal is ended."""
    max_plans_per_turn: Annotated[int, Field(ge=1)] = 2
    """Subgoals that may be named in one turn; saying `done` to the last of them is an error."""
    max_subgoal_chars: Annotated[int, Field(ge=1)] = 200
    """Longest subgoal; what goes beyond is cut."""

    def __post_init__(self) -> None:
        """Refuse a second voice that names subgoals."""
        refuse_outermost("executor", self.executor)
        if isinstance(self.executor, ChatAgent) and isinstance(self.executor.memory, Subgoals):
            raise ValueError(
                "executor.memory is of kind subgoals, expected another: here the planner names them, and the executor "
                "is shown the turns of the present one"
            )
        if "subgoal" in Capabilities(self.executor).needs:
            raise ValueError(f"executor is {type(self.executor).__name__}, which names subgoals too; expected another")

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about turns that may need more calls than the limits allow."""
        n, allowed = self.max_plans_per_turn, context.recipe.limits.max_generations_per_turn
        most = 2 * n + 1  # an executor that says done, then a plan and a word of the executor for each
        if context.parent is None and most > allowed:
            calls = f"{most} calls in a turn, limits.max_generations_per_turn is {allowed}"
            yield f"agent.max_plans_per_turn {n} may take {calls}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs of a demonstration besides actions."""
        return tuple(dict.fromkeys(("subgoal", *Capabilities(self.executor).needs)))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that its calls can have; none where the executor does not say its own."""
        inner = tuple(Capabilities(self.executor).roles)
        return (PLAN, *inner) if inner else ()

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Name a subgoal where there is none, then choose an action towards it."""
        pursued = self.pursued(history)
        past = view_of(self.executor).past(history)
        generations: list[Generation] = []
        named: list[str] = []
        ended: list[str] = []
        n_done = 0
        while True:
            if not pursued or pursued[-1].ended:
                ended += [p.ended for p in pursued[-1:]]
                subgoal, generation = await self._plan(history, pursued, past, policy)
                generations.append(generation)
                named.append(subgoal)
                pursued = [*pursued, Pursued(subgoal, len(history.turns))]
            action = await self._execute(history, past, pursued[-1], policy)
            generations += action.generations
            notes = {name: "\n".join(lines) for name, lines in ((SUBGOAL, named), (ENDED, ended)) if lines}
            if action.error is not None or not self._is_done(action.text):
                return replace(action, generations=tuple(generations), notes=notes | dict(action.notes))
            n_done += 1
            if len(named) == self.max_plans_per_turn:
                break
            pursued = [*pursued[:-1], replace(pursued[-1], ended=REACHED)]
        times = "once" if n_done == 1 else f"{n_done} times"
        error = f"No action was taken: '{self.done}' was said {times}. Say what to do."
        return Action("", tuple(generations), error, notes)

    def pursued(self, history: History) -> list[Pursued]:
        """Every subgoal so far, the last one ended if its limit is reached."""
        found: list[Pursued] = []
        for t, turn in enumerate(history.turns):
            notes = turn.action.notes
            named, ended = (notes[name].split("\n") if name in notes else [] for name in (SUBGOAL, ENDED))
            for subgoal in named:
                if found:
                    found[-1] = replace(found[-1], ended=ended.pop(0) if ended else REACHED)
                found.append(Pursued(subgoal, t))
        if found and len(history.turns) - found[-1].first >= self.max_turns_per_subgoal:
            found[-1] = replace(found[-1], ended="out of turns")
        return found

    def write(self, shown: DemonstrationInputs) -> str:
        """Demonstrated reply: a subgoal, an action, or `done` where the subgoal is reached."""
        if shown.role == PLAN:
            return shown.subgoal or "go on"
        is_reached = bool(shown.before) and shown.subgoal != shown.before and not shown.n_calls
        return written("executor", self.executor, replace(shown, action=self.done) if is_reached else shown)

    async def _plan(
        self, history: History, pursued: Sequence[Pursued], past: Sequence[Exchange], policy: PolicyHandle
    ) -> tuple[str, Generation]:
        lines = [history.opening]
        for i, one in enumerate(pursued):
            lines.append(f"{i + 1}. {one.subgoal}: {one.ended}")
            if self.show_ends and i + 1 < len(pursued) and pursued[i + 1].first > one.first:
                lines.append(past[pursued[i + 1].first].said)
        lines += [past[-1].observation] if history.turns else []
        system = (Message(Role.SYSTEM, self.plan_system),) if self.plan_system else ()
        question = Message(Role.USER, "\n".join([*lines, self.ask]))
        reply = await policy.generate((*system, *history.task.messages, question), role=PLAN)
        said = " ".join(split_thoughts(reply.text).answer.split())[: self.max_subgoal_chars]
        return said or "(none)", reply.generation

    async def _execute(
        self, history: History, past: Sequence[Exchange], pursued: Pursued, policy: PolicyHandle
    ) -> Action:
        """Ask for an action, given the subgoal and the turns since it was named."""
        info = {**history.task.info, PASSED_ON: {self.done.casefold(): "the subgoal is reached"}}
        history = replace(history, task=replace(history.task, info=info))
        first = past[pursued.first]
        opening = [history.opening] if self.show_opening and pursued.first else []
        text, said = (
            "\n".join([*opening, f"Subgoal: {pursued.subgoal}", now]) for now in (first.observation, first.said)
        )
        if not isinstance(self.executor, ChatAgent):
            return await self.executor.act(since(history, pursued.first, said), policy)
        shown = (Exchange(text, said, first.reply, first.action, first.notes), *past[pursued.first + 1 :])
        return await self.executor.act_on(shown, history, policy)

    def _is_done(self, text: str) -> bool:
        return text.casefold().strip(" .!") == self.done.casefold()
