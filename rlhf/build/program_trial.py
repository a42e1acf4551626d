"""Trial of an agent's program before a run: its requests are refused where the policy's turn would refuse them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from environments.base import StepResult
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.request import ChatRequest, Refusal
from rlhf.gateway.session import SESSION
from rlhf.recipe import Recipe
from rlhf.training.stages.demonstrations import Deviations
from rlhf.training.stages.policy_gradient import PolicyGradient


def temperatures_of(recipe: Recipe) -> tuple[float, ...]:
    """Temperatures that the recipe samples at: of its policy-gradient stages, and of its evaluations."""
    own = [stage.temperature for stage in recipe.stages if isinstance(stage, PolicyGradient)]
    return tuple(dict.fromkeys([*own, recipe.evaluation.temperature]))


@dataclass(frozen=True, slots=True)
class ProgramTrial:
    """Random actions in place of the policy's, once requests that the run would reject are rejected.

    Attributes:
        deviations: who acts.
        agent: that refuses sampling parameters; one of this process refuses nothing.
        temperatures: that the recipe samples at.
        refused: texts of the refusals, in the order of the first of each; filled by the trial.
    """

    deviations: Deviations
    agent: object
    temperatures: Sequence[float]
    refused: dict[str, None]

    def is_next(self, state: StepResult) -> bool:
        """True if the next action is not the oracle's."""
        return self.deviations.is_next(state)

    def action(self, state: StepResult) -> str:
        """Refuse what is refused, and act."""
        session = SESSION.get(None)
        if isinstance(self.agent, ExternalAgent) and session is not None:
            session.refuse(self._check)
        return self.deviations.action(state)

    def _check(self, asked: ChatRequest) -> None:
        assert isinstance(self.agent, ExternalAgent)
        try:
            for temperature in self.temperatures:
                self.agent.overridden(asked, temperature)
        except Refusal as refusal:
            self.refused[f"{refusal.status}: {refusal.message}"] = None
            raise
