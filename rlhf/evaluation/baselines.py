"""Model-free baseline policies: oracles and programs, and the engine that stands in for a model.

They are played by the same episodes as models are. What chance needs is drawn by an engine from the seed of the call,
so that it is a function of seed, task, attempt and turn, as what a model samples is.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agents.base import History, PolicyHandle
from environments.base import Capabilities, Environment, Properties, can_demonstrate, properties_of
from rlhf.data import (
    Action,
    Finish,
    Generation,
    Message,
    PolicyWeights,
    Prompt,
    Role,
    SamplingParams,
    Task,
    WeightsForm,
)
from rlhf.errors import DeliveryError, EngineError, RecipeError
from rlhf.rollout.renderer import Renderer

_BITS = 31


class MessageIdRenderer(Renderer):
    """Renderer for text-only endpoints: one pseudo-token id per message.

    What is stored of a trajectory then holds one id for each message, and its text where the environment or the agent
    said it. Ids are given in the order in which messages are met, so they mean nothing outside their process.
    """

    tells_tokens = has_lasting_ids = False

    def __init__(self) -> None:
        self.stop_ids, self.opens_thinking, self.knows_tools = (), False, True
        self._ids: dict[tuple[Role | None, str], int] = {}
        self._messages: list[Message] = []
        self._tools: dict[int, Sequence[Mapping[str, Any]]] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), role: str = "") -> Prompt:
        """Prompt with one id per message, after one for the tools; sampled replies keep their sampled ids."""
        ids = [i for m in messages for i in (m.token_ids or (self.id_of(m.role, m.content),))]
        if tools:
            first = self._id_of(None, Message(Role.SYSTEM, json.dumps(list(tools))))
            self._tools[first] = tools
            ids.insert(0, first)
        return Prompt(tuple(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the messages."""
        return "\n".join(m.content for m in self.messages(ids))

    def reply_text(self, ids: Sequence[int]) -> str:
        """Text of a reply."""
        return self.decode(ids)

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """The id of a reply."""
        return (self.id_of(Role.ASSISTANT, text),)

    def messages(self, ids: Iterable[int]) -> list[Message]:
        """The messages that `ids` stand for."""
        return [self._messages[i] for i in ids if i not in self._tools]

    def tools(self, ids: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """The tools of a prompt; none where it has none."""
        return self._tools.get(ids[0], ()) if ids else ()

    def id_of(self, role: Role, text: str) -> int:
        """The id of a message; a new one where it was never met."""
        return self._id_of(role, Message(role, text))

    def _id_of(self, role: Role | None, message: Message) -> int:
        """The id of a message; tools have no role, so that no message is taken for them."""
        found = self._ids.setdefault((role, message.content), len(self._messages))
        if found == len(self._messages):
            self._messages.append(message)
        return found


class StubEngine:
    """Base of engines without a model."""

    policy_version = 0
    weights_form: WeightsForm = "shared"
    shares_policy = False
    max_context = 1 << 40

    async def release(self, session: str) -> None:
        """Nothing is kept."""

    async def load(self, weights: PolicyWeights) -> None:
        """Refuse. Raises DeliveryError."""
        raise DeliveryError("this baseline has no model to load weights into", where=type(self).__name__)

    async def close(self) -> None:
        """Nothing is open."""


class RandomSeedEngine(StubEngine):
    """Engine of random play: a generation is one number below 2^31, drawn from the seed of the call."""

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Draw."""
        number = random.Random(params.seed).getrandbits(_BITS)
        return Generation(prompt, (number,), (-_BITS * math.log(2),), Finish.STOP, 0)


class RefusingEngine(StubEngine):
    """Engine for agents evaluated without a model: every request is refused."""

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Refuse. Raises EngineError."""
        raise EngineError(
            "this agent calls a model, and none is given",
            where="policy.generate",
            hint="give a model beside the agent: --endpoint URL --model NAME",
        )


class RandomSeedRenderer(MessageIdRenderer):
    """Renderer of `RandomSeedEngine`: prompts are ignored, replies are numbers."""

    has_lasting_ids = True

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), role: str = "") -> Prompt:
        """Always the same."""
        return Prompt((0,))

    def decode(self, ids: Sequence[int]) -> str:
        """Numbers as they are."""
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class OracleEnvironment:
    """Environment wrapper whose oracle plans where the episode's own calls run, or before.

    Attributes:
        inner: the environment; it has a method `plan`.
        plans: task -> what its oracle would do.
    """

    inner: Environment
    plans: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not can_demonstrate(self.inner):
            raise RecipeError(
                "this environment has no oracle",
                where="oracle",
                got=type(self.inner).__name__,
                expected="an environment with a method `plan(task, taken)`",
                hint="evaluate `random`, or a model",
            )

    @property
    def properties(self) -> Properties:
        """Properties of the environment."""
        return replace(properties_of(self.inner), inline=self.inline)

    @property
    def inline(self) -> bool:
        """True if calls run on the event loop, planning among them, which outlasts a step."""
        return Capabilities(self.inner).is_inline

    @property
    def keeps_limits(self) -> bool:
        """True if the environment limits its own calls."""
        return Capabilities(self.inner).keeps_limits

    @property
    def max_episodes(self) -> int | None:
        """Maximal number of episodes alive at a time."""
        return Capabilities(self.inner).max_episodes

    def tasks(self, split: str) -> Iterable[Task]:
        """Tasks of the environment."""
        return self.inner.tasks(split)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Plan before episodes begin, where planning would stall all others on their clocks.

        That is so where processes serve the environment. What fails here fails again as its episode starts, which then
        says so.
        """
        for task in tasks if self.keeps_limits else ():
            with suppress(Exception):
                self._plan(task)

    def start(self, task: Task) -> Any:
        """Plan where that is not done, and begin one attempt."""
        self._plan(task)
        return self.inner.start(task)

    def _plan(self, task: Task) -> None:
        if task.id not in self.plans:
            planner: Any = self.inner
            self.plans[task.id] = tuple(planner.plan(task, []) or ())


@dataclass(frozen=True)
class OracleAgent:
    """Agent that follows the oracle of a `OracleEnvironment` environment; an invalid action where the plan ends."""

    environment: OracleEnvironment

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Take the next action of the plan."""
        plan, done = self.environment.plans[history.task.id], len(history.turns)
        return Action(plan[done]) if done < len(plan) else Action("", error="The oracle knows no way on.")
