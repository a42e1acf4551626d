"""From rows and the trainer's own log-probs to rows that say what becomes of each token.

It happens once in a step, over all rows and before they are split and packed, so that a trajectory is judged whole
however it is laid out in rows, and neither minibatches nor micro-batches change what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rlhf.batching.samples import Bools, Floats, Sample, placed
from rlhf.errors import DataError
from rlhf.losses.importance_correction import Correction, corrected
from rlhf.losses.mismatch import CorrectionInputs, mismatch_metrics


def correct(
    samples: Sequence[Sample], old_logprobs_RT: Sequence[Floats], correction: Correction
) -> tuple[list[Sample], dict[str, float]]:
    """Return the rows with the trainer's log-probs and their factors, and what is logged of the step.

    A token that the correction does not keep is masked in its row; rows of which nothing is kept are left out. Tokens
    that no engine sampled (`Sample.off_policy`) are kept with factor 1, and the correction is not shown them.

    Args:
        samples: the rows of a step.
        old_logprobs_RT: nats, of the policy tokens of each row.
        correction: is given all tokens of the step that the engine sampled at once.

    Raises:
        DataError: log-probs do not match the rows, or the correction gives what does not fit or is not finite.
    """
    counts = [s.n_policy_tokens for s in samples]
    if [len(row) for row in old_logprobs_RT] != counts:
        raise DataError(
            "log-probs do not match the rows",
            where="correct",
            got=str([len(row) for row in old_logprobs_RT]),
            expected=str(counts),
        )
    sampled = torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *map(_sampled, samples)]))
    sequences = np.repeat(np.array([s.sequence for s in samples], np.int64), counts)
    inputs = CorrectionInputs(
        old_logprobs=_flat(old_logprobs_RT)[sampled],
        sampler_logprobs=_flat([s.sampler_logprobs[s.mask] for s in samples])[sampled],
        advantages=_flat([s.advantages[s.mask] for s in samples])[sampled],
        trajectory_ids=torch.from_numpy(sequences)[sampled],
    )
    output = corrected(correction, inputs)
    weights, kept = torch.ones(len(sampled)), torch.ones(len(sampled), dtype=torch.bool)
    weights[sampled] = output.weights.float()
    if output.kept is not None:
        kept[sampled] = output.kept
    weights_RT, kept_RT = (np.split(x.numpy(), np.cumsum(counts, dtype=np.int64))[:-1] for x in (weights, kept))
    parts = zip(samples, old_logprobs_RT, weights_RT, kept_RT, strict=True)
    rows = [_row(s, old, weights, keep) for s, old, weights, keep in parts if keep.any()]
    return rows, mismatch_metrics(inputs, output)


def _flat(rows: Sequence[Floats]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *rows]))


def _sampled(sample: Sample) -> Bools:
    """Of its policy tokens, which the engine sampled."""
    return np.ones(sample.n_policy_tokens, np.bool_) if sample.off_policy is None else ~sample.off_policy[sample.mask]


def _row(sample: Sample, old: Floats, weights: Floats, keep: Bools) -> Sample:
    mask = np.zeros_like(sample.mask)
    mask[sample.mask] = keep
    kept = [placed(np.where(keep, values, np.float32(0)), sample.mask) for values in (old, weights)]
    return replace(sample.masked(mask), old_logprobs=kept[0], correction=kept[1])
