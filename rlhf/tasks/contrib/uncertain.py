"""Variance filter of groups (StarPO-S): train on those whose rewards vary most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.credit.groups import mean_and_std
from rlhf.data import ScoredGroup
from rlhf.losses.policy_loss import LossNeeds
from rlhf.settings import STRICT
from rlhf.tasks.group_metric import incomparable, measured
from rlhf.tasks.selection import Selection

Rule = Literal["top_k", "top_k_abs", "min_p", "top_p", "top_p_softmax", "reweight"]

_DEFAULT: Mapping[str, float] = {"top_k": 0.25, "top_p": 0.9, "top_p_softmax": 0.9}
#: How much less than its share of the deviations `top_p` is content with, in units of the metric.
_SLACK = 0.01


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Uncertain:
    """Uncertainty-based selection: keep the groups whose attempts differ most.

    Each group has u, the sample deviation of the metric over its attempts, 0 for fewer than two. The rule chooses by u:

    - `top_k`: the share `value` of the groups, rounded down, at least one;
    - `top_k_abs`: `value` groups, at least one;
    - `min_p`: all with u ≥ value · max u;
    - `top_p`: the largest, until their u add up to value · Σ u − 0.01;
    - `top_p_softmax`: the largest, until their softmax(u) add up to `value`;
    - `reweight`: all, with advantages times u / (max u + 1e-6) instead of a cut.

    Of u = 0, .5, .1, .4, `top_k` .5 keeps the second and the fourth, and so does `top_p` .8: .5 + .4 ≥ .79. `top_p` and
    `top_p_softmax` keep all with value 1, and at least one group where any u is above 0. Equal u keep their order.

    Source: Wang et al., RAGEN, arXiv 2504.20073 (StarPO-S keeps .25), and its later rollout filter.
    """

    rule: Rule = "top_k"
    """Selection rule."""
    value: Annotated[float, Field(ge=0)] | None = None
    """Parameter of the rule: a share of at most 1, for `top_k_abs` a whole number. By default .25 for `top_k` and .9
    for `top_p` and `top_p_softmax`; `reweight` takes none."""
    metric: str = "score"
    """Metric of the standard deviation: `score`, `success`, or `reward/<name>`, one unweighted reward."""
    drop_equal: bool = True
    """Drop groups with zero variance before the rule is applied. false is for critics, which give these advantages too.
    """
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the advantages by the share of kept groups, or its square root, so that steps with fewer groups have
    smaller updates."""
    max_empty_steps: Annotated[int, Field(ge=1)] | None = 5
    """Stop the run after this many consecutive steps without training data; null never stops."""

    def __post_init__(self) -> None:
        value = self.value
        if self.rule == "reweight" and value is not None:
            raise ValueError(f"value: {value} has no effect: reweight keeps every group")
        if value is None and self.rule in ("top_k_abs", "min_p"):
            raise ValueError(f"rule: {self.rule} needs a value")
        if value is None:
            return
        if self.rule == "top_k_abs" and (value < 1 or value != int(value)):
            raise ValueError(f"value: {value} is no number of groups; top_k_abs takes a whole number from 1 on")
        if self.rule != "top_k_abs" and value > 1:
            raise ValueError(f"value: {value} is above 1; top_k_abs takes a number of groups, {self.rule} a share")
        if self.rule != "top_k_abs" and value == 0:
            raise ValueError(f"value: 0 leaves {self.rule} no threshold")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a metric that the rewards do not have, groups of one, and a loss that takes no factors."""
        yield from incomparable("selection", self, context)
        loss, scales = context.stage.loss, self.rule == "reweight" or self.scaling != "none"
        if scales and LossNeeds(loss).needs_unscaled_advantages:
            key, other = ("rule", "top_k") if self.rule == "reweight" else ("scaling", "none")
            yield Problem(
                "this selection multiplies the advantages, and the loss reads shares of right attempts off them",
                where=context.at(key),
                got=f"{getattr(self, key)}, with loss {context.kind_of('loss', loss)}",
                expected="advantages as the estimator gives them",
                do=f"use {key}: {other}, or another loss",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about groups that a critic could have learnt from."""
        if context.stage.critic is not None and self.drop_equal:
            yield f"{context.path} drops groups whose attempts are equal, where a critic still gives an advantage"

    def __call__(self, groups: Sequence[ScoredGroup], n_tasks: int, n_rounds: int) -> Selection:
        """Keep the groups that the rule chooses."""
        u = [mean_and_std(measured(group, self.metric))[1] for group in groups]
        candidates = [i for i, x in enumerate(u) if x > 0 or not self.drop_equal]
        by_u = sorted(candidates, key=lambda i: -u[i])
        kept = tuple(sorted(by_u[: self._n_kept([u[i] for i in by_u], len(groups))]))
        share = len(kept) / max(len(groups), 1)
        factor = {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[self.scaling]
        if self.rule == "reweight":
            return Selection(kept, factors=tuple(factor * u[i] / (max(u) + 1e-6) for i in kept))
        return Selection(kept, factors=None if self.scaling == "none" else (factor,) * len(kept))

    def _n_kept(self, falling: Sequence[float], n_groups: int) -> int:
        """Return how many of the candidates to keep, whose deviations fall."""
        value = _DEFAULT.get(self.rule, 1.0) if self.value is None else self.value
        if not falling or self.rule == "reweight":
            return len(falling)
        if self.rule in ("top_k", "top_k_abs"):
            n = math.floor(value * n_groups + 1e-9) if self.rule == "top_k" else int(value)
            return max(n, 1)
        if self.rule == "min_p":
            return sum(x >= value * falling[0] - 1e-10 for x in falling)
        if value >= 1:
            return len(falling)
        if self.rule == "top_p":
            return _n_until(falling, value * math.fsum(falling) - _SLACK)
        weights = [math.exp(x - falling[0]) for x in falling]
        return _n_until(weights, value * math.fsum(weights))


def _n_until(falling: Sequence[float], threshold: float) -> int:
    """Length of the shortest prefix of numbers that sums to `threshold`, at least one above 0."""
    total, n = 0.0, 0
    for x in falling:
        if x <= 0 or (n and total >= threshold):
            break
        total, n = total + x, n + 1
    return n
