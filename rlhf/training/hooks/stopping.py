"""Early stopping: after evaluations without a new best one, or steps that trained on nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from rlhf.tasks.empty_steps import EmptySteps
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step


@dataclass
class EarlyStop(StageHook):
    """Ends a stage whose evaluations no longer improve, and saves the best policy.

    Attributes:
        patience: evaluations without a new best one after which the stage ends; None makes every step.
    """

    patience: int | None
    _was_measured: bool = False

    def ends_stage(self, run: RunContext, parts: LiveStage) -> bool:
        """True if `patience` evaluations of the stage passed since the best one.

        Without a best one in this stage they count from its begin. Nothing but the state is looked at, so that a
        resumed run ends where one that ran on does.
        """
        state = run.state
        if self.patience is None or state.n_since_best < self.patience:
            return False
        run.progress.say(
            f"{state.label} ends after step {state.step}: no better evaluation among the last {self.patience}; "
            f"the best policy is {run.checkpoints / state.best}"
        )
        return True

    def on_evaluation(self, run: RunContext, success: float) -> None:
        """Note that there was one."""
        self._was_measured = True

    async def between_steps(self, run: RunContext, parts: LiveStage) -> None:
        """Save the policy if the evaluation after this step found it the best so far."""
        was_measured, self._was_measured = self._was_measured, False
        if was_measured and run.state.best == run.state.folder_name:
            run.save(parts, in_background=True)


@runtime_checkable
class Bounded(Protocol):
    """A selection that ends the run after many steps with nothing to train on; see `GroupSelection`."""

    @property
    def max_empty_steps(self) -> int | None:
        """Allowed empty steps in a row; None is any number."""


@dataclass
class EmptyStop(StageHook):
    """Ends a run whose steps have nothing to train on.

    Attributes:
        most: such steps in a row; None allows any number.
        empty: counts them.
    """

    key: ClassVar[str] = "empty"

    most: int | None = None
    empty: EmptySteps = field(default_factory=EmptySteps)

    @classmethod
    def of(cls, selection: object) -> EmptyStop:
        """Return the hook of a stage with this selection."""
        return cls(selection.max_empty_steps if isinstance(selection, Bounded) else None)

    def before_step(self, run: RunContext, step: Step) -> None:
        """Raise TrainingError where there were too many."""
        self.empty.check(self.most, step.where)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Count the step, unless the critic learnt alone in it."""
        if step.trains_policy:
            n_trained = step.values["batch/n_trained_trajectories"] + step.values.get("imitate_failed/n_imitated", 0.0)
            figures, cautions = self.empty.learn(n_trained, step.where)
            step.metrics |= figures
            step.cautions |= cautions

    def state_dict(self) -> dict[str, Any]:
        """Number of empty steps."""
        return self.empty.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.empty.load_state_dict(state)
