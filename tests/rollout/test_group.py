from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.chat import ChatAgent
from rlhf.data import Outcome, SamplingParams
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.contrib.budgets import Budgets
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.progress import Progress
from rlhf.rollout.renderer import Renderer
from tests.rollout.small_world import INLINE, ONE_THREAD, THREADS, Corridor, Plain, tokenizer
from tests.rollout.trouble import Troubled, blocks, raises, waits

LIMITS = Limits(step_timeout_s=20, start_timeout_s=20, episode_timeout_s=60)


def coin(**kwargs):
    """A policy that goes north three times in four."""
    words = ["go north"] * 3 + ["look"]
    return ScriptedEngine(lambda text, rng: rng.choice(words), tokenizer=tokenizer(), seeded=True, **kwargs)


def run(tasks=None, environment=None, engine=None, limits=LIMITS, group_size=4, seed=1, **kwargs):
    environment, engine = environment or Corridor(), engine or coin()
    tasks = environment.tasks("test")[:3] if tasks is None else tasks
    arguments = (tasks, environment, Plain(), engine, Renderer(tokenizer()), limits, SamplingParams())
    found = asyncio.run(run_groups(*arguments, group_size=group_size, seed=seed, **kwargs))
    assert environment.counts.alive == 0
    assert not engine.sessions
    return found


def told(groups):
    """Everything but the time."""
    return [[replace(t, duration_s=0.0) for t in group] for group in groups]


def test_every_task_is_attempted_group_size_times_in_order():
    tasks = Corridor().tasks("test")[:3]
    groups = run(tasks)
    assert [[(t.task_id, t.attempt) for t in g] for g in groups] == [[(task.id, i) for i in range(4)] for task in tasks]
    assert run([]) == []


