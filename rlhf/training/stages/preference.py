"""The preference stage: its recipe keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.stages.pair_settings import OnPairs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Preference(OnPairs):
    """Learn from pairs which of two attempts, or of two actions, is better: DPO, by TRL's trainer.

    With M = log π/π_ref of the chosen tokens minus the same of the rejected ones, the loss of a pair is −log σ(β M);
    with `ipo`, where log-ratios are means over the tokens, (M − 1/(2 β))². The reference is the policy before the first
    update, whose log-probs are computed once and take no memory. At M = 0 the loss of `dpo` is ln 2.

    Source: DPO, arXiv 2305.18290; IPO, arXiv 2310.12036; single actions, Step-DPO, arXiv 2406.18629; the imitation
    term, arXiv 2404.19733.
    """

    loss: Literal["dpo", "ipo"] = "dpo"
    """Preference loss."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull to the reference; larger stays nearer."""
    imitation_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy of the chosen tokens beside it, which keeps them from becoming less likely too."""
    reference: Literal["start", "base"] = "start"
    """Reference policy: the one at the stage's start, or the model under its adapter."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=5e-6, schedule="linear", warmup_steps=5))
    """Optimizer of the policy."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse, too, to compare with a base where there is no adapter over it."""
        yield from super().check(context)
        if self.reference == "base" and context.recipe.policy.lora is None:
            yield Problem(
                "there is no model under an adapter",
                where=context.at("reference"),
                got="base, and policy.lora is null",
                expected="start, or a policy with an adapter",
                do="use reference: start, or add policy.lora",
            )
