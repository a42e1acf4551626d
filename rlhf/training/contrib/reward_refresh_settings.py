"""Recipe keys of a reward refresh, and the preservation of its reward's scale.

Held-out pairs are of the policy that made them. A policy that has moved says other things, of which the model knows
less, and it moves where the model is wrong in its favour. So every few steps the model learns from what the policy does
now, with labels that are true.

A model of pairs fixes differences up to a factor: the surer it grows, the larger they get, and where 0 lies is nobody's
concern. What is made of scores (a sum with other rewards, a critic's values, an advantage that is not divided by a
deviation) is concerned. So a version x is served as a x + b, with the mean and deviation that the version before it
was served with, on the same attempts. Of outcomes and steps the model says probabilities, which mean what they say and
are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.models.model_folder import ModelReward, nodes_of
from rlhf.checking import CheckContext, Problem, in_one_process, unused
from rlhf.errors import DataError, nearest
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.named_reward import unnamed


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardRefresh:
    """Online training of the policy's reward model, on the policy's current attempts.

    After every `every` steps it learns from the attempts made since the last time, with labels of `truth`, and from
    attempts before them. Some tasks are held out: their attempts are never learnt from, and say how often the model is
    right before and after. The policy's own weights are not touched.

    Source: the idea is that of reward learning on policy, arXiv 2403.19279; labels, shares and scale are our own.
    """

    reward: str | None = None
    """Name of the reward model to train, of kind `reward_model`, `outcome_model` or `process_model`; null is the only
    one."""
    truth: str | None = None
    """Name of the ground-truth reward, with `weight: 0` if the policy is not to be trained on it; null is 1 if the
    environment reports success, else 0."""
    every: Annotated[int, Field(ge=1)] = 10
    """Steps between refreshes."""
    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of training data from earlier policies of the stage, if available."""
    capacity: Annotated[int, Field(ge=1)] = 2048
    """Buffer capacity in pairs or attempts of earlier policies (reservoir sampling)."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of tasks held out to evaluate the model."""
    success_threshold: float = 1.0
    """Ground-truth value from which an attempt is correct, for outcome and process models."""
    eta: Annotated[float, Field(ge=0)] = 1.0
    """η of the labels of steps, see `{kind: reward_model}`."""
    max_per_task: Annotated[int, Field(ge=1)] = 4
    """Maximum pairs per task and step, for pairwise models; largest differences first."""
    centring: Annotated[float, Field(ge=0)] = 0.01
    """c of the loss of pairs, see `{kind: reward_model}`."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs over the training data."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Pairs or attempts per update."""
    pairs_per_microbatch: Annotated[int, Field(ge=1)] = 8
    """Pairs or attempts per forward pass; changes memory and speed only."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=1e-5))
    """Optimizer of the reward model; its moments persist between refreshes."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse names of no reward model and of no truth, keys of other models, and a schedule."""
        rewards = context.recipe.trained_rewards
        found = [name for name, weighted in rewards.items() if isinstance(weighted.reward, ModelReward)]
        example = "rewards: {learned: {kind: reward_model}}"
        wrong = list(unnamed(context.at("reward"), self.reward, found, "reward model", example))
        if wrong:
            yield from wrong
            return
        reward: Any = rewards[self.reward or found[0]].reward
        if nodes_of(reward.path) is not None:
            yield Problem(
                "a model trained on marked nodes cannot be trained further on unmarked turns",
                where=context.path,
                got=f"a reward model that was trained with merge: {reward.path}",
                expected="a model of a stage without the key merge",
                do="remove reward_refresh, or train the model without merge",
            )
        why = f"the reward is a {context.kind_of('reward', reward)}"
        yield from unused(self, reward.unrefreshed, context.path, why)
        if self.optimizer.schedule != "constant":
            yield Problem(
                "the number of updates is unknown, so the learning rate cannot decay over them",
                where=context.at("optimizer.schedule"),
                got=self.optimizer.schedule,
                expected="constant",
                do="remove the key",
            )
        yield from self._untrue(context)

    def _untrue(self, context: CheckContext) -> Iterator[Problem]:
        """Yield a problem where `truth` names no reward to learn from."""
        truth, recipe = self.truth, context.recipe
        if truth is None:
            return
        others = [name for name in recipe.trained_rewards if name != self.reward]
        watched = truth in recipe.rewards and truth not in recipe.trained_rewards
        if truth not in others or (self.reward is None and isinstance(recipe.rewards[truth].reward, ModelReward)):
            remove = "remove the key: what the environment calls solved is then true"
            unwatch = f"write weight: 0 in place of monitor in rewards.{truth}, or add a second reward to watch"
            yield Problem(
                "a monitored reward cannot be trained on" if watched else "this reward cannot be the ground truth",
                where=context.at("truth"),
                got=truth,
                expected="the name of another reward, or null",
                do=unwatch if watched else nearest(truth, others) or remove,
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about a refresh that never comes."""
        if self.every > context.stage.steps:
            yield f"{context.at('every')} is {self.every} and the stage has {context.stage.steps} steps"

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        yield in_one_process("reward models are refreshed", context, n)


def kept_scale(
    before: Sequence[float], after: Sequence[float], scale: tuple[float, float] = (1.0, 0.0)
) -> tuple[float, float]:
    """Affine (a, b) that gives a · after + b the mean and deviation of a₀ · before + b₀.

    Numbers 1 and 3 that became 0 and 8: the deviation 1 became 4 and the mean 2 became 4, so a = 1/4 and b = 2 − 1 = 1,
    and 0 and 8 are served as 1 and 3. Where all are equal, before or after, a stays and the mean alone is kept.

    Args:
        before: `[N]` what the older version says of some attempts, unscaled.
        after: `[N]` what the newer version says of the same.
        scale: (a₀, b₀) of the older version.

    Raises:
        DataError: there are no numbers, or not as many of one as of the other.
    """
    if not before or len(before) != len(after):
        raise DataError(
            "two versions of a reward model are compared on the same attempts",
            where="kept_scale",
            got=f"{len(before)} and {len(after)} numbers",
            expected="as many of each, and at least one",
        )
    a, b = scale
    mean, deviation, own = a * fmean(before) + b, a * pstdev(before), pstdev(after)
    if deviation > 0 and own > 0 and math.isfinite(deviation / own):
        a = deviation / own
    return a, mean - a * fmean(after)
