"""Actor-critic agent: a critic reviews each proposed action; one policy, two prompts.

Sources: Self-Refine, arXiv 2303.17651; a critic that is trained, by reinforcement, to judge what an actor says: CTRL,
arXiv 2502.03492.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Agent, Capabilities, History, PolicyHandle, Reply
from agents.chat import ChatAgent
from agents.composition import refuse_outermost, view_of, with_observation, written
from agents.memory.base import DemonstrationInputs, Exchange, MemoryBase, as_text
from agents.parsing import split_thoughts
from agents.policy_proxy import PolicyProxy
from rlhf.checking import CheckContext
from rlhf.data import Action, Finish, Generation, Message, Role, Turn
from rlhf.data.generation import calls_of
from rlhf.errors import AgentError
from rlhf.settings import STRICT

#: Roles of the calls; see `Generation.role`.
ACTOR, CRITIC = "actor", "critic"
#: Note of what the critic said, a line for each time it was asked in the turn: one of the three words below.
REVIEW = "review"
ACCEPT, REVISE, UNREAD = "accept", "revise", "unread"
#: Note of what it wanted to be otherwise, a line for each proposal that it sent back.
COMMENT = "comment"

_VERDICT = re.compile(rf"^\W*({ACCEPT}|{REVISE})\b\W*(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorCritic:
    """Agent that asks for an action and lets a critic accept it or return it with a comment.

    The critic is shown the opening, the last turns, the newest observation and the proposed action. The actor then
    reads the comment after its own proposal and proposes again, until the critic accepts, or has been asked
    `max_rounds` times: the actor's last proposal is done. What the critic says and cannot be read sends nothing back.
    What the actor says and cannot be read is not shown to the critic: it is an error that the actor reads in the next
    turn.

    Later turns show what was done and nothing of how it came about. The calls have the roles `actor` and `critic`,
    which `train_roles` of the stage goes by, and `advantage: {kind: reviews}`.
    """

    actor: Agent = Field(default_factory=ChatAgent)
    """Actor: an agent of any kind, by default `chat`, with any memory but `subgoals`, which reads what replies say to
    it. One of another kind reads the comment behind its observation."""
    critic_system: str = (
        "You check what an agent in a text environment is about to do. Accept it, or say what to revise."
    )
    """Instruction of the critic. Empty: no system message at all."""
    ask: str = "Answer 'accept', or 'revise:' and what is wrong with it."
    """The last line of what the critic is shown."""
    revision_message: str = "Not yet: {comment}"
    """Message to the actor when a proposal is returned; `{comment}` stands for the critic's words."""
    show_turns: Annotated[int, Field(ge=0)] = 2
    """Number of last turns shown to the critic, beside the opening and the newest observation."""
    max_rounds: Annotated[int, Field(ge=1)] = 2
    """Maximal reviews in one turn."""
    max_comment_chars: Annotated[int, Field(ge=1)] = 200
    """Longest comment; what goes beyond is cut."""

    def __post_init__(self) -> None:
        """Refuse a memory that reads replies, and a message without the comment."""
        refuse_outermost("actor", self.actor)
        memory = self.actor.memory if isinstance(self.actor, ChatAgent) else None
        if isinstance(memory, MemoryBase) and type(memory).read is not MemoryBase.read:
            raise ValueError(
                f"actor.memory is {type(memory).__name__}, which parses replies; expected another, "
                "such as full or window: a rejected proposal would be stored"
            )
        if "{comment}" not in self.revision_message:
            raise ValueError(f"revision_message is '{self.revision_message}', expected a text with {{comment}} in it")

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about turns that may need more calls than the limits allow."""
        allowed = context.recipe.limits.max_generations_per_turn
        if context.parent is None and self.max_calls > allowed:
            most = f"may take {self.max_calls} calls in a turn"
            yield f"agent.max_rounds {self.max_rounds} {most}, limits.max_generations_per_turn is {allowed}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs of a demonstration besides actions."""
        return tuple(Capabilities(self.actor).needs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that its calls can have; none where the actor does not say its own."""
        inner = tuple(Capabilities(self.actor).roles)
        return (ACTOR, CRITIC, *filter(None, inner)) if inner else ()

    @property
    def max_calls(self) -> int:
        """Most calls in one turn, but for what a memory asks."""
        return 1 + 2 * self.max_rounds

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Propose until the critic accepts, or has been asked often enough."""
        history = replace(history, turns=tuple(map(_as_done, history.turns)))
        past = view_of(self.actor).past(history)
        asked = _Asked(policy)
        action = await self.actor.act(history, asked)
        generations = list(action.generations)
        reviews: list[str] = []
        comments: list[str] = []
        while action.error is None and len(reviews) < self.max_rounds:
            verdict, comment, generation = await self._review(history, past, action, policy)
            generations.append(generation)
            reviews.append(verdict)
            if verdict != REVISE:
                break
            comments.append(comment)
            action = await self._revise(action, comment, history, asked)
            generations += action.generations
        notes = {name: "\n".join(lines) for name, lines in ((REVIEW, reviews), (COMMENT, comments)) if lines}
        return replace(action, generations=tuple(generations), notes={**action.notes, **notes})

    def write(self, shown: DemonstrationInputs) -> str:
        """Write the reply that a demonstration gives: an action, which the critic accepts."""
        if shown.role == CRITIC:
            return ACCEPT
        return written("actor", self.actor, replace(shown, role="") if shown.role == ACTOR else shown)

    async def _review(
        self, history: History, past: Sequence[Exchange], action: Action, policy: PolicyHandle
    ) -> tuple[str, str, Generation]:
        """Ask the critic; returns its verdict, its comment on one line, and the call."""
        first = max(len(past) - 1 - self.show_turns, 0)
        lines = [past[0].said] if first else []
        lines += [as_text(past[first:-1])] if past[first:-1] else []
        lines += [past[-1].observation, f"Proposed: {action.text}", self.ask]
        system = (Message(Role.SYSTEM, self.critic_system),) if self.critic_system else ()
        question = Message(Role.USER, "\n".join(lines))
        reply = await policy.generate((*system, *history.task.messages, question), role=CRITIC)
        found = _VERDICT.match(split_thoughts(reply.text).answer)
        if found is None:
            return UNREAD, "", reply.generation
        comment = " ".join(found[2].split())[: self.max_comment_chars]
        return found[1].lower(), comment or "(no comment)", reply.generation

    async def _revise(self, before: Action, comment: str, history: History, asked: _Asked) -> Action:
        """Ask the actor again, with its proposal and the comment behind what it was shown."""
        told = Message(Role.USER, self.revision_message.replace("{comment}", comment))
        if not isinstance(self.actor, ChatAgent):
            text = f"{history.observation}\nProposed: {before.text}\n{told.content}"
            return await self.actor.act(with_observation(history, text), asked)
        reply = await asked.again(told)
        was_cut = reply.generation.finish is Finish.LENGTH
        parsed = self.actor.parsed(reply.text, split_thoughts(reply.text).answer, history, was_cut)
        return replace(
            before,
            text=parsed.text,
            error=parsed.error,
            parts=parsed.parts,
            reply_text=reply.text,
            generations=(reply.generation,),
        )


@plain_dataclass
class _Asked(PolicyProxy):
    """Policy proxy for the actor: plain calls have its role, and the newest can be continued.

    Attributes:
        messages: of the newest plain call, its answer behind them.
        tools: of that call.
    """

    plain: str = ACTOR
    messages: tuple[Message, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    def received(
        self, reply: Reply, messages: Sequence[Message], role: str, tools: Sequence[Mapping[str, Any]]
    ) -> Reply:
        """Remember a plain call with its answer."""
        if not role:
            self.messages, self.tools = (*messages, reply.message), tools
        return reply

    async def again(self, told: Message) -> Reply:
        """Sample a reply to the message after the newest plain call. Raises AgentError if there was none."""
        if not self.messages:
            raise AgentError("no earlier proposal to revise", where="agent.actor", expected="a call")
        return await self.generate((*self.messages, told), tools=self.tools)


def _as_done(turn: Turn) -> Turn:
    """The turn with the actor's last call alone, which said what was done."""
    calls = [call for call in calls_of(turn.generations) if call[0].role == ACTOR]
    return replace(turn, action=replace(turn.action, generations=calls[-1])) if calls else turn
