"""A policy that judges itself, some steps behind: its recipe keys, and what an audit comes to."""

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
    """Let the policy of some steps ago take the judge's place, as long as it judges right.

    The first judge is the model in the reward's `path`. After every `every` steps the policy as it was `every` steps
    before becomes the judge, so that a judge is between once and twice as many steps behind whom it judges. It is a
    copy, and nothing flows back into it. Beforehand it judges a fixed set of attempts, of which it is known what is
    right: the policy's own at the stage's begin, of each task a right and a wrong one. Where it prefers the right one
    too seldom it does not become the judge, and none after it does.

    Source: a judge of its own, arXiv 2505.08827; the lag, the audit and its bound are our own.
    """

    reward: str | None = None
    """Name of the reward whose judge is renewed, one that asks a model in a `path`; null is the only one."""
    truth: str | None = None
    """Name of a reward that says what the audited attempts are truly worth; null is 1 where the environment says that
    one was solved, else 0."""
    solved_at: float = 1.0
    """Truth from which an attempt is right."""
    every: Annotated[int, Field(ge=1)] = 20
    """Steps between two renewals, and least number of steps that a judge is behind."""
    min_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Least share of audited pairs of which a new judge has to prefer the right attempt; ½ is chance."""
    split: str = "dev"
    """Split of the audit's tasks."""
    tasks: Annotated[int, Field(ge=2)] = 64
    """Number of attempted audit tasks; those with no right attempt, or only right ones, are uninformative."""
    group_size: Annotated[int, Field(ge=2)] = 4
    """Attempts at each, of which one right and one wrong are audited."""

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
                "this names no reward that could be the truth",
                where=context.at("truth"),
                got=self.truth,
                expected=" or ".join(others) or "null",
                do=nearest(self.truth, others) or "remove the key: what the environment calls solved is then true",
            )
        yield from no_split(self.split, recipe.properties.splits, context.at("split"))
        if recipe.sharded:
            yield Problem(
                "a policy that lies in pieces cannot be copied to judge",
                where=context.path,
                got=f"a stage with {recipe.sharded_by}",
                expected=KEEPS_WHOLE,
                do="use such a trainer, or remove the key",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Tell of a renewal that never comes."""
        if self.every > context.stage.steps:
            yield f"{context.at('every')} is {self.every} and the stage has {context.stage.steps} steps"

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        yield in_one_process("models of rewards are renewed", context, n)


def doubled(preferred: Sequence[float]) -> list[bool]:
    """Each pair counted twice, so that a tie counts once: 1, ½ and 0 become two, one and none of two.

    Of a right verdict, a tie and a wrong one half are right: (1 + ½ + 0) / 3 = 3 / 6. An interval that knows which two
    belong together is no narrower for it.
    """
    return [found for x in preferred for found in (x > 0, x > 0.5)]
