"""Rewards of a stage: its own weights, and models trained by earlier stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewards.models.model_folder import stage_of
from rlhf.rollout.scoring import Weighted
from rlhf.training.reward_model_training import left_by
from rlhf.training.run import Run
from rlhf.training.stages.reward_model import RewardModel


@dataclass
class StageRewards:
    """All rewards of a recipe, and which of them the present stage asks.

    Attributes:
        run: whose collector asks them.
        known: every reward by name, those whose model is not trained yet too.
    """

    run: Run
    known: dict[str, Weighted] = field(init=False)

    def __post_init__(self) -> None:
        self.known = dict(self.run.collector.rewards)

    def begin(self, stage: Any, stages: Sequence[Any]) -> None:
        """Install the rewards of `stage` with its weights, without models yet to be trained."""
        present, state = self.run.collector.rewards, self.run.state
        for name, weighted in self.known.items():
            if name in present:  # which may have been refreshed
                self.known[name] = replace(weighted, reward=present[name].reward)
            index = stage_of(weighted.reward)
            if index is not None and index < state.stage and isinstance(stages[index], RewardModel):
                self.known[name] = replace(weighted, reward=left_by(index, weighted.reward, self.run.folder))
        asked = {name: w for name, w in self.known.items() if stage_of(w.reward) is None}
        self.run.collector = replace(self.run.collector, rewards=reweighted(asked, stage.rewards))


def reweighted(rewards: Mapping[str, Weighted], weights: Mapping[str, float] | None) -> dict[str, Weighted]:
    """Rewards with a stage's weights; unnamed ones have none, and are logged."""
    if weights is None:
        return dict(rewards)
    return {n: w if w.watch else replace(w, weight=float(weights.get(n, 0.0))) for n, w in rewards.items()}
