"""Prompt and generation: token ids in, token ids and log-probs out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlhf.data.tokens import (
    OUT_OF_BAND,
    Packed,
    TokenBuffer,
    code_of,
    loaded,
    owned,
    packed_ids,
    packed_logprobs,
    stored,
    view,
)
from rlhf.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

#: Conversations of an episode that are remembered: those of agents that ask in turns in several roles.
_MOST_KEPT = 8
#: `Generation.policy_version` of tokens that no policy sampled: those of a demonstration.
DEMONSTRATED = -1


class Finish(StrEnum):
    """Why sampling ended."""

    STOP = "stop"  #: a stop token was sampled; it is the last id of the generation
    LENGTH = "length"  #: the limit on new tokens, or the context, was reached
    ABORT = "abort"  #: the caller gave up


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Prompt:
    """Token ids given to the model for one call.

    The ids are a compact array, which the prompts and generations of a conversation share (see `Conversations`).

    Attributes:
        token_ids: `[P]`, at least one; a tuple made anew each time, so `ids` and `n_tokens` are what code that meets
            many of them asks for.
        stop_ids: sampling ends after any of these; the sampled stop token is kept.
        adapter: role whose adapter reads it, where roles have adapters of their own (`policy.lora.roles`); empty for
            the one that all other roles share.
    """

    __slots__ = ("_buffer", "_n", "adapter", "stop_ids")

    token_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    adapter: str
    if TYPE_CHECKING:
        _buffer: TokenBuffer
        _n: int

    def __init__(self, token_ids: Iterable[int], stop_ids: tuple[int, ...] = (), adapter: str = "") -> None:
        ids = packed_ids(token_ids)
        if not ids:
            raise DataError("a prompt needs tokens", where="Prompt.token_ids", got="0 tokens", expected="at least 1")
        _fill(self, _buffer=TokenBuffer(ids), _n=len(ids), stop_ids=stop_ids, adapter=adapter)

    @property
    def n_tokens(self) -> int:
        """P."""
        return self._n

    @property
    def ids(self) -> npt.NDArray[Any]:
        """`[P]`, the token ids as integers that cannot be written to."""
        return view(self._buffer.ids, 0, self._n)

    def begins_like(self, before: Prompt) -> bool:
        """True if it begins with all of `before`."""
        n = before._n
        return n <= self._n and (self._buffer is before._buffer or self._buffer.ids[:n] == before._buffer.ids[:n])

    def extends(self, before: Generation) -> bool:
        """True if it begins with everything that `before` read and sampled."""
        own, read, n = self._buffer, before.prompt, before.prompt._n
        if self._n < before.length or not self.begins_like(read):
            return False
        return (own is before._buffer and before._start == n) or own.ids[n : before.length] == before._array

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if (self._n, self.stop_ids, self.adapter) != (other._n, other.stop_ids, other.adapter):
            return False
        return self._buffer is other._buffer or self._buffer.ids[: self._n] == other._buffer.ids[: self._n]

    def __hash__(self) -> int:
        return hash((self.token_ids, self.stop_ids, self.adapter))

    def __repr__(self) -> str:
        return f"Prompt(token_ids={self.token_ids!r}, stop_ids={self.stop_ids!r}, adapter={self.adapter!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _prompt_in, (self._buffer, self._n, self.stop_ids, self.adapter)


def _fill(made: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(made, name, value)


def _prompt_in(buffer: TokenBuffer, n: int, stop_ids: tuple[int, ...], adapter: str) -> Prompt:
    """The prompt whose ids are the first `n` of a buffer."""
    made = object.__new__(Prompt)
    _fill(made, _buffer=buffer, _n=n, stop_ids=stop_ids, adapter=adapter)
    return made


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        max_tokens: limit on new tokens.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens with this much probability; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        seed: one seed gives one generation, whatever else is in the batch.
        stop_strings: sampling ends after the token that completes any of these texts; the token is kept.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ok = self.max_tokens >= 1 and self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0
        if not ok or "" in self.stop_strings:
            raise DataError(
                "sampling parameters out of range",
                where="SamplingParams",
                got=repr(self),
                expected="max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0, no empty stop string",
            )


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Generation:
    """Tokens sampled for one prompt.

    Attributes:
        prompt: exactly what the model was given.
        token_ids: `[T]` sampled ids, as sampled; a tuple made anew each time, as `logprobs` is, so `ids`, `logps` and
            `n_tokens` are what code that meets many of them asks for.
        logprobs: `[T]` log-probs in nats of the distribution sampled from (temperature, top-p and top-k included).
        finish: why sampling ended.
        policy_version: version of the weights that sampled the first token; `DEMONSTRATED` where none did.
        version_spans: (version, number of tokens) in order, when weights were updated while this was sampled; empty
            when one version sampled all of it.
        role: what the agent asked for, in its own word; empty for an action, `memory` for what is to be remembered,
            `plan` for a subgoal.
        usage: tokens (read, sampled) as the server counted them, where the ids are none of a model's; None elsewhere.
        opponent: who sampled it in the place of the policy, such as `step 20`, an older version; never trained. Empty
            for the policy. Stored as `by`.
    """

    __slots__ = (
        *("_buffer", "_logps", "_start"),
        *("finish", "opponent", "policy_version", "prompt", "role", "usage", "version_spans"),
    )

    prompt: Prompt
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    policy_version: int
    version_spans: tuple[tuple[int, int], ...]
    role: str
    usage: tuple[int, int] | None
    opponent: str
    if TYPE_CHECKING:
        _buffer: TokenBuffer
        _start: int
        _logps: Packed

    def __init__(
        self,
        prompt: Prompt,
        token_ids: Iterable[int],
        logprobs: Sequence[float],
        finish: Finish,
        policy_version: int,
        version_spans: tuple[tuple[int, int], ...] = (),
        role: str = "",
        usage: tuple[int, int] | None = None,
        opponent: str = "",
    ) -> None:
        ids = packed_ids(token_ids)
        if len(ids) != len(logprobs):
            raise DataError(
                "ids and log-probs differ in length",
                where="Generation",
                got=f"{len(ids)} ids, {len(logprobs)} log-probs",
                expected="one log-prob per sampled id",
            )
        if version_spans and sum(n for _, n in version_spans) != len(ids):
            raise DataError(
                "the spans of policy versions do not cover the tokens",
                where="Generation.version_spans",
                got=str(version_spans),
                expected=f"{len(ids)} tokens in all",
            )
        _fill(self, _buffer=TokenBuffer(ids), _start=0, _logps=packed_logprobs(logprobs), prompt=prompt, finish=finish)
        _fill(
            self, policy_version=policy_version, version_spans=version_spans, role=role, usage=usage, opponent=opponent
        )

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self._logps)

    @property
    def length(self) -> int:
        """P + T: tokens read and sampled."""
        return self.prompt._n + len(self._logps)

    @property
    def ids(self) -> npt.NDArray[Any]:
        """`[T]`, the sampled ids as integers that cannot be written to."""
        return view(self._buffer.ids, self._start, self._start + len(self._logps))

    @property
    def logps(self) -> npt.NDArray[Any]:
        """`[T]`, the log-probs as floats that cannot be written to."""
        return view(self._logps)

    @property
    def all_ids(self) -> npt.NDArray[Any]:
        """`[P + T]`, prompt and sampled ids as integers that cannot be written to."""
        if self._buffer is self.prompt._buffer and self._start == self.prompt._n:
            return view(self._buffer.ids, 0, self.length)
        return view(owned(self.prompt._buffer.ids[: self.prompt._n]) + owned(self._array))

    @property
    def versions(self) -> tuple[int, ...]:
        """Every version of the weights that sampled a token of it, in order."""
        return tuple(version for version, _ in self.version_spans) or (self.policy_version,)

    @property
    def full_ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids, `[P + T]`."""
        return self.prompt.token_ids + self.token_ids

    def continued(self) -> Prompt:
        """The prompt that goes on where this ends, with nothing read in between."""
        given = self.prompt
        if self._buffer is given._buffer and self._start == given._n:
            return _prompt_in(self._buffer, self.length, given.stop_ids, given.adapter)
        return Prompt(owned(given._buffer.ids[: given._n]) + owned(self._array), given.stop_ids, given.adapter)

    @property
    def _array(self) -> Packed:
        return self._buffer.ids[self._start : self._start + len(self._logps)]

    @property
    def _said(self) -> tuple[Any, ...]:
        """All fields except ids and log-probs."""
        return self.prompt, self.finish, self.policy_version, self.version_spans, self.role, self.usage, self.opponent

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or (
            self._array == other._array and self._logps == other._logps and self._said == other._said
        )

    def __hash__(self) -> int:
        return hash((self.token_ids, self.logprobs, *self._said))

    def __repr__(self) -> str:
        return f"Generation({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        logps = stored(self._logps) if protocol >= OUT_OF_BAND else owned(self._logps)
        return _generation_in, (self._buffer, self._start, logps, *self._said)


