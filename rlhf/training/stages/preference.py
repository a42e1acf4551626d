"""The preference stage: its recipe keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, unused
from rlhf.rollout.group_structure import GroupStructure, Independent
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.stages.pair_settings import PairStage, made_as


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Preference(PairStage):
    """Learn from pairs which of two attempts, or of two actions, is better: DPO, IPO or KTO, by TRL's trainers.

    With M = log π/π_ref of the chosen tokens minus the same of the rejected ones, the loss of a pair is −log σ(β M);
    with `ipo`, where log-ratios are means over the tokens, (M − 1/(2 β))². The reference is the policy before the first
    update, whose log-probs are computed once and take no memory. At M = 0 the loss of `dpo` is ln 2.

    With `reference: none` log π_ref is 0: −log σ(β (Σ log π of the chosen − Σ log π of the rejected)), contrastive
    preference learning where segments of several turns are compared (`pairs.turns`), without its bias and discount.

    `kto` takes replies that are good or bad each, of a file with prompt, completion and label, or both sides of pairs.
    With r = log π/π_ref of a reply and z ≥ 0 the mean of it over replies to other prompts of the forward pass, the loss
    is λ (1 − σ(β (r − z))) of a good one and 1 − σ(β (z − r)) of a bad one.

    Source: DPO, arXiv 2305.18290; IPO, arXiv 2310.12036; KTO, arXiv 2402.01306; single actions, Step-DPO, arXiv
    2406.18629; the imitation term, arXiv 2404.19733; without a reference, CPL, arXiv 2310.13639; the oracle's actions
    against the policy's, StepAgent's implicit reward, arXiv 2411.03817; pairs of a planner with an imitation term, EPO,
    arXiv 2408.16090; branches of a tree, arXiv 2402.10184.
    """

    loss: Literal["dpo", "ipo", "kto"] = "dpo"
    """Preference loss."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """λ of `kto`: weight of desirable relative to undesirable replies; about k if the latter are k times as many."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the KL regularisation; larger stays closer to the reference."""
    sft_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of an additional SFT loss on the chosen tokens, which prevents their likelihood from decreasing too;
    TRL's `rpo_alpha`, OpenRLHF's `nll_loss_coef`."""
    reference: Literal["start", "base", "none"] = "start"
    """Reference policy: the policy at the stage's start, the base model of its adapter, or none."""
    rollout: GroupStructure = Field(default_factory=Independent)
    """Group structure of the attempts: independent, or trees that branch at a turn."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=5e-6, schedule="linear", warmup_steps=5))
    """Optimizer of the policy."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse, too, to compare with a base where there is no adapter over it."""
        yield from super().check(context)
        if self.loss == "kto":
            why = "loss: kto learns from single replies"
            yield from unused(self, ("sft_coef",), context.path, why)
            if self.at_once == 1:
                yield Problem(
                    "a micro-batch of one reply has no other prompts for the KL estimate",
                    where=context.at("pairs_per_microbatch"),
                    got="1",
                    expected="at least 2 for loss: kto",
                    do="raise pairs_per_microbatch and batch_size",
                )
        else:
            yield from unused(self, ("desirable_weight",), context.path, f"it is λ of kto, and loss is {self.loss}")
        if self.reference == "base" and context.recipe.policy.lora is None:
            yield Problem(
                "the policy has no adapter, so no base model",
                where=context.at("reference"),
                got="base, and policy.lora is null",
                expected="start, or a policy with an adapter",
                do="use reference: start, or add policy.lora",
            )
        yield from made_as(self, context)
