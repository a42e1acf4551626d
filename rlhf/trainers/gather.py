"""The first half of a step: tasks drawn, attempted and scored."""

from __future__ import annotations

from rlhf.rollout.collect import Collected
from rlhf.trainers.parts import Parts
from rlhf.trainers.run import Run


async def gather(run: Run, parts: Parts, step: int) -> Collected:
    """Return the scored groups of a step, in the order their tasks were drawn in.

    Raises:
        TrainingError: more attempts failed than `limits.max_error_fraction` allows.
    """
    stage = parts.stage
    sampling = run.collector.limits.sampling(stage.temperature)
    drawn = parts.source.draw(stage.tasks_per_step)
    collected = await run.collector.collect(drawn, group_size=stage.group_size, grouping=stage.rollout, sampling=sampling, step=step)
    run.caution(collected, f"step {step + 1} of {run.state.label}")
    return collected
