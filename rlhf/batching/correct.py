"""From rows and the trainer's own log-probs to rows that say what becomes of each token.

It happens once in a step, over all rows and before they are split and packed, so that a trajectory is judged whole
however it is laid out in rows, and neither minibatches nor micro-batches change what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rlhf.batching.samples import Bools, Floats, Sample
from rlhf.errors import DataError
from rlhf.losses.correction import Correction, corrected
from rlhf.losses.mismatch import CorrectionInputs, mismatch_metrics


def correct(
    samples: Sequence[Sample], old_logprobs_RT: Sequence[Floats], correction: Correction
) -> tuple[list[Sample], dict[str, float]]:
    """Return the rows with the trainer's log-probs and their factors, and what is logged of the step.

    A token that the correction does not keep is masked in its row; rows of which nothing is kept are left out.

    Args:
        samples: the rows of a step.
        old_logprobs_RT: nats, of the policy tokens of each row.
        correction: is given all policy tokens of the step at once.

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
    inputs = CorrectionInputs(
        old_logprobs=_flat(old_logprobs_RT),
        sampler_logprobs=_flat([s.sampler_logprobs[s.mask] for s in samples]),
        advantages=_flat([s.advantages[s.mask] for s in samples]),
        sequence_ids=torch.from_numpy(np.repeat(np.array([s.sequence for s in samples], np.int64), counts)),
    )
    output = corrected(correction, inputs)
    kept = torch.ones(len(inputs.advantages), dtype=torch.bool) if output.kept is None else output.kept
    weights_RT, kept_RT = (np.split(x.numpy(), np.cumsum(counts, dtype=np.int64))[:-1] for x in (output.weights, kept))
    parts = zip(samples, old_logprobs_RT, weights_RT, kept_RT, strict=True)
    rows = [_row(s, old, weights, keep) for s, old, weights, keep in parts if keep.any()]
    return rows, mismatch_metrics(inputs, output)


def _flat(rows: Sequence[Floats]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *rows]))


def _row(sample: Sample, old: Floats, weights: Floats, keep: Bools) -> Sample:
    mask = np.zeros_like(sample.mask)
    mask[sample.mask] = keep

    def spread(values: Floats) -> Floats:
        row = np.zeros(len(mask), np.float32)
        row[mask] = values[keep]
        return row

    return replace(
        sample,
        mask=mask,
        sampler_logprobs=np.where(mask, sample.sampler_logprobs, np.float32(0)),
        advantages=np.where(mask, sample.advantages, np.float32(0)),
        old_logprobs=spread(old),
        entropy=None if sample.entropy is None else np.where(mask, sample.entropy, np.float32(0)),
        correction=spread(weights),
    )
