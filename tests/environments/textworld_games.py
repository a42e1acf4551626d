"""Play games of TextWorldExpress to the end of the episode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from environments.base import StepResult
from environments.textworld_express import TextWorldExpress
from rlhf.data import Task

FIVE_ROOMS = TextWorldExpress(game="mapreader", params={"numLocations": 5, "maxDistanceApart": 2})


def play(environment: TextWorldExpress, task: Task, actions: Sequence[str]) -> list[StepResult]:
    """The opening and every answer, up to the end of the episode."""

    async def go() -> list[StepResult]:
        episode = environment.start(task)
        results = [episode.opening]
        for action in actions:
            if results[-1].terminated or results[-1].truncated:
                break
            results.append(await episode.step(action))
        await episode.close()
        return results

    return asyncio.run(go())


def play_at_random(environment: TextWorldExpress, task: Task, seed: int, n: int = 50) -> list[StepResult]:
    async def go() -> list[StepResult]:
        rng, episode = random.Random(seed), environment.start(task)
        results = [episode.opening]
        while len(results) <= n and not (results[-1].terminated or results[-1].truncated):
            results.append(await episode.step(rng.choice(results[-1].admissible_actions)))
        await episode.close()
        return results

    return asyncio.run(go())


def seed_of(environment: TextWorldExpress, seed: int, split: str = "test") -> Task:
    return next(task for task in environment.tasks(split) if task.seed == seed)
