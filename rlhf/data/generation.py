"""Prompt and generation: token ids in, token ids and log-probs out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlhf.errors import DataError

#: `Generation.policy_version` of tokens that no policy sampled: those of a demonstration.
DEMONSTRATED = -1


class Finish(StrEnum):
    """Why sampling ended."""

    STOP = "stop"  #: a stop token was sampled; it is the last id of the generation
    LENGTH = "length"  #: the limit on new tokens, or the context, was reached
    ABORT = "abort"  #: the caller gave up


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids given to the model for one call.

    Attributes:
        token_ids: `[P]`, at least one.
        stop_ids: sampling ends after any of these; the sampled stop token is kept.
        adapter: role whose adapter reads it, where roles have adapters of their own (`policy.lora.roles`); empty for
            the one that all other roles share.
    """

    token_ids: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()
    adapter: str = ""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise DataError("a prompt needs tokens", where="Prompt.token_ids", got="0 tokens", expected="at least 1")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

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


@dataclass(frozen=True, slots=True)
class Generation:
    """What the model sampled for one prompt.

    Attributes:
        prompt: exactly what the model was given.
        token_ids: `[T]` sampled ids, as sampled.
        logprobs: `[T]` log-probs in nats of the distribution sampled from (temperature, top-p and top-k included).
        finish: why sampling ended.
        policy_version: version of the weights that sampled the first token; `DEMONSTRATED` where none did.
        version_spans: (version, number of tokens) in order, when weights were updated while this was sampled; empty
            when one version sampled all of it.
        role: what the agent asked for, in its own word; empty for an action, `memory` for what is to be remembered,
            `plan` for a subgoal.
        usage: tokens (read, sampled) as the server counted them, where the ids are none of a model's; None elsewhere.
        by: who sampled it in the place of the policy, such as `step 20`, an older version; never trained. Empty for the
            policy.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    policy_version: int
    version_spans: tuple[tuple[int, int], ...] = ()
    role: str = ""
    usage: tuple[int, int] | None = None
    by: str = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise DataError(
                "ids and log-probs differ in length",
                where="Generation",
                got=f"{len(self.token_ids)} ids, {len(self.logprobs)} log-probs",
                expected="one log-prob per sampled id",
            )
        if self.version_spans and sum(n for _, n in self.version_spans) != len(self.token_ids):
            raise DataError(
                "the spans of policy versions do not cover the tokens",
                where="Generation.version_spans",
                got=str(self.version_spans),
                expected=f"{len(self.token_ids)} tokens in all",
            )
        if not all(math.isfinite(x) and x <= 1e-4 for x in self.logprobs):
            raise DataError(
                "a log-prob is not a finite number at most 0",
                where="Generation.logprobs",
                got=str([x for x in self.logprobs if not (math.isfinite(x) and x <= 1e-4)][:3]),
            )

    @property
    def versions(self) -> tuple[int, ...]:
        """Every version of the weights that sampled a token of it, in order."""
        return tuple(version for version, _ in self.version_spans) or (self.policy_version,)

    @property
    def full_ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids, `[P + T]`."""
        return self.prompt.token_ids + self.token_ids


def calls_of(generations: Sequence[Generation]) -> list[tuple[Generation, ...]]:
    """Gather the pieces of each call: a piece begins where the one before it ended, with nothing read in between.

    A call is one piece, unless attempts part within it; see `rlhf.rollout.branching`.
    """
    calls: list[tuple[Generation, ...]] = []
    for g in generations:
        if calls and g.prompt.token_ids == calls[-1][-1].full_ids:
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
            new = [g for g in call if len(call) == 1 or id(g) not in seen]
            seen.update(map(id, new))
            found += new
    return found


def joined(pieces: Sequence[Generation]) -> Generation:
    """Return the call that `pieces` are of, at least one."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    versions = [v for piece in pieces for v in _versions(piece)]
    return replace(
        first,
        token_ids=tuple(x for piece in pieces for x in piece.token_ids),
        logprobs=tuple(x for piece in pieces for x in piece.logprobs),
        finish=last.finish,
        version_spans=_spans(versions),
    )


def piece_of(generation: Generation, start: int, stop: int) -> Generation:
    """Return tokens `start` to `stop` as a generation of its own, which has read those before.

    It counts as stopped unless it is the end: whatever cut a call is said of its last piece.
    """
    versions = _versions(generation)[start:stop]
    return replace(
        generation,
        prompt=replace(generation.prompt, token_ids=generation.prompt.token_ids + generation.token_ids[:start]),
        token_ids=generation.token_ids[start:stop],
        logprobs=generation.logprobs[start:stop],
        finish=generation.finish if stop == len(generation.token_ids) else Finish.STOP,
        policy_version=versions[0] if versions else generation.policy_version,
        version_spans=_spans(versions),
    )


def _versions(generation: Generation) -> list[int]:
    """Version of the weights that sampled each token."""
    if generation.version_spans:
        return [version for version, n in generation.version_spans for _ in range(n)]
    return [generation.policy_version] * len(generation.token_ids)


def _spans(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Write versions of tokens as (version, number of tokens); empty where there is one version."""
    if len(set(versions)) < 2:
        return ()
    return tuple((version, len(list(found))) for version, found in itertools.groupby(versions))
