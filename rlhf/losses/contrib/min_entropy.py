"""Entropy minimisation: no reward, the policy's own entropy as the loss."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.regularized import Regularized, given
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MinEntropy(Regularized):
    """Entropy minimisation: l = H(π) of the next token at the stage's temperature; ignores advantages.

    A model that is right more often than not where it is sure gets better for some ten updates, then collapses to one
    answer: stop early, and watch the evaluation. The method takes one task, samples at temperature 0.5 and takes the
    entropy at 0.5 too, which is what `temperature: 0.5` of the stage means. A distribution of .5, .25, .25 has entropy
    1.039721, and .867563 at temperature 0.5.

    Source: One-shot entropy minimization, arXiv 2505.20282.
    """

    #: True, as it needs `LossInputs.entropy`.
    needs_entropy: ClassVar[bool] = True

    needs_score: ClassVar[bool] = False
    in_equal_groups: ClassVar[str] = "looks at no advantage"
    needs_fresh_samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_coef:
            raise ValueError(f"entropy_coef: {self.entropy_coef} raises the entropy that this loss lowers; remove it")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        return self.output(inputs, given(inputs.entropy, "entropy"))
