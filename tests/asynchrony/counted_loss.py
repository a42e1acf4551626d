"""A loss that writes down how many tokens it is given of each age."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ppo_clip import PPOClip
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Counted:
    """PPO's clipped loss."""

    file: str
    """Where the counts go."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        assert inputs.staleness is not None
        with Path(self.file).open("a") as file:
            file.write(json.dumps(Counter(inputs.staleness.tolist())) + "\n")
        return PPOClip()(inputs)
