"""Old log-probs before a step's first update, and correction of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf.batching.corrected_rows import correct
from rlhf.batching.filters import high_entropy
from rlhf.batching.samples import Floats, Sample, placed
from rlhf.errors import TrainingError, boundary
from rlhf.inference.embedded.model_probe import has_dropout
from rlhf.losses.importance_correction import Bypass, Correction, CorrectionCapabilities
from rlhf.losses.policy_loss import LossNeeds
from rlhf.training.backends.token_stats import Figure
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.stages.policy_gradient import PolicyGradient


def prepare(
    stage: PolicyGradient, trainer: TorchTrainer, samples: Sequence[Sample], *, shares_policy: bool
) -> tuple[Sequence[Sample], dict[str, float], Correction | None]:
    """Rows to train on, their metrics, and the correction left to the update itself.

    - An engine that shares the trainer's weights reports the trainer's log-probs, and `bypass` trusts the engine's:
      nothing is computed, the engine's log-probs are the old ones.
    - A step of one update without replay, whose correction looks at single tokens, finds the old log-probs in the
      update: those of the policy before it moves. They cost nothing. With dropout they would be another's.
    - Everything else takes one forward pass without gradient over the rows of the step, and so does the entropy of
      their tokens where `filters.high_entropy_share` asks for it; what it leaves out it leaves out last. The same pass
      gives the mean log-probs to a loss that compares them with later ones, and the experts of each token where their
      routing is replayed.

    Args:
        stage: whose rows these are.
        trainer: holds the weights that sampled.
        samples: the rows of the step.
        shares_policy: whether the engine samples from the trainer's very parameters.

    Raises:
        TrainingError: the correction raised.
        DataError: it gave what does not fit the tokens.
    """
    share, wanted = stage.filters.high_entropy_share, _wanted(stage)
    if not (wanted or stage.routing_replay) or not samples:
        return _corrected(stage, trainer, samples, shares_policy=shares_policy)
    budget = stage.max_tokens_per_microbatch
    routing, temperature = stage.routing_replay, stage.temperature
    found = trainer.compute_token_stats(samples, wanted, temperature=temperature, max_tokens=budget, routing=routing)
    if routing:
        samples = [replace(s, routing=experts) for s, experts in zip(samples, found["routing"], strict=True)]
    if "entropy" in found:
        samples = [replace(s, entropy=placed(e, s.mask)) for s, e in zip(samples, found["entropy"], strict=True)]
    if "mean_logprobs" in found:
        means_RT = zip(samples, found["mean_logprobs"], strict=True)
        samples = [replace(s, old_mean_logprobs=placed(means, s.mask)) for s, means in means_RT]
    samples, values, rest = _corrected(stage, trainer, samples, shares_policy=shares_policy, old=found["logprobs"])
    if share is None:
        return samples, values, rest
    rows, counters = high_entropy(samples, share)
    return rows, {**values, **counters}, rest


def _wanted(stage: PolicyGradient) -> list[Figure]:
    """Figures needed of the policy before the first update, beside log-probs."""
    is_old = stage.epochs * stage.minibatches > 1 or stage.replay is not None
    compared = LossNeeds(stage.loss).needs_mean_logprobs and is_old
    entropy: list[Figure] = ["entropy"] if stage.filters.high_entropy_share is not None else []
    return entropy + (["mean_logprobs"] if compared else [])


def _corrected(
    stage: PolicyGradient,
    trainer: TorchTrainer,
    samples: Sequence[Sample],
    *,
    shares_policy: bool,
    old: list[Floats] | None = None,
) -> tuple[Sequence[Sample], dict[str, float], Correction | None]:
    correction = stage.correction
    if shares_policy or isinstance(correction, Bypass) or not samples:
        return samples, {}, None
    is_one_update = stage.epochs * stage.minibatches == 1 and stage.replay is None and stage.offline_data is None
    drops = has_dropout(trainer.policy.model)
    if old is None and is_one_update and not drops and CorrectionCapabilities(correction).per_token:
        return samples, {}, correction
    if old is None:
        old = trainer.compute_logprobs(
            samples, temperature=stage.temperature, max_tokens=stage.max_tokens_per_microbatch
        )
    with boundary(TrainingError, where="the correction of trainer and engine"):
        rows, values = correct(samples, old, correction)
    return rows, values, None
