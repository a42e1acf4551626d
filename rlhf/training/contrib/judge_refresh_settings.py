"""Recipe keys of a judge that is an older version of the policy, and the figures of its audits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.judges.asking import AsksModel
from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem, in_one_process, no_split
from rlhf.errors import nearest
from rlhf.settings import STRICT
from rlhf.training.named_reward import unnamed


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JudgeRefresh:
    """Replace the judge by a recent snapshot of the policy, as long as it passes an audit.

    The first judge is the model in the reward's `path`. After every `every` steps the policy as it was `every` steps
    before becomes the judge, so that a judge is between once and twice as many steps behind whom it judges. It is a
    copy, and nothing flows back into it. Beforehand it judges a fixed set of attempts, of which it is known what is
    right: the policy's own at the stage's begin, of each task a right and a wrong one. Where it prefers the right one
    too seldom it does not become the judge, and none after it does.

    Source: a judge of its own, arXiv 2505.08827; the lag, the audit and its bound are our own.
    """

    reward: str | None = None
    """Name of the reward whose judge is replaced, one with a local model in `path`; null is the only one."""
    truth: str | None = None
    """Name of the ground-truth reward for the audit; null is 1 if the environment reports success, else 0."""
    success_threshold: float = 1.0
    """Ground-truth value from which an attempt is correct."""
    every: Annotated[int, Field(ge=1)] = 20
    """Steps between replacements, and the minimum number of steps that a judge lags behind."""
    min_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Minimum audit accuracy of a new judge; ½ is chance."""
    split: str = "dev"
    """Split of the audit's tasks."""
    tasks: Annotated[int, Field(ge=2)] = 64
    """Number of audit tasks; those with no correct attempt, or only correct ones, are uninformative."""
    group_size: Annotated[int, Field(ge=2)] = 4
    """Attempts per audit task, of which one correct and one wrong form a pair."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse names of no judge and of no truth, and a policy that cannot be copied."""
        recipe = context.recipe
        rewards: dict[str, object] = {name: weighted.reward for name, weighted in recipe.trained_rewards.items()}
        found = [name for name, reward in rewards.items() if isinstance(reward, AsksModel) and reward.path is not None]
        example = "rewards: {own: {kind: grade, path: FOLDER}}"
        wrong = list(unnamed(context.at("reward"), self.reward, found, "judge with a path", example))
        if wrong:
            yield from wrong
            return
        others = [name for name in recipe.rewards if name != (self.reward or found[0])]
        if self.truth is not None and self.truth not in others:
            yield Problem(
                "this reward cannot be the ground truth",
                where=context.at("truth"),
                got=self.truth,
                expected=" or ".join(others) or "null",
                do=nearest(self.truth, others) or "remove the key: then the environment's success is the ground truth",
            )
        yield from no_split(self.split, recipe.properties.splits, context.at("split"))
        if recipe.sharded:
            yield Problem(
                "a sharded policy cannot be copied as a judge",
                where=context.path,
                got=f"a stage with {recipe.sharded_by}",
                expected=KEEPS_WHOLE,
                do="use such a trainer, or remove the key",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about a renewal that never comes."""
        if self.every > context.stage.steps:
            yield f"{context.at('every')} is {self.every} and the stage has {context.stage.steps} steps"

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        yield in_one_process("reward models are refreshed", context, n)


def doubled(preferred: Sequence[float]) -> list[bool]:
    """Each pair counted twice, so that a tie counts once: 1, ½ and 0 become two, one and none of two.

    Of a right verdict, a tie and a wrong one half are right: (1 + ½ + 0) / 3 = 3 / 6. An interval that knows which two
    belong together is no narrower for it.
    """
    return [found for x in preferred for found in (x > 0, x > 0.5)]
