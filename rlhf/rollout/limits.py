"""Limits of rollouts: nothing here waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.data import SamplingParams
from rlhf.settings import STRICT

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Limits:
    """Limits of an episode, and the share of errors that a run tolerates."""

    max_turns: Annotated[int, Field(ge=1)] = 20
    """Actions of one episode; those that could not be parsed count."""
    max_calls: Annotated[int, Field(ge=1)] = 16
    """Calls of the policy in one turn."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """New tokens of one generation."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a generation, beside the model's own end of turn; they stay part of it."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Prompt and generation together; the engine's own limit where none is given."""
    step_timeout_s: _Seconds = 30.0
    """Seconds for one `step` or `close` of an environment."""
    episode_timeout_s: _Seconds = 300.0
    """Seconds for one attempt from start to end."""
    start_timeout_s: _Seconds = 60.0
    """Seconds for one `start` of an environment."""
    reward_timeout_s: _Seconds = 60.0
    """Seconds for one reward of one trajectory."""
    max_retries: Annotated[int, Field(ge=0)] = 1
    """Fresh tries of an attempt in which the environment or the engine failed."""
    max_error_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of failed attempts above which the run stops and says why."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Episodes alive at a time."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse generations that fill the context alone."""
        if self.max_context:
            yield from self.unprompted(self.max_context)

    def unprompted(self, max_context: int) -> Iterator[Problem]:
        """Yield a problem where one generation fills a context of so many tokens."""
        if self.max_tokens >= max_context:
            yield Problem(
                "one generation would fill the context: no room for a prompt",
                where="limits.max_tokens",
                got=str(self.max_tokens),
                expected=f"less than the context of {max_context}",
                do="lower it, or give more context",
            )

    def sampling(self, temperature: float) -> SamplingParams:
        """Sampling parameters of a generation under these limits; the seed is the episode's."""
        return SamplingParams(self.max_tokens, temperature, stop_strings=self.stop_strings)
