"""Samples: one flat token row with aligned mask, log-probs and advantages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhf.errors import DataError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row for the trainer; all arrays `[L]`.

    Attributes:
        token_ids: prompt, sampled and observation tokens as the model saw and made them.
        mask: True on tokens the policy sampled, and nowhere else; never on the first token.
        sampler_logprobs: nats, 0 where the mask is False.
        advantages: 0 where the mask is False.
        sequence: number of the trajectory this row belongs to, unique within the step.
        group: number of the task group, unique within the step.
    """

    token_ids: Ints
    mask: Bools
    sampler_logprobs: Floats
    advantages: Floats
    sequence: int
    group: int

    def __post_init__(self) -> None:
        lengths = {len(a) for a in (self.token_ids, self.mask, self.sampler_logprobs, self.advantages)}
        if len(lengths) != 1:
            raise DataError("ids, mask, log-probs and advantages differ in length", where="Sample", got=str(lengths))
        if len(self.mask) and self.mask[0]:
            raise DataError("the first token of a row cannot be trained", where="Sample.mask", got="mask[0] is True")
        off = ~self.mask
        if self.sampler_logprobs[off].any() or self.advantages[off].any():
            raise DataError("an observation token carries an advantage or a log-prob", where="Sample")
        if not (np.isfinite(self.advantages).all() and np.isfinite(self.sampler_logprobs).all()):
            raise DataError("advantages and log-probs must be finite", where="Sample")
