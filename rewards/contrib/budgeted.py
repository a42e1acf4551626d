"""Reward for keeping to a token budget that the attempt was told (HBPO)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import Reward
from rewards.combinators.ask import ask
from rewards.shaping.length import length
from rewards.shaping.outcome import Outcome
from rlhf.checking import CheckContext, Problem
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


def worth(n: int, budget: int, most: int) -> float:
    """Reward of a right answer of n tokens: min(f(n) − |b − n| / L, f(b)), f(n) = 4 cos(π n / 2 L).

    L = 4096: with b = 1024, n = 1024 earns f(b) = 3.695518, n = 512 no more than that (3.798141, cut to f(b)),
    and n = 2048 2.828427 − .25 = 2.578427. Short answers earn more under small budgets; beyond L it is 0.
    Unlike the released reward it is never below 0, so that a right answer is worth no less than a wrong one
    (n = 4096, b = 512: −.875 there).
    """

    def f(tokens: int) -> float:
        return 4 * math.cos(math.pi * tokens / (2 * most))

    return 0.0 if n > most else max(0.0, min(f(n) - abs(budget - n) / most, f(budget)))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Budgeted:
    """Right attempts earn by how many tokens they took and how many they were told to; wrong ones 0.

    See `worth`. The budget of attempt i is number i mod n of `budgets`, as `rollout: {kind: budgets}` tells it; an
    evaluation, where nobody is told, counts its attempts likewise.

    Source: HBPO, arXiv 2507.15844, and its released reward.
    """

    budgets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """The same as those of the rollout."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """L: tokens beyond which a right answer earns nothing."""
    correct: Reward = Field(default_factory=Outcome)
    """The reward or verifier that says which attempts are correct: those worth at least `min_correct`."""
    min_correct: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Minimal value of `correct` for a correct attempt."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse budgets that differ from those in the prompts."""
        for path, stage in context.recipe.learning:
            told = context.kind_of("rollout", stage.rollout) == "budgets"
            if told and tuple(stage.rollout.budgets) != self.budgets:
                yield Problem(
                    "the budgets in the prompts are not those of the reward",
                    where=context.at("budgets"),
                    got=f"{list(self.budgets)}, and {path}.rollout.budgets {list(stage.rollout.budgets)}",
                    expected="the same numbers in the same order",
                    do=f"write {list(stage.rollout.budgets)} here",
                )

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one attempt; raises what `correct` raises."""
        budget, n = self.budgets[trajectory.attempt % len(self.budgets)], length(trajectory, "tokens")
        right = (await ask(self.correct, task, trajectory)).value >= self.min_correct
        value = worth(n, budget, self.max_tokens) if right else 0.0
        return Verdict(value, why=f"{'right' if right else 'wrong'}, {n} tokens of {budget}")
