"""Play any environment to the end of an episode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from environments.base import StepResult
from rlhf.data import Task


def play(environment: Any, task: Task, actions: Sequence[str]) -> list[StepResult]:
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


def play_at_random(environment: Any, task: Task, seed: int, n: int = 50) -> list[StepResult]:
    """At most `n` admissible actions, each as likely."""

    async def go() -> list[StepResult]:
        rng, episode = random.Random(seed), environment.start(task)
        results = [episode.opening]
        while len(results) <= n and not (results[-1].terminated or results[-1].truncated):
            results.append(await episode.step(rng.choice(results[-1].admissible_actions)))
        await episode.close()
        return results

    return asyncio.run(go())


def total(results: Sequence[StepResult]) -> float:
    """Sum of all rewards."""
    return sum(result.reward for result in results)
