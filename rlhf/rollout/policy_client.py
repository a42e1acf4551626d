"""Policy client of one episode: renders, samples and records; with the episode's observable state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from agents.base import Reply
from rlhf.data import Finish, Generation, Message, Prompt, SamplingParams
from rlhf.data.generation import Conversations, joined
from rlhf.data.untrusted import shown
from rlhf.errors import AgentError, ContextFull, EngineError, boundary
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.seeds import stable_seed
from rlhf.rollout.branching import SharedPrefix
from rlhf.rollout.limits import Limits
from rlhf.rollout.opponent_engine import OpponentEngine, turn_key
from rlhf.rollout.renderer import Renderer


class EpisodeStatus(StrEnum):
    """Status of a running episode: the part whose answer it awaits."""

    ENVIRONMENT = "environment"
    AGENT = "agent"
    ENGINE = "engine"


@dataclass(slots=True)
class EpisodeMonitor:
    """State of a running episode, readable from outside.

    Attributes:
        phase: what it waits for.
        since: `time.monotonic()` when that began.
    """

    phase: EpisodeStatus = EpisodeStatus.ENVIRONMENT
    since: float = field(default_factory=time.monotonic)

    def enter(self, phase: EpisodeStatus) -> None:
        """Note what is waited for from now on."""
        self.phase, self.since = phase, time.monotonic()


class EpisodePolicy:
    """The policy as one episode sees it; one object serves all turns, `begin_turn` tells them apart."""

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        limits: Limits,
        sampling: SamplingParams,
        seed: int,
        attempt: int,
        session: str,
        watch: EpisodeMonitor,
        opponents: Mapping[str, OpponentEngine] = MappingProxyType({}),
    ) -> None:
        self._engine, self._renderer, self._limits, self._sampling = engine, renderer, limits, sampling
        self._seed, self._attempt, self._session, self._watch = seed, attempt, session, watch
        self._opponents, self._sampler = opponents, OpponentEngine("", engine)
        self._turn = self._n_calls = self._n_given_up = 0
        self._head: SharedPrefix | None = None
        self._pieces: dict[int, tuple[Generation, ...]] = {}
        self._conversations = Conversations()
        self.generations: list[Generation] = []

    @property
    def temperature(self) -> float:
        """Of what is sampled."""
        return self._sampling.temperature

    @property
    def step_timeout_s(self) -> float:
        """Seconds that a step of the environment may take."""
        return self._limits.step_timeout_s

    @property
    def tells_tokens(self) -> bool:
        """True if it samples tokens with log-probs, not whole messages of a server."""
        return self._renderer.tells_tokens

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token alone."""
        return [self._renderer.decode((i,)) for i in ids]

    def begin_turn(self, turn: int, head: SharedPrefix | None = None, seat: str = "", n_given: int = 0) -> None:
        """Reset for a new turn of a seat; with a head, the first calls return its stored generations.

        Opponents of single turns count those after the `n_given` that the attempt began with.
        """
        own = OpponentEngine("", self._engine)
        self._sampler = self._opponents.get(seat) or self._opponents.get(turn_key(turn - n_given), own)
        self._turn, self._n_calls, self._n_given_up, self.generations = turn, 0, 0, []
        self._head, self._pieces = head, {}

    def give_up(self, generation: Generation | None) -> None:
        """Count a call of this turn whose client has gone for none, and forget what was sampled for it, if anything."""
        self._n_given_up += 1
        self.generations = [g for g in self.generations if g is not generation]

    def recorded(self, generations: Sequence[Generation]) -> tuple[Generation, ...]:
        """Return calls as they are recorded: in pieces, where other attempts have a part of them too."""
        return tuple(g for call in generations for g in self._pieces.get(id(call), (call,)))

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Render `messages` and sample one reply; see `agents.base.PolicyHandle`."""
        try:
            return await self._reply(messages, max_tokens, role, tools)
        except ContextFull:  # which counts for no call, so only time ends an agent that asks so for ever
            await asyncio.sleep(0)
            raise

    async def _reply(
        self, messages: Sequence[Message], max_tokens: int | None, role: str, tools: Sequence[Mapping[str, Any]]
    ) -> Reply:
        call = self._n_calls
        if call - self._n_given_up >= self._limits.max_generations_per_turn:
            raise AgentError(
                "the agent calls the policy too often in one turn",
                where=f"turn {self._turn + 1}",
                got=f"call {call - self._n_given_up + 1}",
                expected=f"at most {self._limits.max_generations_per_turn} (limits.max_generations_per_turn)",
                hint="let the agent decide after fewer calls, or raise limits.max_generations_per_turn",
            )
        _check_call(messages, max_tokens, role)
        if too_long := self._too_long(messages):
            raise ContextFull(
                "a message is longer than the context",
                where=self._session,
                got=f"{len(too_long.content)} characters for {self._context} tokens",
                hint="shorten the environment's observations, or raise limits.max_context",
            )
        prompt = self._renderer.prompt(messages, tools, role)
        pieces = self._kept(prompt, call)
        asks = not pieces or self._goes_on(call)
        left = self._bounded(prompt, call, max_tokens, pieces) if asks else None
        self._n_calls += 1
        if left is not None:
            self._watch.enter(EpisodeStatus.ENGINE)
            said = await sampled(self._sampler.engine, *left, self._session)
            pieces = (*pieces, self._conversations.keep(said, role=role, opponent=self._sampler.name))
        self._watch.enter(EpisodeStatus.AGENT)
        generation = joined(pieces)
        self.generations.append(generation)
        self._pieces[id(generation)] = pieces
        return Reply(self._renderer.reply_text(generation.token_ids), generation)

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Prompt length of `messages`; one more than the context where a single message exceeds it."""
        if self._too_long(messages):
            return self._context + 1
        return self._renderer.prompt(messages).n_tokens

    @property
    def _context(self) -> int:
        return context_of(self._sampler.engine, self._limits)

    def _too_long(self, messages: Sequence[Message]) -> Message | None:
        """Message longer than the context, which would take minutes to tokenise only to be refused."""
        written = (m for m in messages if m.token_ids is None)
        return next((m for m in written if self._renderer.exceeds(m.content, self._context)), None)

    def _goes_on(self, call: int) -> bool:
        """True for the call whose earlier answer is kept up to a branch point within it."""
        return self._head is not None and call == len(self._head.calls)

    def _kept(self, prompt: Prompt, call: int) -> tuple[Generation, ...]:
        """Kept prefix of an earlier answer to this call. Raises AgentError where it is another call now."""
        if self._head is None or call > len(self._head.calls):
            return ()
        pieces = self._head.pieces if self._goes_on(call) else self._head.calls[call]
        if pieces[0].prompt != prompt:
            raise AgentError(
                "the agent builds a different prompt when a turn is replayed",
                where=f"turn {self._turn + 1}, call {call + 1}",
                got=f"a prompt of {prompt.n_tokens} tokens",
                expected="the same prompt as before, from the same history",
                hint="an agent must be stateless between turns; or use rollout: {kind: tree, at: turn}",
            )
        return pieces

    def _bounded(
        self, prompt: Prompt, call: int, max_tokens: int | None, kept: Sequence[Generation]
    ) -> tuple[Prompt, SamplingParams]:
        """Prompt and sampling parameters for the rest of a call. Raises ContextFull where there is no room."""
        limit = min(self._limits.max_tokens, max_tokens or self._limits.max_tokens)
        if kept:
            limit -= sum(piece.n_tokens for piece in kept)
            prompt = kept[-1].continued()
        limit = bounded(limit, prompt, self._sampler.engine, self._limits, self._session)
        seed = stable_seed(self._seed, self._attempt, self._turn, call)
        return prompt, replace(self._sampling, max_tokens=limit, seed=seed)


