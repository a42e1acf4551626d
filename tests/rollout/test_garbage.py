"""Whatever an environment, a reward or an agent hands over, it becomes an outcome of that attempt alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from environments.base import StepResult
from environments.validation import checked_result
from environments.workers.pool import Processes
from rlhf.data import Action, Outcome, SamplingParams, ScoredGroup, Task, Trajectory, Turn, Verdict
from rlhf.errors import EnvError
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rollout.garbage import LONG, NO_TRUTH, Garbage, Leaving, Trouble, Unwilling, broken_verdict
from tests.rollout.small_world import INLINE, ONE_THREAD, THREADS, Corridor, Plain, tokenizer

LIMITS = Limits(step_timeout_s=20.0, start_timeout_s=20.0, episode_timeout_s=120.0, max_retries=0, max_concurrent=16)
MANY_BYTES = 100 * 2**20


def attempted(environment: Any, tasks: list[Task], limits: Limits = LIMITS) -> list[Trajectory]:
    """One attempt at each task, by a policy that always knows the way."""
    engine = ScriptedEngine(lambda text: "go north", tokenizer=tokenizer())
    arguments = (tasks, environment, Plain(), engine, Renderer(tokenizer()), limits, SamplingParams())
    groups = asyncio.run(run_groups(*arguments, group_size=1, seed=1))
    assert not engine.sessions
    return [replace(group[0], duration_s=0.0) for group in groups]


def holds(environment: Any, tasks: list[Task], limits: Limits = LIMITS) -> None:
    """No attempt that met garbage is scored, and every other one is what it is without garbage."""
    fine = attempted(Corridor(), tasks, LIMITS)
    found = attempted(environment, tasks, limits)
    for task, got, wanted in zip(tasks, found, fine, strict=True):
        if task.seed % 2:
            assert got.outcome in (Outcome.ENV_ERROR, Outcome.TIMEOUT), (task.seed, got.outcome)
            assert len(got.detail) < 10_000
        else:
            assert got == wanted


@pytest.mark.parametrize("properties", [INLINE, THREADS, ONE_THREAD], ids=["inline", "threads", "one thread"])
def test_garbage_of_an_environment_is_an_outcome_of_its_attempt_alone(properties: Any) -> None:
    environment = Garbage(n=240, properties=properties)
    holds(environment, environment.tasks("test"))
    assert environment.counts.alive == 0


def test_garbage_in_worker_processes_is_an_outcome_of_its_attempt_alone() -> None:
    environment = Processes(environment=Garbage(n=160, properties=THREADS), n_workers=2)
    try:
        holds(environment, Garbage(n=160).tasks("test"))
    finally:
        environment.close()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("properties", "n"),
    [(INLINE, 4000), (THREADS, 2400), (ONE_THREAD, 1600)],
    ids=["inline", "threads", "one thread"],
)
def test_four_thousand_results_of_environments_with_hangs_and_long_texts(properties: Any, n: int) -> None:
    environment = Garbage(n=n, properties=properties, hangs=True, most_bytes=MANY_BYTES)
    holds(environment, environment.tasks("test"), replace(LIMITS, step_timeout_s=3.0, start_timeout_s=3.0))


@pytest.mark.extended
def test_a_thousand_results_of_environments_in_worker_processes_with_long_texts() -> None:
    environment = Processes(environment=Garbage(n=2000, properties=THREADS, most_bytes=MANY_BYTES), n_workers=2)
    try:
        holds(environment, Garbage(n=2000).tasks("test"))
    finally:
        environment.close()


@pytest.mark.parametrize("odd", NO_TRUTH)
def test_what_is_no_truth_value_is_never_taken_for_success(odd: Any) -> None:
    result = StepResult("Out.", 1.0, terminated=True, success=odd())
    with pytest.raises(EnvError, match="success is no truth value"):
        checked_result(result, "step")


def test_numpys_scalars_and_derived_texts_are_taken_as_pythons_own() -> None:
    import numpy as np

    class Name(str):
        def __len__(self) -> int:
            raise RuntimeError

    got = checked_result(
        StepResult(
            Name("Out."), np.float32(0.5), np.bool_(True), success=np.bool_(False), admissible_actions=[Name("a")]
        ),
        "step",
    )
    assert got == StepResult("Out.", 0.5, True, success=False, admissible_actions=("a",))
    assert [type(x) for x in (got.reply, got.reward, got.terminated, got.success)] == [str, float, bool, bool]
    assert type(got.admissible_actions[0]) is str


# --- rewards ---------------------------------------------------------------------------------------------------------


class Odd:
    """A reward that is garbage for every second attempt."""

    def __init__(self, kind: str, first: int, hangs: bool, most_bytes: int) -> None:
        self.kind, self.first, self.hangs, self.most_bytes = kind, first, hangs, most_bytes
        self.inline = kind == "inline"

    def trouble(self, attempt: int) -> Trouble:
        return Trouble(self.first + attempt, broken_verdict, self.hangs, self.most_bytes)

    def __call__(self, task: Task, trajectory: Trajectory) -> Any:
        if trajectory.attempt % 2:
            return self.trouble(trajectory.attempt).happen()
        return trajectory.attempt / 8


class OddAsync(Odd):
    async def __call__(self, task: Task, trajectory: Trajectory) -> Any:
        if trajectory.attempt % 2:
            return await self.trouble(trajectory.attempt).happen_later()
        return trajectory.attempt / 8


class OddTogether(Odd):
    def over_group(self, task: Task, trajectories: list[Trajectory]) -> Any:
        rngs = [random.Random(self.first + t.attempt) for t in trajectories]
        return [
            broken_verdict(rng, self.most_bytes) if t.attempt % 2 else t.attempt / 8
            for t, rng in zip(trajectories, rngs, strict=True)
        ]


def judged(reward: Any, n: int, timeout_s: float) -> ScoredGroup:
    turns = tuple(Turn(Action("a"), "b") for _ in range(3))
    trajectories = [Trajectory("t", i, "", turns, Outcome.FAILED) for i in range(n)]
    fine = WeightedReward("fine", 1.0, lambda task, t: Verdict(1.0))
    rewards = {"fine": fine, "odd": WeightedReward("odd", 2.0, reward)}
    return asyncio.run(score_group(Task("t"), trajectories, rewards, timeout_s=timeout_s))


def judged_well(
    kind: str, n_garbage: int, *, hangs: bool = False, most_bytes: int = LONG, timeout_s: float = 20.0
) -> None:
    made = {"async": OddAsync, "together": OddTogether}.get(kind, Odd)
    for first in range(0, 2 * n_garbage, 40):
        group = judged(made(kind, first, hangs, most_bytes), 40, timeout_s)
        assert [t.attempt for t in group.trajectories] == list(range(0, 40, 2))
        assert [s.total for s in group.scores] == [1.0 + 2 * t.attempt / 8 for t in group.trajectories]
        assert [(f.attempt, f.outcome) for f in group.failures] == [(i, Outcome.REWARD_ERROR) for i in range(1, 40, 2)]
        assert all(len(f.message) < 10_000 for f in group.failures)


KINDS = ["thread", "inline", "async", "together"]


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_of_a_reward_is_a_failure_of_its_attempt_alone(kind: str) -> None:
    judged_well(kind, 60)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_results_of_rewards_with_hangs_and_long_texts(kind: str) -> None:
    judged_well(kind, 500, hangs=kind == "async", most_bytes=MANY_BYTES, timeout_s=3.0 if kind == "async" else 20.0)


def test_a_sum_that_is_no_finite_number_is_a_failure_of_the_reward() -> None:
    group = judged(lambda task, t: 1e308 if t.attempt else 0.0, 2, 20.0)
    assert [t.attempt for t in group.trajectories] == [0]
    assert "the sum is no finite number" in group.failures[0].message


# --- agents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        lambda said: None,
        lambda said: Unwilling(),
        lambda said: Leaving(),
        lambda said: Action(3, said),
        lambda said: Action("x" * LONG, said),
        lambda said: Action("go north", 5),
        lambda said: Action("go north", (*said, *said)),
        lambda said: Action("go north", said, notes=Unwilling()),
        lambda said: Action("go north", said, notes={"a": "x" * LONG}),
        lambda said: Action("go north", said, parts="go north"),
        lambda said: Action("go north", said, parts=("",) * LONG),
        lambda said: Action("go north", said, error=Unwilling()),
        lambda said: (_ for _ in ()).throw(KeyboardInterrupt),
        lambda said: (_ for _ in ()).throw(asyncio.CancelledError),
        lambda said: (_ for _ in ()).throw(GeneratorExit),
        lambda said: (_ for _ in ()).throw(SystemExit(1)),
    ],
)
def test_garbage_of_an_agent_is_an_outcome_of_its_attempt_alone(odd: Any) -> None:
    class Agent(Plain):
        async def act(self, history: Any, policy: Any) -> Any:
            action = await super().act(history, policy)
            return odd(action.generations) if history.task.seed == 1 else action

    def played(agent: Any) -> list[Trajectory]:
        engine = ScriptedEngine(lambda text: "go north", tokenizer=tokenizer())
        tasks = Corridor().tasks("test")[:3]
        arguments = (tasks, Corridor(), agent, engine, Renderer(tokenizer()), LIMITS, SamplingParams())
        groups = asyncio.run(run_groups(*arguments, group_size=1, seed=1))
        return [replace(group[0], duration_s=0.0) for group in groups]

    found, fine = played(Agent()), played(Plain())
    assert found[1].outcome is Outcome.AGENT_ERROR
    assert [found[0], found[2]] == [fine[0], fine[2]]
