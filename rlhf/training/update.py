"""Policy update of a step: token rows in, optimizer updates, metrics out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, sample_counters
from rlhf.processes import current
from rlhf.training.backends.microbatch_stats import over_updates
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.hooks.base import StageHook
from rlhf.training.old_logprobs import prepare
from rlhf.training.stages.policy_gradient import PolicyGradient


def update(
    stage: PolicyGradient,
    trainer: TorchTrainer,
    samples: Sequence[Sample],
    rng: np.random.Generator,
    shares: bool,
    hooks: Sequence[StageHook] = (),
) -> dict[str, float]:
    """`epochs` passes over the samples, each in `minibatches` updates; a step left with nothing trains nothing.

    What `hooks` add joins the samples when their old log-probs are known, and keeps its own.
    """
    n_skipped = trainer.n_skipped
    samples, mismatch, correction = prepare(stage, trainer, samples, shares_policy=shares)
    totals = {name: [value] for name, value in mismatch.items()}
    for hook in hooks:
        samples, filled = hook.extend_samples(samples, rng)
        totals |= {name: [value] for name, value in filled.items()}
    for _ in range(stage.epochs if samples else 0):
        budget, n_least = stage.max_tokens_per_microbatch, trainer.n_processes
        for batches in pack_minibatches(samples, stage.minibatches, stage.reduction, budget, rng, n_least=n_least):
            values = trainer.update(batches, stage.loss, temperature=stage.temperature, correction=correction)
            for name, value in values.items():
                # Only before the first update do trainer and engine hold the same weights.
                if "/sampler_" not in name or name not in totals:
                    totals.setdefault(name, []).append(value)
    merged = {name: over_updates(name, values) for name, values in totals.items()}
    if trainer.routing is not None:
        parts = current().gather(trainer.routing.changed(), "the routing of an update")
        n, of = (sum(column) for column in zip(*parts, strict=True))
        merged["routing/changed_share"] = n / max(of, 1)
    n_skipped = trainer.n_skipped - n_skipped
    counts = {"optimizer/n_updates": trainer.n_updates, "optimizer/n_skipped": n_skipped}
    counts["batch/n_trained_trajectories"] = len({s.sequence for s in samples})
    return merged | sample_counters(samples) | {name: float(n) for name, n in counts.items()}
