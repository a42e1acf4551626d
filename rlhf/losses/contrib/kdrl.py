"""KDRL: clipped surrogate, plus reverse KL to a teacher on the student's samples (distillation)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem, no_model
from rlhf.losses.kl import kl_estimate
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.regularized import given
from rlhf.settings import STRICT

Teach = Literal["all", "wrong", "silent_groups"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KDRL(PPOClip):
    """PPO with distillation (KDRL): l = l_PPO + β k2(log π − log π_T) on taught tokens, k2(d) = d² / 2.

    The student's own samples are scored by a teacher of the same tokenizer, once per step, and the student is drawn to
    it with the unbiased gradient of KL(π ‖ π_T), while the reward decides where the two part. β falls linearly over the
    steps of the stage. d = .3 gives k2 = .045, and half-way β = .003. Both terms are reduced with the same weights; a
    token that is not taught has 0 in the second.

    An attempt is right if its score is above `correct_above`. In a silent group all attempts score the same;
    those without a right one teach nothing else (set `filters.drop_zero_advantage` to false, which leaves them out).
    Where no reward has a weight, what is left with `teach: all` is on-policy distillation, and β the scale of the loss.

    Source: KDRL, arXiv 2506.02208; no code is public: what is masked, and that the schedule lasts as long as the stage,
    are this project's.
    """

    in_equal_groups: ClassVar[str] = "teaches attempts of any group"
    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("teach", "all", ("correct_above",)),)

    teacher: str
    """Model folder or hub name; its tokenizer must be the policy's."""
    teacher_coef: Annotated[float, Field(ge=0)] = 5e-3
    """β in the first step, in units of loss per nat."""
    teacher_coef_end: Annotated[float, Field(ge=0)] = 1e-3
    """β in the last step."""
    teach: Teach = "all"
    """Attempts to distil: all, the wrong ones, or those of groups without a correct attempt."""
    correct_above: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """An attempt with a higher score is correct."""

    @property
    def needs_score(self) -> bool:
        """True unless all attempts are taught, whatever they score."""
        return self.teach != "all"

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a folder without a model, and a teacher of groups that are left out."""
        yield from no_model(self.teacher, context.at("teacher"), "a run keeps its policy in checkpoints/NAME/policy")
        if self.teach == "silent_groups" and context.stage.filters.drop_zero_advantage:
            yield Problem(
                "the teacher applies to groups with equal scores, and these are left out",
                where=f"{context.stage_path}.filters.drop_zero_advantage",
                got="true",
                expected="false with loss.teach: silent_groups",
                do="set it to false, or use loss.teach: wrong",
            )

    def at(self, step: int, n_steps: int) -> KDRL:
        """Return the loss of a step, counted from 0: `teacher_coef` is the present β.

        A lone step has β of the first. Half-way from .005 to .001: .003.
        """
        share = step / (n_steps - 1) if n_steps > 1 else 0.0
        return replace(self, teacher_coef=self.teacher_coef + (self.teacher_coef_end - self.teacher_coef) * share)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        policy, theirs = inputs.policy_logprobs, given(inputs.teacher_logprobs, "teacher_logprobs")
        taught = ~theirs.isnan()
        k2 = kl_estimate("k2", policy, torch.where(taught, theirs, policy.detach()))
        term = self.teacher_coef * (inputs.weights * k2).sum()
        output = super().__call__(inputs)
        metrics = {
            **output.metrics,
            "loss/total": output.metrics["loss/total"] + term.detach(),
            "loss/kl_teacher": inputs.mean_share(k2),
            "loss/teacher_token_share": inputs.mean_share(taught.to(policy)),
            "loss/teacher_coef": inputs.mean_share(torch.full_like(policy, self.teacher_coef)),
        }
        return LossOutput(output.loss + term, metrics, output.metrics_max)