def _generation_in(buffer: TokenBuffer, start: int, logps: Packed | tuple[str, Any], *said: Any) -> Generation:
    """The generation whose ids are those of a buffer from `start` on; its log-probs may come from a pickle."""
    made = object.__new__(Generation)
    logps = loaded(*logps) if isinstance(logps, tuple) else logps
    names = ("prompt", "finish", "policy_version", "version_spans", "role", "usage", "opponent")
    _fill(made, _buffer=buffer, _start=start, _logps=logps, **dict(zip(names, said, strict=True)))
    return made


def _token_ids_of(part: Any) -> tuple[int, ...]:
    return tuple(part._buffer.ids[: part._n] if isinstance(part, Prompt) else part._array)


# Each is a field, for `dataclasses.replace` and `asdict`, and is made when it is asked for.
setattr(Prompt, "token_ids", property(_token_ids_of))  # noqa: B010
setattr(Generation, "token_ids", property(_token_ids_of))  # noqa: B010
setattr(Generation, "logprobs", property(lambda generation: tuple(generation._logps)))  # noqa: B010


class Conversations:
    """Tokens read and sampled in one episode: calls whose prompts extend each other share one array.

    So a generation of many turns costs the tokens that it adds, and not its whole prompt.
    """

    def __init__(self) -> None:
        self._buffers: list[TokenBuffer] = []

    def keep(self, generation: Generation, *, role: str, opponent: str) -> Generation:
        """Return `generation` with its role and sampler, stored as a part of earlier ones."""
        given, n = generation.prompt, generation.prompt._n
        ids, sampled = given._buffer.ids[:n], generation._array
        buffer = next((b for b in reversed(self._buffers) if b.begins_like(ids)), None)
        if buffer is None:
            buffer = TokenBuffer(ids)
            self._buffers = [*self._buffers[1 - _MOST_KEPT :], buffer]
        elif len(buffer) < n:
            buffer.append(ids[len(buffer) :])
        own, start = buffer, n
        if len(buffer) == n and code_of(buffer.ids) == code_of(sampled):
            buffer.append(sampled)
        elif buffer.ids[n : n + len(sampled)] != sampled:  # another answer to the same prompt
            own, start = TokenBuffer(sampled), 0
        _, finish, version, spans, _, usage, _ = generation._said
        prompt = _prompt_in(buffer, n, given.stop_ids, given.adapter)
        return _generation_in(own, start, generation._logps, prompt, finish, version, spans, role, usage, opponent)


