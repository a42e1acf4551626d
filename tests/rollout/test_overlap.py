"""Groups are scored while later tasks are attempted, in the order of the tasks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agents.chat import ChatAgent
from rlhf.data import SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.limits import Limits
from rlhf.rollout.progress import Progress
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from tests.rollout.small_world import Corridor, tokenizer


class Logged(ScriptedEngine):
    """Writes down its calls; those of the first task come last where `slow`."""

    def __init__(self, log: list[str], *, slow: bool = False) -> None:
        super().__init__(lambda prompt: "go north", tokenizer=tokenizer())
        self.log, self.slow, self.is_over = log, slow, False

    async def generate(self, prompt: Any, params: SamplingParams, session: str = "") -> Any:
        task = session.split("/")[1]
        await asyncio.sleep(0.2 if self.slow and task == "0" else 0.01)
        self.log.append(f"rollout {task}")
        return await super().generate(prompt, params, session)


def collector(engine: ScriptedEngine, reward: Any, n_at_once: int) -> RolloutRunner:
    limits = Limits(max_turns=2, max_tokens=16, max_concurrent=n_at_once)
    weighted = {"r": WeightedReward("r", 1.0, reward)}
    return RolloutRunner(Corridor(2), ChatAgent(system=""), weighted, engine, Renderer(tokenizer()), limits, seed=0)


def collect(made: RolloutRunner, log: list[str], n_tasks: int = 4) -> list[str]:
    tasks = Corridor().tasks("train")[:n_tasks]
    found = asyncio.run(made.collect(tasks, group_size=2, sampling=SamplingParams(), step=0))
    assert [g.task_id for g in found.groups] == [t.id for t in tasks]
    assert all(len(g.scores) == 2 for g in found.groups)
    return log


def asked(log: list[str]) -> Any:
    async def reward(task: Any, trajectory: Any) -> float:
        log.append(f"score {task.id.rpartition('/')[2]}")
        await asyncio.sleep(0)
        return 1.0

    return reward


def test_a_group_is_scored_before_later_tasks_are_over():
    log: list[str] = []
    collect(collector(Logged(log), asked(log), n_at_once=2), log)
    assert log.index("score 0") < log.index("rollout 3")


def test_a_reward_is_asked_in_the_order_of_tasks_whatever_ends_first():
    log: list[str] = []
    collect(collector(Logged(log, slow=True), asked(log), n_at_once=8), log)
    assert [line for line in log if line.startswith("score")] == [f"score {i}" for i in range(4) for _ in range(2)]
    assert log.index("rollout 3") < log.index("score 0")


def test_an_error_of_scoring_ends_the_rollouts():
    log: list[str] = []
    made = collector(Logged(log, slow=True), asked(log), n_at_once=2)
    environment = made.environment

    async def run() -> None:
        made.rewards.clear()  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="nothing to score with"):
            await made.collect(environment.tasks("train"), group_size=2, sampling=SamplingParams(), step=0)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(run())
    assert environment.counts.alive == 0  # type: ignore[attr-defined]


def test_an_error_of_the_rollouts_is_raised_after_the_last_group():
    def refuse(progress: Progress) -> None:
        if progress.n_done == progress.n_episodes:
            raise EngineError("the last word")

    log: list[str] = []
    made = replace(collector(Logged(log), asked(log), n_at_once=2), on_progress=refuse)
    with pytest.raises(EngineError, match="the last word"):
        collect(made, log, n_tasks=2)
    assert log.count("rollout 1") == 4 and made.environment.counts.alive == 0  # type: ignore[attr-defined]
