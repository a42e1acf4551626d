"""Before the first update of a step: the trainer's own log-probs, and what is done about the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.batching.correct import correct
from rlhf.batching.samples import Sample
from rlhf.errors import TrainingError, boundary
from rlhf.losses.correction import Bypass, Correction
from rlhf.trainers.policy_gradient import PolicyGradient
from rlhf.trainers.trainer import TorchTrainer


def prepare(
    stage: PolicyGradient, trainer: TorchTrainer, samples: Sequence[Sample], *, shares_policy: bool
) -> tuple[Sequence[Sample], dict[str, float], Correction | None]:
    """Return the rows to train on, what is logged of them, and the correction that is left to the update itself.

    - An engine that shares the trainer's weights reports the trainer's log-probs, and `bypass` trusts the engine's:
      nothing is computed, the engine's log-probs are the old ones.
    - A step of one update whose correction looks at single tokens finds the old log-probs in the update: those of the
      policy before it moves. They cost nothing.
    - Everything else takes one forward pass without gradient over the rows of the step.

    Args:
        stage: whose rows these are.
        trainer: holds the weights that sampled.
        samples: the rows of the step.
        shares_policy: whether the engine samples from the trainer's very parameters.

    Raises:
        TrainingError: the correction raised.
        DataError: it gave what does not fit the tokens.
    """
    correction = stage.correction
    if shares_policy or isinstance(correction, Bypass) or not samples:
        return samples, {}, None
    if stage.epochs * stage.minibatches == 1 and getattr(correction, "per_token", False):
        return samples, {}, correction
    old = trainer.score(samples, temperature=stage.temperature, max_tokens=stage.max_tokens_per_microbatch)
    with boundary(TrainingError, where="the correction of trainer and engine"):
        rows, values = correct(samples, old, correction)
    return rows, values, None
