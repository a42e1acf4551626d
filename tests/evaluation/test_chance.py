"""Chance as a policy: what is listed, and where nothing is, what the oracle does in other tasks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from agents.base import History
from environments.base import Properties, StepResult
from environments.games.countdown import Countdown
from environments.games.key_door import Keyhole
from environments.workers.pool import Processes
from environments.wrappers.difficulty_levels import Graded
from rlhf.data import Prompt, SamplingParams, Task
from rlhf.errors import AgentError, EnvError
from rlhf.evaluation.baselines import RandomSeedEngine
from rlhf.evaluation.chance import N_BORROWED, RandomAgent
from rlhf.gateway.environment import External
from rlhf.rollout.limits import Limits
from tests.commands import last_json, run

LIMITS = Limits(max_turns=4, start_timeout_s=5.0, step_timeout_s=5.0, episode_timeout_s=5.0)


class Drawn:
    """A policy whose generation is one number of `RandomSeedEngine`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    async def generate(self, messages: Any) -> Any:
        generation = await RandomSeedEngine().generate(Prompt((0,)), SamplingParams(max_tokens=1, seed=self.seed))
        return SimpleNamespace(generation=generation)


@dataclass(frozen=True)
class Silent:
    """Lists nothing, and writes down what is done with it; may break at a place of its own."""

    breaks: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def properties(self) -> Properties:
        return Properties(oracle=True)

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"silent/{i}", seed=i) for i in range(3)]

    def start(self, task: Task) -> Any:
        self.events.append("start")
        if self.breaks == "start":
            raise OSError("out of order")
        return (
            None
            if self.breaks == "nothing"
            else SimpleNamespace(
                opening=StepResult("Say something."),
                step=None if self.breaks == "step" else self.start,
                close=self.close,
            )
        )

    def close(self) -> None:
        self.events.append("close")

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        self.events.append("plan")
        if self.breaks == "plan":
            raise ValueError("lost the way")
        return None if self.breaks == "knows nothing" else (f"say {task.seed}",)


def prepared(environment: Any, tasks: Sequence[Task]) -> RandomAgent:
    agent = RandomAgent(environment)
    asyncio.run(agent.prepare(tasks, LIMITS))
    return agent


def drawn(agent: RandomAgent, task: Task, n: int = 400, listed: tuple[str, ...] = ()) -> set[str]:
    return {asyncio.run(agent.act(History(task, "", (), listed), Drawn(i))).text for i in range(n)}


@pytest.mark.parametrize("n_workers", [0, 1], ids=["here", "in a worker"])
def test_what_is_written_is_borrowed_from_other_tasks(n_workers: int) -> None:
    with_workers = Processes(environment=Countdown(), n_workers=n_workers)
    tasks = list(with_workers.tasks("test"))[: N_BORROWED + 5]
    agent = prepared(with_workers, tasks)
    plans = {task.id: with_workers.plan(task, []) for task in tasks[:N_BORROWED]}
    with_workers.close()
    assert agent.borrowed == {"": plans} and all(plans.values())
    for task in (tasks[0], tasks[-1]):
        assert drawn(agent, task) == {action for other, plan in plans.items() if other != task.id for action in plan}


def test_what_is_listed_is_drawn_and_no_oracle_asked() -> None:
    tasks = list(Keyhole().tasks("test"))[:3]
    agent = prepared(Keyhole(), tasks)
    assert agent.borrowed == {}
    assert drawn(agent, tasks[0], listed=("look", "wait")) == {"look", "wait"}


@pytest.mark.parametrize("order", [1, -1], ids=["listed first", "written first"])
def test_members_of_a_mixture_borrow_among_themselves(order: int) -> None:
    levels = (Keyhole(), Countdown(), Countdown(numbers=3))[::order]
    world = Graded(levels=levels)
    tasks = list(world.tasks("test"))[:30]
    agent = prepared(world, tasks)
    kept = [i for i, level in enumerate(levels) if not isinstance(level, Keyhole)]
    assert sorted(agent.borrowed) == [f"{i}/" for i in sorted(kept)]
    for task in tasks[:6]:
        level = task.info["level"]
        if level in kept:
            own = {t.id for t in tasks if t.info["level"] == level}
            assert set(agent.borrowed[f"{level}/"]) == own
            assert drawn(agent, task) == {a for t in own - {task.id} for a in agent.borrowed[f"{level}/"][t]}


def test_members_that_can_demonstrate_lend_beside_one_that_cannot() -> None:
    world = Graded(levels=(Countdown(), External(environment=Countdown(), command=(sys.executable,))))
    tasks = [task for task in world.tasks("test") if task.info["level"] == 0][:3]
    assert set(prepared(world, tasks).borrowed) == {"0/"}


def test_the_episode_that_is_looked_at_is_closed_before_the_oracle_is_asked() -> None:
    world = Silent()
    agent = prepared(world, world.tasks("test"))
    assert world.events == ["start", "close", "plan", "plan", "plan"]
    assert drawn(agent, world.tasks("test")[1], 40) == {"say 0", "say 2"}


@pytest.mark.parametrize("breaks", ["start", "nothing", "step"])
def test_what_does_not_begin_will_say_so_itself(breaks: str) -> None:
    world = Silent(breaks)
    assert prepared(world, world.tasks("test")).borrowed == {} and "plan" not in world.events


def test_an_oracle_that_fails_is_told() -> None:
    world = Silent("plan")
    with pytest.raises(EnvError, match="the oracle that provides actions for the random baseline failed") as told:
        prepared(world, world.tasks("test"))
    assert "lost the way" in told.value.got and told.value.where == "silent/0"


def test_chance_needs_a_list_or_plans() -> None:
    world = Silent("knows nothing")
    agent = prepared(world, world.tasks("test"))
    with pytest.raises(AgentError, match="no actions to choose from"):
        drawn(agent, world.tasks("test")[0], 1)


def test_an_evaluation_by_borrowed_answers_comes_again_and_goes_on(tmp_path: Any) -> None:
    suite = tmp_path / "sums.yaml"
    suite.write_text(
        "limits: {max_turns: 4, max_concurrent: 4}\ntasks: {split: test, n: 9}\n"
        "parts: {sums: {environment: {kind: countdown}}, room: {environment: {kind: keyhole}}}\n"
    )
    for name in ("whole", "cut"):
        last_json(run("evaluate", "random", "--suite", suite, "--out", tmp_path / name, "--json"))
    files = sorted((tmp_path / "cut" / "trajectories").iterdir())
    for path in (files[1], tmp_path / "cut" / "summary.json"):
        path.unlink()
    last_json(run("evaluate", "random", "--suite", suite, "--out", tmp_path / "cut", "--json"))
    assert (tmp_path / "cut" / "report.html").read_bytes() == (tmp_path / "whole" / "report.html").read_bytes()
    assert run("evaluate", "--verify", tmp_path / "whole").exit_code == 0
