"""Between two steps: evaluations, and what the hooks of the stage do there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlhf.processes import current
from rlhf.training.background_evaluation import BackgroundEvaluation
from rlhf.training.context import is_due
from rlhf.training.contrib import judge_refresh, reward_refresh
from rlhf.training.reward_model_training import asking_left
from rlhf.training.run import Run
from rlhf.training.stage_components import StageComponents
from rlhf.training.stages.policy_gradient import PolicyGradient

#: Seconds between two lines about an evaluation that is waited for, and most that a run which is stopped waits for one.
_NOTE_EVERY_S, _STOP_TIMEOUT_S = 1.0, 60.0


async def after_step(run: Run, parts: StageComponents) -> None:
    """Do what is due after a step, or was when a run was stopped there. Raises what a hook raised in the step."""
    run.callbacks.raise_fault()
    if run.background_evaluation is not None:
        await _evaluate_in_background(run, parts, run.background_evaluation)
        success = None
    else:
        success = await run.evaluate_if_due(parts.stage.evaluate_every, parts.stage.steps)
    if success is not None:
        for hook in parts.hooks:
            hook.on_evaluation(run, success)
    await collect_background_evaluation(run, waits=any(hook.is_saving for hook in parts.hooks))
    for hook in parts.hooks:
        await hook.between_steps(run, parts)


async def _evaluate_in_background(run: Run, parts: StageComponents, background: BackgroundEvaluation) -> None:
    """Begin an evaluation where one is due, from a checkpoint of its step; take in the one before.

    What is played is taken in before the next checkpoint. So a run that goes on from a checkpoint has the evaluations
    before it, and begins the one of its own step again.
    """
    stage, step = parts.stage, run.state.step
    begun = background.begun.step if background.begun is not None else run.state.watched
    begins = is_due(stage.evaluate_every, step, stage.steps) and begun < step
    await collect_background_evaluation(run, waits=begins or is_due(stage.checkpoint_every, step, stage.steps))
    if begins:
        if not (run.checkpoints / run.state.folder_name).is_dir():
            run.save(parts, in_background=True)
        await background.begin(step, run.policy.version)


async def collect_background_evaluation(run: Run, *, waits: bool, limit_s: float = float("inf")) -> None:
    """Take in an evaluation that has ended; with `waits` wait until it has, for at most `limit_s`."""
    background, deadline = run.background_evaluation, time.monotonic() + limit_s
    while background is not None and (begun := background.begun) is not None:
        ended = await background.ended(_NOTE_EVERY_S if waits else 0.0)
        if ended is not None:
            run.record_background_evaluation(begun, ended)
        elif not waits or time.monotonic() > deadline:
            return
        else:
            run.progress.note(f"the evaluation of step {begun.step}, version {begun.version}, is waited for")


@asynccontextmanager
async def draining_background_evaluation(run: Run) -> AsyncIterator[None]:
    """Afterwards, no evaluation is played any more; a user who stops the run waits for it for `_STOP_TIMEOUT_S`."""
    try:
        yield
        await collect_background_evaluation(run, waits=True)
    except asyncio.CancelledError:
        if current().n == 1 or current().stops_together:
            await collect_background_evaluation(run, waits=True, limit_s=_STOP_TIMEOUT_S)
        raise
    finally:
        if run.background_evaluation is not None:
            if (begun := run.background_evaluation.begun) is not None:
                run.progress.say(f"the evaluation of step {begun.step}, version {begun.version}, was not finished")
            await run.background_evaluation.close()


def restore_refreshed_rewards(run: Run, stages: Sequence[Any]) -> None:
    """Install rewards refreshed by finished stages, as an uninterrupted run has them."""
    for index, stage in enumerate(stages[: run.state.stage + run.state.finished]):
        if not isinstance(stage, PolicyGradient):
            continue
        label, rewards = f"{index}-policy_gradient", run.runner.rewards
        if stage.reward_refresh is not None:
            name, model_reward = reward_refresh.refreshed(stage.reward_refresh, rewards)
            run.replace_reward(name, asking_left(model_reward, run.folder / reward_refresh.FOLDER / label))
        if stage.judge_refresh is not None:
            name, judging = judge_refresh.renewed(stage.judge_refresh, rewards)
            run.replace_reward(name, asking_left(judging, run.folder / judge_refresh.FOLDER / label))
