"""Reference reset: the present policy becomes the KL reference when training stalls or drifts.

A reference holds a policy near where it began, and in the end keeps it there. ProRL (arXiv 2505.24864) lets the present
policy take its place now and then and starts the optimiser afresh, by hand; the rule here is our own. Validation
successes of .1, .2, .2, .19, .2 and a patience of 3: the best is that of the second evaluation, three others follow,
so the policy after the fifth becomes the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.losses.policy_loss import LossNeeds
from rlhf.settings import STRICT
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.stages.reward_model import RewardModel


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferenceReset:
    """Resets the reference of KL terms to the current policy. An adaptive coefficient restarts."""

    patience: Annotated[int, Field(ge=1)] | None = None
    """Consecutive evaluations of `evaluate_every` without a new best success; null disables it."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """KL to the reference in nats per token, `loss/kl_ref`, beyond which the reference is reset; null is no bound."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between unconditional resets: a moving anchor, as in T1, arXiv 2501.11651, which uses a running mean; null
    is never. Steps before the stage's first update of the policy, such as a critic's warm-up, do not count."""
    reset_optimizer: bool = True
    """Also reset the optimizer moments; the learning rate schedule and float32 master weights stay."""

    def __post_init__(self) -> None:
        if self.patience is None and self.max_kl is None and self.every is None:
            raise ValueError("none of patience, max_kl and every is set: the reference would never be reset")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse losses without a reference, and a patience that cannot end."""
        stage = context.stage
        if not LossNeeds(stage.loss).needs_ref:
            yield Problem(
                "there is no reference to reset",
                where=context.path,
                got=f"loss {context.kind_of('loss', stage.loss)} without a KL term",
                expected="a loss that compares with a reference",
                do="set loss.kl and loss.kl_coef, or remove reference_reset",
            )
        if self.patience is not None and stage.n_evaluations <= self.patience:
            yield Problem(
                "patience is never reached: there are too few evaluations",
                where=context.at("patience"),
                got=f"{self.patience}, with {stage.n_evaluations} evaluations between {stage.n_policy_steps} steps",
                expected="more evaluations than that, the first being the best so far",
                do=f"set {context.stage_path}.evaluate_every, a lower one, or a lower patience",
            )


@plain_dataclass
class ReferenceResetHook(StageHook):
    """Schedule of reference resets.

    Attributes:
        settings: the recipe keys.
        best: success of the best evaluation of the stage; None before the first.
        n_since: evaluations since then, or since the last reset.
        is_due: whether to reset before the next step.
        n_resets: of the stage so far.
        n_steps: since the last reset, or the stage's first update of the policy.
    """

    key: ClassVar[str] = "reference"

    settings: ReferenceReset
    best: float | None = None
    n_since: int = 0
    is_due: bool = False
    n_resets: int = 0
    n_steps: int = 0

    def on_evaluation(self, run: RunContext, success: float) -> None:
        """See `see`; a policy that the stage has not updated, as while a critic learns alone, counts for nothing."""
        if run.state.n_updates:
            self.see(success)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`; steps before the stage's first update of the policy count for nothing."""
        if parts.trainer.n_updates:
            self.learn(step.values)
        step.metrics["reference/n_resets"] = float(self.n_resets)

    @property
    def is_saving(self) -> bool:
        """True if the present policy becomes the reference."""
        return self.is_due

    async def between_steps(self, run: RunContext, parts: LiveStage) -> None:
        """Make the present policy the reference where that is due, unless the stage ends here.

        Its checkpoint stays, and so do those of all references before it.
        """
        if not self.is_due or run.state.step >= parts.stage.steps:
            return
        self.reset()
        if self.settings.reset_optimizer:
            from rlhf.training.backends.master_weights import forget_moments

            forget_moments(parts.trainer.optimizer)
        run.state = replace(run.state, kl_coef=None, references=[*run.state.references, run.state.folder_name])
        run.save(parts)
        take_reference(run)
        run.progress.say(f"the policy after step {run.state.step} of {run.state.label} is the reference from now on")

    def learn(self, values: Mapping[str, float]) -> None:
        """Update on what the updates of a step logged."""
        bound = self.settings.max_kl
        self.n_steps += 1
        self.is_due = self.is_due or (bound is not None and values.get("loss/kl_ref", 0.0) > bound)
        self.is_due = self.is_due or (self.settings.every is not None and self.n_steps >= self.settings.every)

    def see(self, success: float) -> None:
        """Take in an evaluation."""
        if self.best is None or success > self.best:
            self.best, self.n_since = success, 0
            return
        self.n_since += 1
        self.is_due = self.is_due or self.n_since == self.settings.patience

    def reset(self) -> None:
        """Begin to count anew; the best so far stays the one to surpass."""
        self.n_since, self.is_due, self.n_resets, self.n_steps = 0, False, self.n_resets + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """State of the clock."""
        return {name: getattr(self, name) for name in ("best", "n_since", "is_due", "n_resets", "n_steps")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, now in self.state_dict().items():
            setattr(self, name, state.get(name, now))


@runtime_checkable
class Compares(Protocol):
    """A loss that may compare with a reference; see `PolicyLoss`."""

    @property
    def needs_ref(self) -> bool:
        """True if the loss compares with a reference."""


class Reference(StageHook):
    """Loads the reference of a stage whose loss compares with one."""

    @classmethod
    def of(cls, loss: object) -> Reference | None:
        """Return the hook of a loss, or None where it compares with none."""
        return cls() if isinstance(loss, Compares) and loss.needs_ref else None

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """See `take_reference`."""
        take_reference(run)

    def on_stage_end(self, run: RunContext) -> None:
        """Free the reference, which takes as much memory as the policy."""
        run.policy.reference = None


def take_reference(run: RunContext) -> None:
    """Load the reference model of the run's present state."""
    run.policy.keep_reference(run.checkpoints / run.state.reference)


def copies_adapter(stages: Sequence[Any], stage: Any) -> bool:
    """True if a policy-gradient stage compares with a copy of the adapter, and not with the base alone.

    An earlier one of `stages` has trained the adapter then, or the reference is reset.
    """
    earlier = takewhile(lambda other: other is not stage, stages)
    has_moved = any(not isinstance(other, RewardModel) for other in earlier)
    return bool(LossNeeds(stage.loss).needs_ref) and (has_moved or stage.reference_reset is not None)
