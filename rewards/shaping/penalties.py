"""Small costs that shape how an agent acts. Their values are at most 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, no_effect
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InvalidActionPenalty:
    """Penalty of −`penalty` on each turn whose action was unreadable or not understood.

    Per turn, as in verl-agent (Feng et al. 2025, arXiv 2505.10978). It gives a group whose attempts all fail alike a
    spread of its own, which an estimator that divides by the group's deviation then magnifies: keep it small.
    """

    is_penalty: ClassVar[bool] = True
    inline: ClassVar[bool] = True

    penalty: _Cost = 0.1
    """Subtracted for each invalid action."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Count the invalid turns."""
        per_turn = tuple(0.0 if turn.valid else -self.penalty for turn in trajectory.turns)
        n_invalid = sum(not turn.valid for turn in trajectory.turns)
        return Verdict(
            math.fsum(per_turn), why=f"{n_invalid} invalid action{'s' * (n_invalid != 1)}", per_turn=per_turn
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TurnCost:
    """Minus `cost` on each turn, so that a shorter way is a better one."""

    is_penalty: ClassVar[bool] = True
    inline: ClassVar[bool] = True

    cost: _Cost = 0.01
    """Subtracted for each turn."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Count the turns."""
        per_turn = (-self.cost,) * len(trajectory.turns)
        return Verdict(math.fsum(per_turn), why=f"{len(per_turn)} turns", per_turn=per_turn)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Overlong:
    """Overlong penalty: 0 up to `max_tokens` − `buffer`, falling to −1 at `max_tokens` sampled tokens.

    Long answers are warned before a limit cuts them, so that their reward does not jump from right to nothing. Only
    sampled tokens count, over all turns; observations do not. With 100 and 20: 80 tokens 0, 90 tokens −0.5, 100 and
    more −1.

    Source: DAPO, arXiv 2503.14476 (20480 and 4096, for single answers); verl's code has no bound at −1.
    """

    is_penalty: ClassVar[bool] = True
    inline: ClassVar[bool] = True

    max_tokens: Annotated[int, Field(ge=1)]
    """Sampled tokens of an episode from which on the reward is −1."""
    buffer: Annotated[int, Field(ge=1)]
    """Tokens before that in which it falls."""

    def __post_init__(self) -> None:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer: {self.buffer} begins before the first token; max_tokens is {self.max_tokens}")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a number of tokens that no episode can come near to."""
        limits = context.recipe.limits
        longest = limits.max_turns * limits.max_generations_per_turn * limits.max_tokens
        if context.parent is None and longest <= self.max_tokens - self.buffer:
            factors = "limits.max_turns x limits.max_generations_per_turn x limits.max_tokens"
            why = f"an episode has at most {factors} = {longest} sampled tokens"
            yield no_effect(context.at("max_tokens"), self.max_tokens, why)

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Count the sampled tokens."""
        excess = trajectory.n_policy_tokens - (self.max_tokens - self.buffer)
        return Verdict(-min(max(excess / self.buffer, 0.0), 1.0), why=f"{trajectory.n_policy_tokens} sampled tokens")
