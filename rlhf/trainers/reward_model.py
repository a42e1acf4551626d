"""The reward-model stage: its recipe keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT
from rlhf.trainers.on_pairs import OnPairs
from rlhf.trainers.optimizer import AdamW


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModel(OnPairs):
    """Train a model that says which of two attempts is better, and leave the policy as it is: Bradley-Terry, by TRL.

    The model is a copy of the policy, adapters merged, with one number in place of the output layer, read at the last
    token: r. The loss of a pair is −log σ(r_chosen − r_rejected) + c (r_chosen + r_rejected)². It is judged on pairs of
    tasks that it was not trained on, and saved in `reward_model/` of the run, for `rewards: {kind: reward_model}`.

    Source: Bradley and Terry, Biometrika 39, 1952; centring, arXiv 2312.09244.
    """

    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the tasks whose pairs are kept for judging the model."""
    centring: Annotated[float, Field(ge=0)] = 0.01
    """c, which keeps the scores of a pair around 0; 0 leaves them anywhere."""
    epochs: Annotated[int, Field(ge=1)] = 2
    """Passes over the pairs."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=1e-5, schedule="linear", warmup_steps=5))
    """How the weights are updated."""
