"""Advantage of groups in which some attempts read the events of their task shuffled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import AdvantageEstimator, compute_advantages, missing_part
from rlhf.credit.groups import group_returns, with_counters
from rlhf.credit.grpo import GRPO
from rlhf.data import Credit, Score, ScoredGroup, Trajectory, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EventOrder:
    """Another estimator over the attempts that read in order, right ones worth α more if order helped.

    An attempt is right if its score is at least `min_correct`. With p the share of right ones among the attempts in
    order and p̃ that among the shuffled ones, a right attempt in order is worth R + α where p ≥ μ p̃ and p > 0, and R
    elsewhere: a question that is answered as well without the order teaches less. `inner` compares the attempts in
    order; the shuffled ones have the advantage 0 and no rows in the update, so that nothing is learnt from them.

    Scores (1, 0) in order and (0) shuffled: p = .5 ≥ .8 · 0, so the scores become (1.3, 0). With (1) shuffled: .5 < .8,
    and they stay (1, 0). By `dr_grpo`: (.65, −.65, 0) and (.5, −.5, 0). Without attempts of either sort nothing is
    added.

    Sources: TimeHC-RL, arXiv 2505.24500; α and μ of T-GRPO's code, Video-R1, arXiv 2503.21776.
    """

    needs_values: ClassVar[bool] = False

    inner: AdvantageEstimator = Field(default_factory=GRPO)
    """The estimator of the attempts in order."""
    every: Annotated[int, Field(ge=2)] = 3
    """The same as that of the rollout."""
    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    """α, the bonus of correct attempts."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    """μ: p must be at least μ p̃."""
    min_correct: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Minimum score of a correct attempt."""

    @property
    def min_group(self) -> int:
        """Smallest group size that holds a shuffled attempt and gives `inner` any signal."""
        return max(self.every, self.inner.min_group + 1)

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse other rollouts, another `every`, and estimators with a critic."""
        rollout = context.stage.rollout
        is_shuffled = context.kind_of("rollout", rollout) == "shuffled_events"
        if not is_shuffled and not context.is_trained:
            do = "set rollout: {kind: shuffled_events}, or use another estimator"
            yield missing_part(self, context, "no attempt has shuffled events", do)
        if is_shuffled and rollout.every != self.every:
            yield Problem(
                "the shuffled attempts are not the compared ones",
                where=context.at("every"),
                got=f"{self.every}, and {context.stage_path}.rollout.every {rollout.every}",
                expected="the same number",
                do=f"write {rollout.every} here",
            )
        if self.inner.needs_values:
            yield Problem(
                "a critic would value attempts that are not trained on",
                where=context.at("inner"),
                got=context.kind_of("advantage", self.inner),
                expected="an estimator without a critic",
                do="use inner: {kind: grpo}",
            )

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group])[0]

    def over_batch(self, groups: Sequence[ScoredGroup], values: Sequence[Values] | None = None) -> list[Credit]:
        """Return the credit of each group of a step."""
        cut = [self._in_order(group) for group in groups]
        inner = compute_advantages(self.inner, [kept for kept, _ in cut])
        credits = []
        for group, credit in zip(groups, inner, strict=True):
            rows = iter(credit.advantages_GNT)
            tokens = tuple(
                tuple((0.0,) * g.n_tokens for g in t.generations) if self._is_shuffled(t) else next(rows)
                for t in group.trajectories
            )
            trains = tuple(not self._is_shuffled(t) for t in group.trajectories)
            credits.append(replace(credit, advantages_GNT=tokens, train_mask_G=trains))
        return with_counters(credits, {"credit/n_order_bonus_groups": float(sum(helped for _, helped in cut))})

    def _is_shuffled(self, trajectory: Trajectory) -> bool:
        return not trajectory.is_demonstration and (trajectory.attempt + 1) % self.every == 0

    def _in_order(self, group: ScoredGroup) -> tuple[ScoredGroup, bool]:
        """The attempts in order, with the scores that they are compared by, and whether order helped."""
        is_right = [r >= self.min_correct for r in group_returns(group)]
        told = [self._is_shuffled(t) for t in group.trajectories]
        right, right_shuffled = ([x for x, s in zip(is_right, told, strict=True) if s is of] for of in (False, True))
        helped = False
        if right and right_shuffled:
            p, shuffled = sum(right) / len(right), sum(right_shuffled) / len(right_shuffled)
            helped = p > 0 and p >= self.margin * shuffled
        own = [i for i, is_shuffled in enumerate(told) if not is_shuffled]
        scores = tuple(_raised(group.scores[i], self.alpha) if helped and is_right[i] else group.scores[i] for i in own)
        return replace(group, trajectories=tuple(group.trajectories[i] for i in own), scores=scores), helped


def _raised(score: Score, by: float) -> Score:
    """The score with a bonus added to its last turn; unchanged without turns."""
    turns = (*score.turns[:-1], score.turns[-1] + by) if score.turns else ()
    return replace(score, turns=turns, total=score.total + by)
