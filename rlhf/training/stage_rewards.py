"""Environment, limits and rewards of a stage, with the models that earlier stages have trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewards.models.model_folder import stage_of
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.reward_model_training import left_by
from rlhf.training.run import Run
from rlhf.training.stages.reward_model import RewardModel


@dataclass
class StageRewards:
    """All rewards of a recipe, and what the present stage is played in and scored by.

    Attributes:
        run: whose runner asks them.
        known: every reward by name, those whose model is not trained yet too.
    """

    run: Run
    known: dict[str, WeightedReward] = field(init=False)

    def __post_init__(self) -> None:
        self.known = dict(self.run.runner.rewards)

    def begin(self, stage: Any, stages: Sequence[Any]) -> None:
        """Install what `stage` is played in and scored by, without models yet to be trained."""
        run, index = self.run, self.run.state.stage
        runner, own = run.evaluation_runner, run.stage_environments.get(index)
        present = runner.rewards
        for name, weighted in self.known.items():
            if name in present:  # which may have been refreshed
                self.known[name] = replace(weighted, reward=present[name].reward)
            self.known[name] = self._trained(self.known[name], stages)
        base = replace(runner, rewards=_there(reweighted(self.known, None if own else stage.weights)))
        run.base_runner, run.runner = (base, base) if own else (None, base)
        if own:
            kept = {
                name: replace(w, reward=self.known[name].reward)
                for name, w in own.rewards.items()
                if name in self.known
            }
            rewards = {name: kept.get(name) or self._trained(w, stages) for name, w in own.rewards.items()}
            changes: dict[str, Any] = {"environment": own.environment, "limits": own.limits}
            run.runner = replace(base, rewards=_there(rewards), **changes)

    def _trained(self, weighted: WeightedReward, stages: Sequence[Any]) -> WeightedReward:
        """The reward with the model of the stage that it names, where that stage is over."""
        index = stage_of(weighted.reward)
        if index is None or index >= self.run.state.stage or not isinstance(stages[index], RewardModel):
            return weighted
        return replace(weighted, reward=left_by(index, weighted.reward, self.run.folder))


def _there(rewards: Mapping[str, WeightedReward]) -> dict[str, WeightedReward]:
    """Those that can be asked: their model, if they have one, is trained."""
    return {name: w for name, w in rewards.items() if stage_of(w.reward) is None}


def reweighted(rewards: Mapping[str, WeightedReward], weights: Mapping[str, float] | None) -> dict[str, WeightedReward]:
    """Rewards with a stage's weights; unnamed ones have none, and are logged."""
    if weights is None:
        return dict(rewards)
    return {n: w if w.monitor else replace(w, weight=float(weights.get(n, 0.0))) for n, w in rewards.items()}