def _check_call(messages: Sequence[Message], max_tokens: object, role: object) -> None:
    """Raise AgentError where an agent asks with what is no message, number or role."""
    odd = next((m for m in messages if type(m) is not Message or type(m.content) is not str), None)
    if odd is not None:
        problem, got = "is no Message of text", shown(odd)
    elif max_tokens is not None and type(max_tokens) is not int:
        problem, got = "max_tokens is no whole number", shown(max_tokens)
    elif type(role) is not str:
        problem, got = "role is no text", shown(role)
    else:
        return
    raise AgentError(f"invalid policy call by the agent: {problem}", where="generate", got=got)


def context_of(engine: RolloutEngine, limits: Limits) -> int:
    """Tokens of prompt and generation together."""
    return min(engine.max_context, limits.max_context or engine.max_context)


def bounded(limit: int, prompt: Prompt, engine: RolloutEngine, limits: Limits, session: str) -> int:
    """Return how many tokens may be sampled after `prompt`: `limit`, or fewer where the context ends before.

    Raises:
        ContextFull: not even one.
    """
    context = context_of(engine, limits)
    room = context - prompt.n_tokens
    if room < 1:
        raise ContextFull(
            "the prompt leaves no room for a token",
            where=session,
            got=f"{prompt.n_tokens} tokens in a context of {context}",
            hint="raise limits.max_context, lower limits.max_turns, or shorten the agent's history",
        )
    return min(limit, room)


async def sampled(engine: RolloutEngine, prompt: Prompt, sampling: SamplingParams, session: str) -> Generation:
    """Sample once after `prompt`.

    Raises:
        EngineError: the engine fails, or does not answer what it was asked.
    """
    with boundary(EngineError, where="engine.generate"):
        generation = await engine.generate(prompt, sampling, session)
    _check_generation(generation, prompt, sampling.max_tokens)
    return generation


def _check_generation(generation: object, prompt: Prompt, limit: int) -> None:
    """Raise EngineError unless the engine answered what it was asked."""
    if not isinstance(generation, Generation):
        problem = f"returned {type(generation).__name__}, expected Generation"
    elif generation.finish is Finish.ABORT:
        problem = "aborted the generation"
    elif generation.prompt != prompt:
        problem = "answered for another prompt"
    elif generation.n_tokens > limit:
        problem = f"sampled {generation.n_tokens} tokens, at most {limit} were asked for"
    else:
        return
    raise EngineError(problem, where="engine.generate")
