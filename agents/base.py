"""The contract of an agent: how a policy is asked to act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import Action, Generation, Message, Role, Task, Turn


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the policy to one call.

    Attributes:
        text: decoded for reading and parsing; never tokenised again.
        generation: ids and log-probs as sampled.
    """

    text: str
    generation: Generation

    @property
    def message(self) -> Message:
        """The reply as a message for a later prompt, carrying the sampled ids."""
        return Message(Role.ASSISTANT, self.text, self.generation.token_ids)


@runtime_checkable
class PolicyHandle(Protocol):
    """The policy as one episode sees it."""

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Render `messages` and sample one reply.

        Args:
            messages: the prompt.
            max_tokens: limit on new tokens, beside the recipe's.
            role: what is asked for; stays with the generation, and tells a demonstration what to answer.
            tools: definitions of functions for a chat template that knows `tools`; plain JSON values.

        Raises:
            EngineError: the engine failed; ContextFull when the prompt leaves no room.
            AgentError: too many calls in one turn.
            DataError: tools for a template that does not know them.
        """

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Length of the prompt that `messages` make."""


@dataclass(frozen=True, slots=True)
class History:
    """Past of an episode, as an agent may read it when it acts.

    Attributes:
        task: with `reference` removed.
        opening: the environment's first observation.
        turns: finished turns, oldest first.
        admissible_actions: actions possible now; empty where the environment cannot list them.
    """

    task: Task
    opening: str
    turns: tuple[Turn, ...] = ()
    admissible_actions: tuple[str, ...] = ()
    admissible_before: tuple[tuple[str, ...], ...] = ()
    """`[K]` the lists shown before each finished turn, so that an agent can rebuild its earlier prompts exactly."""
    seats: tuple[str, ...] = ()
    """`[K + 1]` who had each finished turn, and who has the next; empty names where there is one player."""

    @property
    def observation(self) -> str:
        """The newest thing the environment said."""
        return self.turns[-1].reply if self.turns else self.opening


@runtime_checkable
class Agent(Protocol):
    """Turns a history into an action. A frozen dataclass: its fields are its recipe keys.

    `Capabilities` below lists the attributes that it may have beside.
    """

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Choose the next action; may call the policy more than once."""


class Capabilities(CapabilityView):
    """Optional attributes and methods of an agent, with a default for each that it leaves out."""

    needs = Capability[Sequence[str]](())
    """Names of what a demonstration has to show beside actions, such as `recall` and `subgoal`."""
    needs_tools = Capability[object](False)
    """True if it needs an environment with an attribute `tools`."""
    roles = Capability[Sequence[str]](())
    """Roles that its calls can have; empty where it does not say."""
    plays_seats = Capability(False, bool)
    """True if it plays several seats of one game."""
    is_outermost = Capability(False, bool)
    """True if it stands in no other agent, because it is given something that only the outermost one is."""
    is_outside = Capability(False, bool)
    """True if it speaks for a program that its environment starts, and acts in no other."""
    write = Capability[Callable[..., Any] | None](None, Callable)
    """Writes the reply that a demonstration gives; None where it cannot be demonstrated to."""
