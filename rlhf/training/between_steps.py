"""Between two steps: evaluations, and what the hooks of the stage do there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.training.contrib import judge_refresh, reward_refresh
from rlhf.training.reward_model_training import asking_left
from rlhf.training.run import Run
from rlhf.training.stage_state import StageComponents
from rlhf.training.stages.policy_gradient import PolicyGradient


async def between(run: Run, parts: StageComponents) -> None:
    """Do what is due after a step, or was when a run was stopped there."""
    success = await run.evaluate_if_due(parts.stage.evaluate_every, parts.stage.steps)
    if success is not None:
        for hook in parts.hooks:
            hook.on_evaluation(run, success)
    for hook in parts.hooks:
        await hook.between_steps(run, parts)


def restore_refreshed_rewards(run: Run, stages: Sequence[Any]) -> None:
    """Install rewards refreshed by finished stages, as an uninterrupted run has them."""
    for index, stage in enumerate(stages[: run.state.stage + run.state.finished]):
        if not isinstance(stage, PolicyGradient):
            continue
        label, rewards = f"{index}-policy_gradient", run.collector.rewards
        if stage.reward_refresh is not None:
            name, model_reward = reward_refresh.refreshed(stage.reward_refresh, rewards)
            run.replace_reward(name, asking_left(model_reward, run.folder / reward_refresh.FOLDER / label))
        if stage.judge_refresh is not None:
            name, judging = judge_refresh.renewed(stage.judge_refresh, rewards)
            run.replace_reward(name, asking_left(judging, run.folder / judge_refresh.FOLDER / label))
