"""Play worlds drawn by seed: with given actions, at random, and by their oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments.base import StepResult
from rlhf.data import Task


def play(environment: Any, task: Task, actions: Sequence[str]) -> list[StepResult]:
    """Opening and answers."""

    async def played() -> list[StepResult]:
        episode = environment.start(task)
        results = [episode.opening]
        for action in actions:
            results.append(await episode.step(action))
        await episode.close()
        return results

    return asyncio.run(played())


def transcript(results: Sequence[StepResult], actions: Sequence[str]) -> str:
    """What the agent read and said, as the page shows it."""
    lines = [results[0].reply]
    for action, result in zip(actions, results[1:], strict=True):
        lines += [f"> {action}", result.reply]
    return "\n".join(lines)


def random_play(environment: Any, n: int) -> tuple[int, float]:
    """Of the first n test tasks: how many uniformly random admissible actions solve, and their mean score."""
    n_solved, total = 0, 0.0
    for task in list(environment.tasks("test"))[:n]:
        rng = random.Random(task.seed)

        async def played(task: Task = task, rng: random.Random = rng) -> tuple[bool, float]:
            episode = environment.start(task)
            result, score = episode.opening, 0.0
            while result.success is None:
                result = await episode.step(rng.choice(result.admissible_actions))
                score += result.reward
            await episode.close()
            return result.success, score

        solved, score = asyncio.run(played())
        n_solved, total = n_solved + solved, total + score
    return n_solved, total / n


def oracle_play(environment: Any, n: int) -> tuple[int, float]:
    """Of the first n test tasks: how many the oracle solves with a score of 1, and the mean of its actions."""
    n_solved, n_actions = 0, 0
    for task in list(environment.tasks("test"))[:n]:
        plan = environment.plan(task, ())
        results = play(environment, task, plan or ())
        n_solved += results[-1].success is True and abs(sum(r.reward for r in results) - 1) < 1e-9
        n_actions += len(plan or ())
    return n_solved, n_actions / n


def page() -> str:
    """The page of these worlds."""
    return (Path(__file__).resolve().parents[2] / "docs/environments/tools_and_memory.md").read_text(encoding="utf-8")


def is_shown(text: str) -> bool:
    """Whether the page shows `text` as it is, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()) in page()


def figures(environment: Any, label: str) -> str:
    """The row of the page's table for one setting of an environment, as it is played here."""
    n_random, score = random_play(environment, 100)
    n_oracle, n_actions = oracle_play(environment, 100)
    return f"| {label} | {n_random} | {score:.2f} | {n_oracle} | {n_actions:.1f} |\n"


def oracle_figures(environment: Any, label: str) -> str:
    """The same of an environment that cannot list its actions, so that nothing can be drawn at random."""
    n_oracle, n_actions = oracle_play(environment, 100)
    return f"| {label} | - | - | {n_oracle} | {n_actions:.1f} |\n"
