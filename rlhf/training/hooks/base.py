"""Hooks: what a policy-gradient stage does besides sampling, crediting and updating, one class each.

The loop calls the hooks of a stage in their order and knows none of them by name. A new method that meddles with a step
is a subclass of `StageHook` in a file of its own, and a line in `rlhf/training/stage_components.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

    from rlhf.batching.samples import Sample
    from rlhf.data import ScoredGroup, TokenFigures, Values
    from rlhf.losses.policy_loss import PolicyLoss
    from rlhf.rollout.opponent_engine import OpponentSampler
    from rlhf.training.context import LiveStage, RunContext, StageKeys


@dataclass
class Step:
    """State of a step, as the loop and the hooks have it so far.

    Attributes:
        number: counted from 0.
        where: its name in messages.
        stage: the recipe keys, with the coefficients of this step.
        rng: of everything that the step draws after its rollouts.
        trains_policy: whether the policy is updated; False while a critic learns alone.
        all_groups: all groups of the step.
        groups: those that are trained on.
        rows: all samples of them, with credit.
        samples: those that the policy is updated with.
        values: what updates logged.
        metrics: what hooks log.
        cautions: for the user, by name; each name is told once in a run.
        state: fields of the run's state that change with this step.
        figures: of the sampled tokens of `groups`, stored with them; None where nothing measured them.
    """

    number: int
    where: str
    stage: StageKeys
    rng: np.random.Generator
    trains_policy: bool = True
    all_groups: Sequence[ScoredGroup] = ()
    groups: Sequence[ScoredGroup] = ()
    rows: Sequence[Sample] = ()
    samples: Sequence[Sample] = ()
    values: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    cautions: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    figures: Sequence[TokenFigures] | None = None


class StageHook:
    """Base of hooks in a stage's steps; every method does nothing by default.

    Methods are called in the order they have here, each of all hooks of the stage before the next. A step may be begun
    and never finished, so `state_dict` changes in `on_step_end` and the methods below it alone. Where a program's own
    hook raises in `after_update` or `on_step_end`, the step is finished without what it logged there, the run is saved,
    and the error is raised.
    """

    #: Name of its state in a checkpoint; empty where it keeps none.
    key: ClassVar[str] = ""
    #: Whether it is half done with something, so that its state is none to save.
    is_incomplete: bool = False

    @property
    def is_saving(self) -> bool:
        """True if `between_steps` will save a checkpoint."""
        return False

    @property
    def n_critic_updates(self) -> int:
        """Updates of a critic that it has made in this stage."""
        return 0

    # --- the stage begins ---

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned in an earlier process; not called where a stage begins."""

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Before the first step of this process, after `load_state_dict`."""

    # --- a step ---

    def ends_stage(self, run: RunContext, parts: LiveStage) -> bool:
        """True if the stage ends before its next step."""
        return False

    def loss_of(self, run: RunContext, loss: PolicyLoss, number: int) -> PolicyLoss:
        """Return the loss of step `number`, counted from 0, with the coefficients that it then has."""
        return loss

    def before_step(self, run: RunContext, step: Step) -> None:
        """Before anything is sampled. Raises TrainingError where training is not to go on."""

    def rollout(self, run: RunContext) -> AbstractAsyncContextManager[OpponentSampler | None]:
        """Context in which the step's attempts are made and scored; gives who plays in the policy's place, or None."""
        return nullcontext()

    async def transform_groups(
        self, run: RunContext, step: Step, groups: Sequence[ScoredGroup]
    ) -> Sequence[ScoredGroup]:
        """Return the groups to train on, one for each of `groups`."""
        return groups

    def critic_values(self, step: Step) -> Sequence[Values] | None:
        """Return what is expected of the states of `step.groups`, for estimators that need it; None says nothing."""
        return None

    def transform_samples(self, parts: LiveStage, step: Step, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows that the policy is updated with, before trainer and engine are compared."""
        return samples

    def extend_samples(
        self, samples: Sequence[Sample], rng: np.random.Generator
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """Rows ready for the update after that comparison, and metrics; only in steps with an update."""
        return samples, {}

    async def after_update(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Once the policy is updated and before it is delivered; what is logged goes into `step.values`."""

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Take in the finished step, once; figures, cautions and changes of the run's state go into `step`."""

    # --- between two steps ---

    def on_evaluation(self, run: RunContext, success: float) -> None:
        """Take in an evaluation that was made after a step; not one in the background (`cluster.eval_servers`)."""

    async def between_steps(self, run: RunContext, parts: LiveStage) -> None:
        """Do what is due after a step, or was when a run was stopped there."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: numbers, texts, tensors, and lists and dictionaries of them."""
        return {}

    # --- the stage ends ---

    def on_stage_end(self, run: RunContext) -> None:
        """After the last step, once its checkpoint is written."""
