"""Rollout limits: turns, tokens, timeouts, concurrency, and the share of failures that is tolerated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.data import SamplingParams
from rlhf.settings import STRICT

#: Limits that belong to a policy, rather than to what it is judged on.
OF_POLICY = ("max_tokens", "stop_strings", "max_context", "max_concurrent")
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Limits:
    """Limits of an episode, and the share of errors that a run tolerates."""

    max_turns: Annotated[int, Field(ge=1)] = 20
    """Maximum turns per episode; unparseable actions count."""
    max_generations_per_turn: Annotated[int, Field(ge=1)] = 16
    """Maximum calls of the policy per turn; those that find no room in the context count for none, nor do
    those that a program's client gives up."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Maximum new tokens per generation."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings in addition to the model's end of turn; they are kept in the generation."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Maximum context of prompt and generation; null is the engine's limit."""
    step_timeout_s: _Seconds = 30.0
    """Timeout of one `step` or `close` of an environment, in seconds."""
    episode_timeout_s: _Seconds = 300.0
    """Timeout of one attempt, in seconds."""
    start_timeout_s: _Seconds = 60.0
    """Timeout of one `start` of an environment, in seconds."""
    reward_timeout_s: _Seconds = 60.0
    """Timeout of one reward of one trajectory, in seconds."""
    max_retries: Annotated[int, Field(ge=0)] = 1
    """Retries of an attempt after an error of the environment or the engine."""
    max_error_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of infrastructure errors above which the run stops."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Maximum concurrent episodes."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse generations that fill the context alone."""
        if self.max_context:
            yield from self.unprompted(self.max_context, context.path)

    def unprompted(self, max_context: int, path: str = "limits") -> Iterator[Problem]:
        """Yield a problem, of limits at a YAML path, if one generation fills a context of this many tokens."""
        if self.max_tokens >= max_context:
            yield Problem(
                "one generation would fill the context: no room for a prompt",
                where=f"{path}.max_tokens",
                got=str(self.max_tokens),
                expected=f"less than the context of {max_context}",
                do="lower it, or raise the context",
            )

    def sampling(self, temperature: float) -> SamplingParams:
        """Sampling parameters of a generation under these limits; the seed is the episode's."""
        return SamplingParams(self.max_tokens, temperature, stop_strings=self.stop_strings)
