"""Stage overrides: environment, limits and rewards that replace the recipe's during a stage."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from environments.base import Environment
from rlhf.rollout.limits import Limits
from rlhf.rollout.scoring import WeightedReward
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StageOverrides:
    """Keys of a stage that take the place of the recipe's. Evaluations stay in the recipe's environment."""

    environment: Environment | None = None
    """Environment of this stage; null is the recipe's."""
    limits: Limits | None = None
    """Limits of this stage; others are the recipe's."""
    rewards: dict[str, float | WeightedReward] | None = None
    """Weights of the rewards in this stage, by name, and additional rewards, written as in the recipe. Other rewards of
    the recipe are computed with weight 0, or, with an environment of the stage's own, not computed; null keeps the
    recipe's weights. A model that a later stage trains is not used."""

    @property
    def weights(self) -> dict[str, float] | None:
        """Weights that it gives to rewards of the recipe; None where it leaves them as they are."""
        named = self.rewards
        return None if named is None else {n: w for n, w in named.items() if not isinstance(w, WeightedReward)}

    @property
    def own_rewards(self) -> dict[str, WeightedReward]:
        """The rewards that are defined here."""
        return {n: w for n, w in (self.rewards or {}).items() if isinstance(w, WeightedReward)}

    @property
    def differs(self) -> bool:
        """True if it is not played and scored as the recipe says."""
        return self.environment is not None or self.limits is not None or bool(self.own_rewards)
