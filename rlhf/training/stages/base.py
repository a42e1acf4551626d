"""Dispatch of the stages other than policy gradient."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rlhf.training.contrib.expert_iteration_rounds import train_expert_iteration
from rlhf.training.run import Run
from rlhf.training.stages.preference import Preference
from rlhf.training.stages.preference_training import train_preference
from rlhf.training.stages.reward_model import RewardModel
from rlhf.training.stages.reward_model_pairwise import train_reward_model
from rlhf.training.stages.supervised import Supervised
from rlhf.training.stages.supervised_training import train_supervised

#: Runs a stage from where the run stands to its end, and leaves the checkpoint of the end to its caller.
Work = Callable[[Run, Any], Awaitable[None]]


def other_stage(stage: Any) -> tuple[str, Work] | None:
    """Return the kind of a stage and what runs it; None for a policy gradient."""
    if isinstance(stage, Supervised):
        return "supervised", train_supervised if stage.rejection_sampling is None else train_expert_iteration
    if isinstance(stage, Preference):
        return "preference", train_preference
    return ("reward_model", train_reward_model) if isinstance(stage, RewardModel) else None


def is_played(stage: Any) -> bool:
    """True if the policy learns from its own attempts, so that its initial success matters."""
    return stage.rejection_sampling is not None if isinstance(stage, Supervised) else not isinstance(stage, RewardModel)