def calls_of(generations: Sequence[Generation]) -> list[tuple[Generation, ...]]:
    """Gather the pieces of each call: a piece begins where the one before it ended, with nothing read in between.

    A call is one piece, unless attempts part within it; see `rlhf.rollout.branching`.
    """
    calls: list[tuple[Generation, ...]] = []
    for g in generations:
        if calls and g.prompt.n_tokens == calls[-1][-1].length and g.prompt.extends(calls[-1][-1]):
            calls[-1] = (*calls[-1], g)
        else:
            calls.append((g,))
    return calls


def counted_once(turns: Iterable[Sequence[Generation]]) -> list[Generation]:
    """Return the generations of `turns`, a piece that several replies have in common once.

    Args:
        turns: generations of turns that no other attempt has taken; see `Trajectory.own_turns`.
    """
    seen: set[int] = set()
    found: list[Generation] = []
    for turn in turns:
        for call in calls_of(turn):
            new = [g for g in call if id(g) not in seen]
            seen.update(map(id, new))
            found += new
    return found


def joined(pieces: Sequence[Generation]) -> Generation:
    """Return the call that `pieces` are of, at least one."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    versions = [v for piece in pieces for v in versions_of(piece)]
    return replace(
        first,
        token_ids=tuple(x for piece in pieces for x in piece.token_ids),
        logprobs=tuple(x for piece in pieces for x in piece.logprobs),
        finish=last.finish,
        version_spans=_spans(versions),
    )


def piece_of(generation: Generation, start: int, stop: int) -> Generation:
    """Return tokens `start` to `stop` as a separate generation, with the earlier ones in its prompt.

    It counts as stopped unless it is the end: whatever cut a call is said of its last piece.
    """
    versions = versions_of(generation)[start:stop]
    before = _generation_in(generation._buffer, generation._start, generation._logps[:start], *generation._said)
    finish = generation.finish if stop == generation.n_tokens else Finish.STOP
    version = versions[0] if versions else generation.policy_version
    said = (
        before.continued(),
        finish,
        version,
        _spans(versions),
        generation.role,
        generation.usage,
        generation.opponent,
    )
    return _generation_in(generation._buffer, generation._start + start, generation._logps[start:stop], *said)


def versions_of(generation: Generation) -> list[int]:
    """Version of the weights that sampled each token."""
    if generation.version_spans:
        return [version for version, n in generation.version_spans for _ in range(n)]
    return [generation.policy_version] * generation.n_tokens


def _spans(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Write versions of tokens as (version, number of tokens); empty where there is one version."""
    if len(set(versions)) < 2:
        return ()
    return tuple((version, len(list(found))) for version, found in itertools.groupby(versions))