@given(st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_one_seed_gives_one_result_however_many_run_at_once(max_concurrent, seed):
    limits = replace(LIMITS, max_concurrent=max_concurrent)
    assert told(run(limits=limits, seed=seed)) == told(run(seed=seed))


def test_seed_step_task_attempt_and_occurrence_all_count():
    task = Corridor().tasks("test")[0]

    def moves(**kwargs):
        groups = run([task, task], environment=Corridor(length=30), limits=replace(LIMITS, max_turns=30), **kwargs)
        return [tuple(t.action.text for t in trajectory.turns) for group in groups for trajectory in group]

    ways = [*moves(seed=1), *moves(seed=2), *moves(seed=1, step=1)]
    assert len(set(ways)) == 24  # two of 24 agree by chance with 276 · 0.625^30 = 2e-4


def test_attempts_are_told_their_budget():
    seen, environment = [], Corridor()
    engine = ScriptedEngine(lambda text: seen.append(text) or "go north", tokenizer=tokenizer())
    parts = ([environment.tasks("test")[0]], environment, ChatAgent(system=""), engine, Renderer(tokenizer()), LIMITS)
    budgets = Budgets(budgets=(9, 70), prompt="You have {budget} tokens.")
    [group] = asyncio.run(run_groups(*parts, SamplingParams(), group_size=4, seed=1, grouping=budgets))
    assert [t.attempt for t in group] == [0, 1, 2, 3] and len(seen) == 12
    assert (
        sorted(text.count("You have 9 tokens.") - text.count("You have 70 tokens.") for text in seen)
        == [-1] * 6 + [1] * 6
    )
    assert {t.opening for t in group} == {"Room 0 of 0."}  # what the environment says is the same
    with pytest.raises(ValueError, match="a multiple of the number of budgets = 2"):
        budgets.n_from_start(3)


def test_no_more_than_allowed_are_alive():
    environment = Corridor()
    run(environment.tasks("test"), environment, coin(latency_s=0.001), replace(LIMITS, max_concurrent=3))
    assert environment.counts.most_alive == 3
    assert environment.counts.started == environment.counts.closed == 32


@pytest.mark.parametrize("properties", [INLINE, THREADS, ONE_THREAD], ids=["inline", "threads", "one thread"])
def test_one_failed_task_leaves_the_others_as_they_were(properties):
    fine = told(run(environment=Corridor(properties=properties)))
    groups = told(run(environment=Troubled(properties=properties, trouble=raises, seeds=frozenset({1}), at=0)))
    assert [groups[0], groups[2]] == [fine[0], fine[2]]
    assert {(t.outcome, t.n_retries) for t in groups[1]} == {(Outcome.ENV_ERROR, 1)}
    assert all("the door is stuck" in t.detail for t in groups[1])


@pytest.mark.parametrize("properties", [THREADS, ONE_THREAD], ids=["threads", "one thread"])
@pytest.mark.parametrize("trouble", [blocks, waits], ids=["blocks", "waits"])
def test_one_hanging_task_leaves_the_others_as_they_were(properties, trouble):
    fine = told(run(group_size=2, environment=Corridor(properties=properties)))
    environment = Troubled(properties=properties, trouble=trouble, seeds=frozenset({1}), at=0)
    groups = told(run(group_size=2, environment=environment, limits=replace(LIMITS, step_timeout_s=0.5)))
    assert [groups[0], groups[2]] == [fine[0], fine[2]]
    assert {(t.outcome, t.n_retries) for t in groups[1]} == {(Outcome.TIMEOUT, 0)}
    assert environment.counts.started == environment.counts.closed == 6
    environment.released.set()


def test_a_passing_failure_changes_nothing_but_the_count():
    fine = told(run())
    # These are the first calls of three attempts, each of which is made again from its start.
    groups = told(run(engine=coin(fails_on={0, 3, 7})))
    retries = [t.n_retries for g in groups for t in g]
    assert sum(retries) == 3
    assert [[replace(t, n_retries=0) for t in g] for g in groups] == fine
    once = run(engine=coin(fails_on={0}), limits=replace(LIMITS, max_retries=0))
    assert [t.outcome for g in once for t in g].count(Outcome.ENGINE_ERROR) == 1


def test_environments_that_are_not_thread_safe_are_stepped_one_at_a_time():
    inside, most = [], []

    def counts(environment):
        inside.append(threading.get_ident())
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()

    run(environment=Troubled(properties=ONE_THREAD, trouble=counts, at=0))
    assert set(most) == {1}
    run(environment=Troubled(properties=THREADS, trouble=counts, at=0))
    assert max(most) > 1


def test_progress_says_what_is_waited_for():
    seen: list[Progress] = []
    environment = Troubled(properties=THREADS, trouble=waits, seeds=frozenset({1}), at=0)
    run(environment=environment, limits=replace(LIMITS, step_timeout_s=2.0), group_size=1, on_progress=seen.append)
    # On a busy machine the others end late, when the one that waits may have begun again.
    waiting = max((p for p in seen if p.n_done == 2 and p.n_running == 1), key=lambda p: p.longest_wait_s)
    assert (waiting.n_episodes, waiting.n_done, waiting.n_running, waiting.n_waiting_environment) == (3, 2, 1, 1)
    assert waiting.waits_for == "the environment of corridor/test/1, attempt 0"
    assert 0.3 < waiting.longest_wait_s < 20
    assert str(replace(waiting, longest_wait_s=7.0)) == (
        "2/3 episodes, 1 at the environment, 7 s for the environment of corridor/test/1, attempt 0"
    )
    last = seen[-1]
    assert (last.n_done, last.n_failed, last.n_running, last.waits_for) == (3, 1, 0, "")


def test_progress_names_the_engine():
    seen: list[Progress] = []
    run(engine=coin(latency_s=0.3), limits=replace(LIMITS, max_turns=2), on_progress=seen.append)
    assert max(p.n_waiting_engine for p in seen) == 12


def test_cancelling_a_rollout_closes_everything():
    environment, engine = Corridor(), coin(latency_s=60)

    async def start_and_cancel():
        arguments = (environment.tasks("test"), environment, Plain(), engine, Renderer(tokenizer()), LIMITS)
        rollout = asyncio.create_task(run_groups(*arguments, SamplingParams(), group_size=2, seed=0))
        while len(engine.sessions) < 16:
            await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(start_and_cancel())
    assert environment.counts.started == environment.counts.closed == 16
    assert not engine.sessions


def test_nothing_is_left_over_after_a_rollout():
    before = set(threading.enumerate())
    for properties in (INLINE, THREADS, ONE_THREAD):
        run(environment=Corridor(properties=properties))
    end = time.monotonic() + 10
    while not set(threading.enumerate()) <= before:
        assert time.monotonic() < end, "threads are left"
        time.sleep(0.01)
