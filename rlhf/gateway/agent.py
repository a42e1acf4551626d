"""External agent: the policy answers the requests of a program outside of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle, Reply
from agents.parsing import split_thoughts
from agents.tool_calls import Style, ToolCall, Unreadable, how_to_call, split_calls
from agents.tools import ToolAgent, ToolDefinitions
from rlhf.checking import CheckContext, Problem
from rlhf.data import Action, Finish, Generation, Message, Role
from rlhf.errors import AgentError, ContextFull, DataError
from rlhf.gateway.conversation import Conversations
from rlhf.gateway.request import CONTEXT_FULL, ChatReply, ChatRequest, Refusal, Token
from rlhf.gateway.session import SESSION, Give, Session
from rlhf.settings import STRICT


@runtime_checkable
class SamplingPolicy(Protocol):
    """Policy that exposes its temperature, the texts of its tokens, and the limit of a step."""

    temperature: float
    tells_tokens: bool
    step_timeout_s: float

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token."""

    def give_up(self, generation: Generation | None) -> None:
        """Count a call of this turn, whose generation is None where it was not sampled whole, for none."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExternalAgent:
    """An agent in a program of its own, which asks the policy through the gateway."""

    tool_format: Style = "hermes"
    """Format of the policy's tool calls: `json`, `hermes`, `llama`, `mistral`, `xml` or `python`."""
    tool_definitions: ToolDefinitions = "chat_template"
    """Place of the tool definitions: the model's own chat template, or the system prompt."""
    override_sampling: bool = False
    """Override and count a client's parameters of sampling; otherwise such requests are refused."""
    max_calls_per_reply: Annotated[int, Field(ge=1)] = 16
    """Most calls of one reply; more are taken for none."""

    roles: ClassVar[tuple[str, ...]] = ("",)
    is_outside: ClassVar[bool] = True

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse environments whose episodes are not played through the gateway."""
        recipe = context.recipe
        kind = context.kind_of("environment", recipe.environment)
        if kind != "external":
            yield Problem(
                "this agent is an external program, and the environment starts none",
                where=context.at("kind"),
                got=f"external in {kind}",
                expected="environment: {kind: external}",
                do="name the environment inside it: environment: {kind: external, environment: {kind: ...}}",
            )

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Answer the requests that wait, until the program has something to do again."""
        session = SESSION.get(None)
        if session is None:
            raise AgentError(
                "no session of the gateway belongs to this attempt",
                where="agent: external",
                expected="environment: {kind: external}",
                hint="an external agent plays in no other environment, nor in worker processes",
            )
        if session.conversations is None:
            session.conversations = Conversations(
                self.tool_format, tools_as_text=self.tool_definitions == "system_prompt"
            )
        silence_s = policy.step_timeout_s if isinstance(policy, SamplingPolicy) else None
        turn = await session.turn(_PolicyAnswers(self, session, policy), silence_s)
        return Action(turn.text, turn.generations, notes=turn.notes, reply_text=turn.text)

    def overridden(self, asked: ChatRequest, temperature: float) -> dict[str, Any]:
        """Sampling parameters of a request that the recipe's override. Raises Refusal where they may not be."""
        found = conflicting_parameters(asked.sampling, temperature)
        if self.max_calls_per_reply == 1 or not asked.tools:  # at most one call is made anyway
            found.pop("parallel_tool_calls", None)
        if found and not self.override_sampling:
            raise sampling_refusal(found, temperature)
        return found

    def read(self, text: str, asked: ChatRequest, was_cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Text before the calls of a reply, and the calls; what is no call of an offered tool stays text."""
        names = {tool["function"]["name"] for tool in asked.tools}
        if not names or was_cut:
            return text.strip(), ()
        try:
            before, calls = split_calls(text, self.tool_format, asked.tools)
        except Unreadable:
            return text.strip(), ()
        if len(calls) > self.max_calls_per_reply or any(call.name not in names for call in calls):
            return text.strip(), ()
        return before, tuple(calls)

    def told(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        """The messages, with the tools in the instruction where the template does not write them."""
        import json

        if not tools or self.tool_definitions == "chat_template":
            return tuple(messages)
        lines = ["Tools:", *(json.dumps(tool, ensure_ascii=False) for tool in tools), how_to_call(self.tool_format)]
        first = messages[0]
        if first.role is Role.SYSTEM:
            return (replace(first, content="\n".join([first.content, *lines])), *messages[1:])
        return (Message(Role.SYSTEM, "\n".join(lines)), *messages)


def external_agent(agent: Any, tool_definitions: ToolDefinitions, *, override_sampling: bool = False) -> ExternalAgent:
    """The external agent in the place of a recipe's, with the tool format of a tool agent.

    Args:
        agent: of the recipe; an external one stays as it is.
        tool_definitions: place of the tool definitions where `agent` says nothing of it.
        override_sampling: of the one that is made.
    """
    if isinstance(agent, ExternalAgent):
        return agent
    if isinstance(agent, ToolAgent):
        tool_definitions = agent.tool_definitions
        return ExternalAgent(
            tool_format=agent.tool_format, tool_definitions=tool_definitions, override_sampling=override_sampling
        )
    return ExternalAgent(tool_definitions=tool_definitions, override_sampling=override_sampling)


class _PolicyAnswers:
    """Answers the requests of one turn with the policy."""

    def __init__(self, agent: ExternalAgent, session: Session, policy: PolicyHandle) -> None:
        self._agent, self._session, self._policy = agent, session, policy

    async def __call__(self, asked: ChatRequest, give: Give) -> tuple[Generation, str]:
        """Sample a reply, give it, and record it once a client has it: others are no part of the attempt.

        Raises:
            Refusal: the request cannot be answered.
            EngineError: the engine failed.
            AgentError: this turn has no call left.
        """
        session, conversations = self._session, self._session.conversations
        assert conversations is not None
        self._check(asked)
        place = conversations.place(asked.messages, asked.tools)
        told = self._agent.told(place.messages, asked.tools)
        tools = asked.tools if self._agent.tool_definitions == "chat_template" else ()
        reply: Reply | None = None
        try:
            reply = await self._policy.generate(told, max_tokens=asked.max_tokens, tools=tools)
            answered = answered_by(self._agent, asked, reply, self._tokens(asked, reply), session.counts["n_calls"])
            session.counts["n_calls"] += len(answered.calls)
            await give(answered)
        except ContextFull as error:
            session.counts["n_context_full"] += 1
            raise Refusal(400, f"{error.what}. Got: {error.got}.", CONTEXT_FULL) from error
        except DataError as error:
            raise Refusal(400, str(error)) from error
        except asyncio.CancelledError:
            if isinstance(self._policy, SamplingPolicy):
                self._policy.give_up(reply.generation if reply else None)
            raise
        if place.fork is not None:
            session.forks.append(place.fork)
            session.counts[f"n_forks_{place.fork.reason}"] += 1
        conversations.record(place, asked.tools, answered.said, reply.generation.token_ids, reply.generation.finish)
        return reply.generation, reply.text

    def _check(self, asked: ChatRequest) -> None:
        if asked.logprobs and not (isinstance(self._policy, SamplingPolicy) and self._policy.tells_tokens):
            raise Refusal(
                400, "the model is behind a server, and its log-probs are not known here. Do: leave out logprobs."
            )
        if not asked.sampling:
            return
        temperature = self._policy.temperature if isinstance(self._policy, SamplingPolicy) else 1.0
        found = self._agent.overridden(asked, temperature)
        self._session.overridden += [f"{name}={value!r}" for name, value in found.items()]

    def _tokens(self, asked: ChatRequest, reply: Reply) -> tuple[Token, ...]:
        if not asked.logprobs or not isinstance(self._policy, SamplingPolicy):
            return ()
        generation = reply.generation
        texts = self._policy.token_texts(generation.token_ids)
        return tuple(Token(text, logprob) for text, logprob in zip(texts, generation.logprobs, strict=True))


def answered_by(
    agent: ExternalAgent, asked: ChatRequest, reply: Reply, tokens: tuple[Token, ...], n_calls: int
) -> ChatReply:
    """A reply as a wire writes it; calls are numbered through the session."""
    thoughts = split_thoughts(reply.text)
    was_cut = reply.generation.finish is Finish.LENGTH
    text, calls = agent.read(thoughts.answer, asked, was_cut)
    return ChatReply(
        text=text,
        reasoning=thoughts.thought or ("" if thoughts.is_finished else reply.text.partition("<think>")[2].strip()),
        calls=tuple((f"{n_calls + i}", call) for i, call in enumerate(calls)),
        finish=reply.generation.finish,
        n_prompt=reply.generation.prompt.n_tokens,
        n_sampled=reply.generation.n_tokens,
        tokens=tokens,
    )


def conflicting_parameters(sampling: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The parameters of a request by which its replies would come from another distribution than is recorded."""
    return {name: value for name, value in sampling.items() if not (name == "temperature" and value == temperature)}


def sampling_refusal(found: Mapping[str, Any], temperature: float) -> Refusal:
    """The refusal of such a request."""
    got = ", ".join(f"{name}={value!r}" for name, value in found.items())
    return Refusal(
        400,
        "these parameters would sample otherwise than the recipe does, and log-probs would be of another "
        f"distribution. Got: {got}. Expected: none of them, or temperature={temperature:g}. "
        "Do: leave them out, or set agent.override_sampling: true in the recipe, which overrides and counts them.",
        "sampling_parameters",
    )
