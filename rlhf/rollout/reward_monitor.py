"""Settings of a monitored reward: computed and logged, and never trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.errors import nearest
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardMonitor:
    """Monitor of a held-out reward: what to compare with, and what to do when they diverge.

    `monitor: true` takes the defaults.
    """

    compare_with: str | None = None
    """Training reward to compare with, by its name in the recipe; null is the whole score."""
    window: Annotated[int, Field(ge=8)] = 20
    """Steps over which a trend is tested; also twice, four times as many, and so on."""
    stop: bool = False
    """Stop the run, once in a stage, when the trained reward rises while this one falls."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse comparisons with nothing, and windows that are longer than training."""
        recipe = context.recipe
        if not recipe.has_weight:
            yield Problem(
                "every reward is monitored, and none is trained on",
                where=context.path,
                got=", ".join(recipe.rewards),
                expected="at least one reward with a weight, to compare with",
                do="remove monitor from one of them",
            )
        counted = [name for name, weighted in recipe.trained_rewards.items() if weighted.weight > 0]
        if self.compare_with is not None and self.compare_with not in counted:
            is_there = self.compare_with in recipe.rewards
            yield Problem(
                "a monitored reward needs a training reward to compare with" if is_there else "there is no such reward",
                where=context.at("compare_with"),
                got=self.compare_with,
                expected=", ".join(counted) or "a reward with a weight above 0",
                do=nearest(self.compare_with, counted)
                or "name one of these, or leave `compare_with` out to compare with the score",
            )
        if not recipe.longest:
            yield Problem(
                "monitor has no effect: only policy_gradient stages compare rewards",
                where=context.path,
                got=", ".join(context.kind_of("stage", stage) for stage in recipe.stages),
                expected="a stage {kind: policy_gradient}",
                do="remove the reward; `rlhf score RUN --reward TARGET` computes it afterwards",
            )
        if recipe.longest < self.window != type(self)().window:
            yield Problem(
                "monitor has no effect: every stage is shorter than the window",
                where=context.at("window"),
                got=str(self.window),
                expected=f"at most {recipe.longest}, the steps of the longest stage",
                do="lower the window, to 8 at the least, or train for more steps",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about a window that no stage fills."""
        if context.recipe.longest < self.window:
            yield f"{context.at('window')} is {self.window} and no stage has as many steps: it cannot warn"
