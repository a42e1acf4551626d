"""Samplers of start states: which ones, how often, what is remembered, and what is said about it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import RecipeError
from rlhf.tasks.contrib.start_states.base import is_due
from rlhf.tasks.contrib.start_states.exit import ExIt, ExItTasks, variance
from rlhf.tasks.contrib.start_states.reverse_curriculum import ReverseCurriculum
from rlhf.tasks.sampler import DemonstratedSampler, TaskSampler, TaskSource


def tasks(n: int) -> list[Task]:
    return [Task(f"t{i}", seed=i, reference="secret") for i in range(n)]


def walked(task: Task, n_turns: int, *, solved: bool = True, first: int = 0, attempt: int = 0) -> Trajectory:
    """An attempt at a task: its prefix, then turns with a generation each."""
    own = []
    for k in range(first, n_turns):
        generation = Generation(Prompt((1, k)), (2, attempt), (0.0, 0.0), Finish.STOP, 0)
        own.append(Turn(Action(f"go {k} {attempt}", (generation,)), f"At {k + 1}.", state_key=str(k)))
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    return Trajectory(task.id, attempt, "At 0.", (*task.prefix, *own), outcome, n_given=len(task.prefix))


def demonstrations(found: list[Task], n_turns: int) -> list[Trajectory]:
    plain = [walked(task, n_turns) for task in found]
    return [replace(d, turns=tuple(replace(t, action=Action(t.action.text)) for t in d.turns)) for d in plain]


def group(task: Task, scores: list[float], n_turns: int = 6) -> ScoredGroup:
    made = [
        walked(task, n_turns, solved=score > 0, first=len(task.prefix), attempt=i) for i, score in enumerate(scores)
    ]
    return ScoredGroup(
        task.id, tuple(made), tuple(Score({}, (0.0,) * len(t.turns), x) for t, x in zip(made, scores, strict=True))
    )


def steps(source: TaskSource, n: int, n_steps: int, scores: Any = lambda task, i: [1.0, 0.0]) -> list[list[str]]:
    """What is drawn in steps of `n` tasks that are all finished."""
    found = []
    for _ in range(n_steps):
        drawn = source.draw(n)
        source.learn([group(task, scores(task, i)) for i, task in enumerate(drawn)])
        found.append([task.id for task in drawn])
    return found


# --- reverse curriculum ----------------------------------------------------------------------------------------------


def test_starts_of_a_demonstration_of_four_steps() -> None:
    # Four segments of one turn: starts with 3, 2, 1 and 0 given turns; eight draws take each of them twice.
    source = ReverseCurriculum(segments=4).start(tasks(1), 0, demonstrations(tasks(1), 4))
    drawn = source.draw(8)
    assert Counter(task.id for task in drawn) == {"t0@3": 2, "t0@2": 2, "t0@1": 2, "t0": 2}
    for task in drawn:
        assert len(task.prefix) == int(task.id.partition("@")[2] or 0) and task.beginning == tasks(1)[0]
        assert [turn.action.text for turn in task.prefix] == [f"go {k} 0" for k in range(len(task.prefix))]


def test_staged_goes_back_from_the_goal() -> None:
    sampler = ReverseCurriculum(schedule="staged", segments=4, stage_steps=2)
    source = sampler.start(tasks(3), 0, demonstrations(tasks(2), 4))
    found = steps(source, 2, 9)
    # Two steps at each of 3, 2 and 1 given turns, both demonstrated tasks in each; then the tasks themselves, for good.
    for stage, n_given in enumerate((3, 2, 1)):
        for step in found[2 * stage : 2 * stage + 2]:
            assert sorted(step) == [f"t0@{n_given}", f"t1@{n_given}"]
    assert {name for step in found[6:] for name in step} == {"t0", "t1", "t2"}


@pytest.mark.parametrize(("n_turns", "given"), [(2, {1}), (3, {1, 2}), (7, {1, 3, 5}), (8, {2, 4, 6})])
def test_segments_are_as_equal_as_whole_turns_allow(n_turns: int, given: set[int]) -> None:
    # Starts after floor(n · j / 4) turns for j = 3, 2, 1: of 7 turns 5, 3 and 1; of 2 turns 1, 1 and 0, which is one.
    source = ReverseCurriculum(segments=4, beginning_share=0.0).start(tasks(1), 0, demonstrations(tasks(1), n_turns))
    assert {len(task.prefix) for task in source.draw(12)} == given


@given(share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]), begin=st.integers(0, 50), n=st.integers(1, 60))
def test_a_share_is_kept_as_evenly_as_can_be(share: float, begin: int, n: int) -> None:
    n_due = sum(is_due(place, share) for place in range(begin, begin + n))
    assert abs(n_due - share * n) < 1 + 1e-9


def test_the_share_of_beginnings() -> None:
    source = ReverseCurriculum(beginning_share=0.5).start(tasks(20), 0, demonstrations(tasks(2), 8))
    found = [name for step in steps(source, 4, 10) for name in step]
    assert sum("@" not in name for name in found) == 20
    assert {name for name in found if "@" not in name} == {f"t{i}" for i in range(20)}, "all tasks, shown or not"
    staged = ReverseCurriculum(schedule="staged", beginning_share=0.25, stage_steps=5)
    found = steps(staged.start(tasks(20), 0, demonstrations(tasks(2), 8)), 4, 15)
    assert all(sum("@" not in name for name in step) == 1 for step in found)


@given(
    at=st.integers(0, 12),
    n=st.integers(1, 7),
    schedule=st.sampled_from(["mixed", "staged"]),
    share=st.sampled_from([None, 0.3]),
)
@example(at=4, n=3, schedule="staged", share=0.3)
def test_a_reverse_curriculum_goes_on_where_another_stood(at: int, n: int, schedule: Any, share: float | None) -> None:
    sampler = ReverseCurriculum(
        schedule=schedule, beginning_share=share, stage_steps=3 if schedule == "staged" else None
    ).shown(demonstrations(tasks(3), 5))
    whole = steps(sampler.start(tasks(5), 3), n, 12)
    first, second = sampler.start(tasks(5), 3), sampler.start(tasks(5), 3)
    begun = steps(first, n, at)
    first.draw(n)  # a step that is not finished changes nothing
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + steps(second, n, 12 - at) == whole
    two = [task.id for task in second.draw(2) + second.draw(3, 2)]
    assert two == [task.id for task in second.draw(5)], "a second round goes on behind the first"


def test_what_a_reverse_curriculum_says() -> None:
    source = ReverseCurriculum(schedule="staged", beginning_share=0.5).start(tasks(2), 0, demonstrations(tasks(2), 4))
    drawn = source.draw(4)
    said = source.learn([group(task, [1.0, 1.0, 0.0] if task.prefix else [0.0, 0.0]) for task in drawn])
    assert said == {
        "sampling/prefix_turns_mean": 1.5,  # two beginnings, two starts after three turns
        "sampling/initial_state_success": 0.0,
        "sampling/start_success": pytest.approx(2 / 3),
        "sampling/stage": 0.0,
    }


def test_a_reverse_curriculum_needs_solved_demonstrations() -> None:
    sampler = ReverseCurriculum()
    assert isinstance(sampler, DemonstratedSampler) and not isinstance(ExIt(), DemonstratedSampler)
    assert isinstance(sampler.shown(()), TaskSampler)
    unsolved = [replace(d, outcome=Outcome.FAILED) for d in demonstrations(tasks(2), 4)]
    for shown in ([], unsolved, demonstrations(tasks(2), 1)):
        with pytest.raises(RecipeError, match="no demonstration is long enough for a later start state"):
            sampler.start(tasks(2), 0, shown)
    # A task whose demonstration failed is still drawn from its beginning.
    source = sampler.start(tasks(2), 0, [unsolved[0], demonstrations(tasks(2), 4)[1]])
    assert {task.id for task in source.draw(16)} == {"t0", "t1", "t1@1", "t1@2", "t1@3"}
    with pytest.raises(ValueError, match="stage_steps: 3 has no effect, because the schedule is mixed"):
        ReverseCurriculum(stage_steps=3)


# --- ExIt ------------------------------------------------------------------------------------------------------------


def test_variances_of_groups() -> None:
    assert [variance(g) for g in ([1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 0])] == [0.25, 0.0, 0.1875]
    assert variance([]) == variance([0.3]) == variance([0.1] * 7) == 0.0


def stored(source: ExItTasks) -> dict[str, float]:
    return {name.partition("-")[0]: priority for name, (_, priority) in source.stored.items()}


def test_start_states_are_drawn_by_the_variance_of_their_groups() -> None:
    # Groups of 1001, 1111 and 1110: variances .25, 0 and .1875, probabilities .571429, 0 and .428571.
    source = ExIt(p_new=0.01).start(tasks(3), 0)
    scores = {"t0": [1.0, 0.0, 0.0, 1.0], "t1": [1.0] * 4, "t2": [1.0, 1.0, 1.0, 0.0]}
    first = source.draw(3)
    assert sorted(task.id for task in first) == ["t0", "t1", "t2"], "an empty buffer leaves the tasks themselves"
    source.learn([group(task, scores[task.id]) for task in first])
    by_task = {task.origin: (task, priority) for task, priority in source.stored.values()}
    assert {name: priority for name, (_, priority) in by_task.items()} == {"t0": 0.25, "t2": 0.1875}
    drawn = [task for task in source.draw(6000) if task.prefix]
    # 5 940 draws of 1 in 100 kept back; deviation sqrt(p (1 − p) / n) = .0064: .03 is more than four of them.
    share = sum(task.origin == "t0" for task in drawn) / len(drawn)
    assert share == pytest.approx(0.571429, abs=0.03) and {task.origin for task in drawn} == {"t0", "t2"}
    assert len(drawn) / 6000 == pytest.approx(0.99, abs=0.006)


def test_a_start_state_is_a_part_of_an_attempt() -> None:
    source = ExIt().start(tasks(4), 0)
    steps(source, 4, 6)
    assert len(source.stored) > 4 and any("@" in name for step in steps(source, 4, 1) for name in step)
    for name, (task, _) in source.stored.items():
        assert name == task.id and 1 <= len(task.prefix) < 6 and task.origin in {"t0", "t1", "t2", "t3"}
        assert not any(turn.generations for turn in task.prefix), "what an earlier policy said is not trained on"
        assert [turn.action.text.rpartition(" ")[0] for turn in task.prefix] == [
            f"go {k}" for k in range(len(task.prefix))
        ]
    # Histories of equal length are told apart by what was done in them; the same history is one state.
    marks = {
        name.partition("@")[0] + str([t.action.text for t in task.prefix]) for name, (task, _) in source.stored.items()
    }
    assert len(marks) == len(source.stored)


def test_histories_grow_out_of_histories() -> None:
    source = ExIt(p_new=0.2).start(tasks(2), 1)
    steps(source, 4, 30)
    longest = max((task for task, _ in source.stored.values()), key=lambda task: len(task.prefix))
    assert len(longest.prefix) == 5 and longest.id.count("@") == 1


def test_a_state_is_judged_by_its_own_group_and_leaves_at_zero() -> None:
    source = ExIt(p_new=0.01).start(tasks(1), 0)
    source.learn([group(tasks(1)[0], [1.0, 0.0])])
    [(name, (task, priority))] = source.stored.items()
    assert priority == 0.25 and source.draw(1) == [task]
    source.learn([group(task, [1.0, 1.0, 1.0, 0.0])])
    assert source.stored[name] == (task, 0.1875)
    again = source.draw(1)[0]
    before = set(source.stored)
    said = source.learn([group(again, [0.0, 0.0])])
    assert set(source.stored) == before - {again.id}
    assert said["sampling/n_evicted"] == 1.0 and said["sampling/n_stored"] == len(before) - 1


def test_the_lowest_priorities_go_first_and_of_equal_ones_the_oldest() -> None:
    source = ExIt(max_size=2, p_new=1.0).start(tasks(4), 0)
    orders = [task.id for task in source.draw(4)]
    spread = dict(zip(orders, ([1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 0.0], [1.0, 0.0]), strict=True))
    source.learn([group(Task(name), spread[name]) for name in orders[:2]])
    assert [task.origin for task, _ in source.stored.values()] == orders[:2]
    source.learn([group(Task(name), spread[name]) for name in orders[2:3]])
    assert [task.origin for task, _ in source.stored.values()] == [orders[0], orders[2]]
    source.learn([group(Task(name), spread[name]) for name in orders[3:]])
    assert [task.origin for task, _ in source.stored.values()] == orders[2:]


def test_groups_that_broke_leave_nothing() -> None:
    source = ExIt().start(tasks(2), 0)
    source.learn([ScoredGroup(task.id, (), ()) for task in source.draw(2)])
    assert not source.stored and source.n_new == 2
    # Nor do attempts of one turn, which have no middle.
    source.learn([group(task, [1.0, 0.0], n_turns=1) for task in source.draw(2)])
    assert not source.stored


@given(at=st.integers(0, 10), n=st.integers(1, 5), size=st.integers(1, 6), p_new=st.sampled_from([0.2, 0.6]))
@example(at=5, n=3, size=4, p_new=0.2)
def test_exit_goes_on_where_another_stood(at: int, n: int, size: int, p_new: float) -> None:
    def scores(task: Task, i: int) -> list[float]:
        return [float((len(task.id) + i + k) % 3 > 0) for k in range(4)]

    sampler = ExIt(max_size=size, p_new=p_new)
    whole = steps(sampler.start(tasks(5), 3), n, 10, scores)
    first, second = sampler.start(tasks(5), 3), sampler.start(tasks(5), 3)
    begun = steps(first, n, at, scores)
    first.draw(n)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second == first
    assert begun + steps(second, n, 10 - at, scores) == whole
    assert [t.id for t in second.draw(2) + second.draw(3, 2)] == [t.id for t in second.draw(5)]


def test_a_buffer_of_other_tasks_is_refused() -> None:
    source = ExIt().start(tasks(1), 0)
    steps(source, 1, 2)
    with pytest.raises(KeyError):
        ExIt().start([Task("other")], 0).load_state_dict(source.state_dict())
    assert math.isfinite(sum(stored(source).values())) and stored(source)


def test_a_start_state_stays_where_every_attempt_failed_for_no_fault_of_the_policy() -> None:
    tasks = [Task(f"t{i}") for i in range(4)]
    source: Any = ExIt(p_new=1e-9).start(tasks, 0)
    state = tasks[0].started_after([Turn(Action("a"), "r", 0.0, "k")], mark="x")
    source.stored = {state.id: (state, 0.25)}
    drawn = source.draw(2)
    assert {task.id for task in drawn} == {state.id}
    source.learn([ScoredGroup(task.id, (), (), (Failure(0, Outcome.ENV_ERROR, "gone"),)) for task in drawn])
    assert source.stored == {state.id: (state, 0.25)}
