"""A reference that is renewed: where training stands still, or has gone far, KL terms compare with the present policy.

A reference holds a policy near where it began, and in the end keeps it there. ProRL (arXiv 2505.24864) lets the present
policy take its place now and then and starts the optimiser afresh, by hand; the rule here is our own. Watched
successes of .1, .2, .2, .19, .2 and a patience of 3: the best is that of the second evaluation, three others follow,
so the policy after the fifth becomes the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT

if TYPE_CHECKING:
    from rlhf.training.run import Run
    from rlhf.training.stage_state import StageComponents


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferenceReset:
    """When the present policy becomes the reference of KL terms. Their coefficient, where adapted, begins anew."""

    patience: Annotated[int, Field(ge=1)] | None = None
    """Evaluations in a row, of those that `evaluate_every` makes, without a new best success; null looks at none."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """Divergence from the reference in nats per token, `loss/kl_ref`, beyond which a step has gone far; null is no
    bound."""
    reset_optimizer: bool = True
    """Whether the optimiser's running means begin anew too; its learning rate goes on by its schedule."""

    def __post_init__(self) -> None:
        if self.patience is None and self.max_kl is None:
            raise ValueError("neither patience nor max_kl is set: the reference would never be renewed")


@plain_dataclass
class ResetClock:
    """When the next reset is due.

    Attributes:
        settings: the recipe keys.
        best: success of the best evaluation of the stage; None before the first.
        n_since: evaluations since then, or since the last reset.
        is_due: whether to reset before the next step.
        n_resets: of the stage so far.
    """

    settings: ReferenceReset
    best: float | None = None
    n_since: int = 0
    is_due: bool = False
    n_resets: int = 0

    def learn(self, values: Mapping[str, float]) -> dict[str, float]:
        """Take in what the updates of a step logged; returns what is logged of the reference."""
        bound = self.settings.max_kl
        self.is_due = self.is_due or (bound is not None and values.get("loss/kl_ref", 0.0) > bound)
        return {"reference/n_resets": float(self.n_resets)}

    def see(self, success: float) -> None:
        """Take in an evaluation."""
        if self.best is None or success > self.best:
            self.best, self.n_since = success, 0
            return
        self.n_since += 1
        self.is_due = self.is_due or self.n_since == self.settings.patience

    def reset(self) -> None:
        """Begin to count anew; the best so far stays the one to surpass."""
        self.n_since, self.is_due, self.n_resets = 0, False, self.n_resets + 1

    def state_dict(self) -> dict[str, Any]:
        """What it has seen."""
        return {"best": self.best, "n_since": self.n_since, "is_due": self.is_due, "n_resets": self.n_resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name in self.state_dict():
            setattr(self, name, state[name])


def take_reference(run: Run) -> None:
    """Load the reference that the stage has where it stands."""
    name = run.state.reference
    run.policy.keep_reference(run.checkpoints / name, adapter=name in run.state.references)


async def watch(run: Run, parts: StageComponents) -> None:
    """Between two steps: evaluate where that is due, renew the reference where that is, and save the best policy."""
    clock, stage = parts.reference, parts.stage
    success = await run.watch(stage.evaluate_every, stage.steps)
    if clock is not None and run.state.step < stage.steps:
        if success is not None:
            clock.see(success)
        if clock.is_due:
            _renew(run, parts, clock)
    if success is not None and run.state.best == run.state.folder_name:
        run.save(parts, in_background=True)


def _renew(run: Run, parts: StageComponents, clock: ResetClock) -> None:
    """Make the present policy the reference; its checkpoint stays, and so do those of all references before it."""
    clock.reset()
    if clock.settings.reset_optimizer:
        parts.trainer.optimizer.state.clear()
    run.state = replace(run.state, kl_coef=None, references=[*run.state.references, run.state.folder_name])
    run.save(parts)
    take_reference(run)
    run.progress.say(f"the policy after step {run.state.step} of {run.state.label} is the reference from now on")
