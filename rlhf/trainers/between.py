"""Between two steps: evaluations, and what the hooks of the stage do there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.trainers import refreshing, self_judging
from rlhf.trainers.parts import Parts
from rlhf.trainers.policy_gradient import PolicyGradient
from rlhf.trainers.run import Run
from rlhf.trainers.scoring_models import asking_left


async def between(run: Run, parts: Parts) -> None:
    """Do what is due after a step, or was when a run was stopped there."""
    success = await run.watch(parts.stage.evaluate_every, parts.stage.steps)
    if success is not None:
        for hook in parts.hooks:
            hook.on_evaluation(run, success)
    for hook in parts.hooks:
        await hook.between_steps(run, parts)


def serve_left(run: Run, stages: Sequence[Any]) -> None:
    """Score with what the stages have left that are over, as a run does that was never stopped."""
    for index, stage in enumerate(stages[: run.state.stage + run.state.finished]):
        if not isinstance(stage, PolicyGradient):
            continue
        label, rewards = f"{index}-policy_gradient", run.collector.rewards
        if stage.reward_refresh is not None:
            name, model_reward = refreshing.refreshed(stage.reward_refresh, rewards)
            run.replace_reward(name, asking_left(model_reward, run.folder / refreshing.FOLDER / label))
        if stage.judge_renewal is not None:
            name, judging = self_judging.renewed(stage.judge_renewal, rewards)
            run.replace_reward(name, asking_left(judging, run.folder / self_judging.FOLDER / label))
