"""The KL coefficient of a loss whose `kl_target` is set: a number that a step leaves to the next.

It is part of the run's state, so that a resumed run goes on with the very same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf.batching.samples import Sample
from rlhf.losses.regularized import Regularized
from rlhf.training.stages.policy_gradient import PolicyGradient


def with_kl_coef(stage: PolicyGradient, kl_coef: float | None) -> PolicyGradient:
    """Return the stage with the coefficient of the present step; None is the recipe's."""
    if kl_coef is None or not isinstance(stage.loss, Regularized):
        return stage
    return replace(stage, loss=replace(stage.loss, kl_coef=kl_coef))


def next_kl_coef(stage: PolicyGradient, values: Mapping[str, float], samples: Sequence[Sample]) -> float | None:
    """Return the coefficient of the step after this one, or None where none is adapted.

    Args:
        stage: as it was in this step.
        values: what its updates logged; without any, the coefficient stays.
        samples: the rows of the step.
    """
    if not isinstance(stage.loss, Regularized) or stage.loss.kl_target is None:
        return None
    n_trajectories = len({s.sequence for s in samples})
    divergence = values.get("loss/kl_ref")
    return stage.loss.kl_coef if divergence is None else stage.loss.next_kl_coef(divergence, n_trajectories)
