"""Trees that grow by value: worked numbers, states and statistics by brute force, and what guidance is worth."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rewards.shaping.outcome import Outcome as OutcomeReward
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Task, Trajectory, Turn
from rlhf.errors import RecipeError
from rlhf.rollout.contrib.value_tree import Node, ValueTree, nodes_of
from rlhf.rollout.group_structure import Tree, branches_of, trees_of
from tests.rollout.small_world import Corridor
from tests.rollout.test_group import LIMITS
from tests.rollout.test_trees import grow
from tests.rollout.trouble import Troubled, raises


def said(logprob: float) -> Turn:
    """A turn of one token."""
    return Turn(Action("a", (Generation(Prompt((1,)), (7,), (logprob,), Finish.STOP, 0),)), "...")


def tried(attempt: int, *turns: Turn, parent: int | None = None, n_shared: int = 0) -> Trajectory:
    return Trajectory("t", attempt, "", turns, Outcome.FAILED, parent=parent, n_shared=n_shared)


A, B, C, D = said(-2.0), said(-0.5), said(-1.5), said(-0.1)
#: Attempt 0 does A, B, C; attempt 1 leaves it after A, and does D, C.
FIRST = tried(0, A, B, C)
OTHER = tried(1, A, D, said(-1.5), parent=0, n_shared=1)


def test_states_are_met_once_and_know_who_passed() -> None:
    start, after_a, after_b, after_d = nodes_of([FIRST, OTHER])
    assert [n.leaves for n in (start, after_a, after_b, after_d)] == [[0, 1], [0, 1], [0], [1]]
    assert [len(n.ways) for n in (start, after_a, after_b, after_d)] == [1, 2, 1, 1]
    assert [n.logprob for n in (start, after_a, after_b, after_d)] == pytest.approx([0.0, -2.0, -2.5, -2.1])
    assert nodes_of([replace(FIRST, outcome=Outcome.ENV_ERROR)]) == []


def test_worked_example_of_the_bound() -> None:
    tree = ValueTree(judge=lambda task, t: 0.0)
    _, after_a, after_b, after_d = nodes_of([FIRST, OTHER])
    # Leaves worth 1 and 0: after A both passed, .5 + √(ln 2 / 2); after B one did, 1 + √(ln 2).
    values = {0: 1.0, 1: 0.0}
    assert tree.bound(after_a, values, 2) == pytest.approx(1.088705, abs=1e-6)
    assert tree.bound(after_b, values, 2) == pytest.approx(1 + math.sqrt(math.log(2)))
    assert tree.bound(after_d, values, 2) == pytest.approx(math.sqrt(math.log(2)))
    found = replace(tree, branches_per_round=4).chosen([after_a, after_b, after_d], values)
    assert found == [after_b, after_a, after_d, after_b]
    # A judge that failed on an attempt says nothing of what only that one passed.
    assert tree.bound(after_d, {0: 1.0}, 1) == -math.inf


def test_a_leaf_that_ended_before_the_states_counts_among_the_trees() -> None:
    # Three leaves worth 1, 0 and 0; the last ended after one turn and passed the start alone. After B, which the first
    # alone passed: 1 + √(ln 3) = 2.048147; after A, which two passed: .5 + √(ln 3 / 2) = 1.241152.
    third, values = tried(2, said(-3.0)), {0: 1.0, 1: 0.0, 2: 0.0}
    asked: list[float] = []

    class Told(ValueTree):
        def bound(self, node: Node, values: Mapping[int, float], n_leaves: int) -> float:
            asked.append(super().bound(node, values, n_leaves))
            return asked[-1]

    nodes = nodes_of([FIRST, OTHER, third])
    assert nodes[0].leaves == [0, 1, 2]
    assert Told(judge=lambda task, t: 0.0, branches_per_round=1).chosen(nodes, values) == [nodes[2]]
    assert asked[:2] == pytest.approx([1.241152, 2.048147], abs=1e-6)


def test_worked_example_of_best_first_search() -> None:
    # Over 2 turns −2 and over 1 turn −1.2: α = .5 gives −1.414214 and −1.2, α = 1 gives −1 and −1.2.
    one, two = tried(0, said(-1.2), said(-9.0)), tried(1, said(-1.4), said(-0.6), said(-9.0))
    [_, short], [_, _, long] = nodes_of([one]), nodes_of([two])
    assert ValueTree().likely(long) == (0, pytest.approx(-1.414214, abs=1e-6))
    assert ValueTree().chosen([short, long], {})[0] is short
    assert ValueTree(length_power=1.0).chosen([short, long], {})[0] is long
    # A state that was left twice comes after those that were left once, however likely it is.
    _, after_a, after_b, after_d = nodes_of([FIRST, OTHER])
    order = ValueTree(branches_per_round=3, length_power=0.0).chosen([after_a, after_b, after_d], {})
    assert order == [after_d, after_b, after_a]


def test_the_start_is_left_from_only_where_there_is_nothing_else() -> None:
    lone = tried(0, A)
    [node] = ValueTree(branches_per_round=1).chosen(nodes_of([lone]), {})
    assert node.turn == 0 and ValueTree().chosen([], {}) == []


def north(task: Task, trajectory: Trajectory) -> float:
    """How far an attempt came, as its last reply tells."""
    return sum("north" in turn.action.text for turn in trajectory.turns) / (1 + len(trajectory.turns))


def test_shared_states_of_real_attempts_are_one() -> None:
    tree = ValueTree(judge=north, branches_per_round=1, rounds=5)
    for group in grow(tree, 12):
        assert len(group) == 12 and sum(t.parent is None for t in group) == 2
        for attempts in trees_of(group):
            nodes = nodes_of(attempts)
            # By brute force: what was done before a state, in the very turns that attempts have in common.
            met = {
                tuple(id(turn.generations[0]) for turn in t.turns[:k]) for t in attempts for k in range(len(t.turns))
            }
            assert len(nodes) == len(met)
            assert sum(len(n.leaves) for n in nodes) == sum(len(t.turns) for t in attempts)


def n_solved(structure: Tree) -> int:
    """Tasks of 48 of which some leaf walked six doors north in seven turns."""
    world, limits = Corridor(length=6), replace(LIMITS, max_turns=7)
    found = [
        any(t.solved for t in group)
        for seed in range(6)
        for group in grow(structure, 4, seed=seed, environment=world, tasks=world.tasks("test"), limits=limits)
    ]
    return sum(found)


def test_guidance_finds_what_chance_misses() -> None:
    """Four attempts a task, one branch after another, by a policy that goes north three times in four."""
    chance = n_solved(Tree(branches_per_round=1, rounds=3))
    guided = n_solved(ValueTree(branches_per_round=1, rounds=3, judge=north, explore=0.1))
    assert guided >= chance + 4, (guided, chance)


def test_the_failure_of_a_part_ends_no_run() -> None:
    """Every attempt at the second task fails: there are no branches there."""
    world = Troubled(length=4, trouble=raises, at=0, seeds=frozenset({1}))
    asked: list[str] = []

    def judge(task: Task, trajectory: Trajectory) -> float:
        asked.append(task.id)
        return 0.0

    limits = replace(LIMITS, max_turns=6, max_retries=0)
    for structure in (ValueTree(judge=judge), ValueTree()):
        well, bad = grow(structure, 3, environment=world, tasks=world.tasks("test")[:2], limits=limits)
        assert len(well) == 3 and [t.outcome for t in bad] == [Outcome.ENV_ERROR]
    assert {*asked} == {well[0].task_id}


def test_a_judge_that_fails_leaves_a_tree_without_values() -> None:
    async def slow(task: Task, trajectory: Trajectory) -> float:
        await asyncio.sleep(60.0)
        return 0.0

    limits = replace(LIMITS, max_turns=6, reward_timeout_s=0.05)
    begun = time.monotonic()
    with pytest.warns(RuntimeWarning, match="the judge fails on every attempt"):
        groups = grow(ValueTree(judge=slow), 3, limits=limits)
    assert [len(group) for group in groups] == [3, 3]
    assert time.monotonic() - begun < 30, "the limit is that of the recipe"


def test_other_structures_are_asked_as_before() -> None:
    group = [FIRST]
    found = asyncio.run(branches_of(Tree(branches_per_round=2), Task("t"), group, random.Random(0)))
    assert found == Tree(branches_per_round=2).branches(group, random.Random(0))


def test_a_judge_who_knows_is_refused() -> None:
    with pytest.raises(RecipeError, match="uses the outcome of an attempt"):
        ValueTree(judge=OutcomeReward())
