"""Groups that are trees: what branches share is one set of tokens, however many attempts hold it."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.chat import ChatAgent
from rewards.shaping.outcome import Outcome as OutcomeReward
from rlhf.batching.samples import make_samples
from rlhf.credit.contrib.tree import tree_of, trees
from rlhf.credit.contrib.tree_grpo import TreeGRPO
from rlhf.credit.contrib.treerl import TreeRL
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, SamplingParams, Score, ScoredGroup, Trajectory, Turn
from rlhf.data.generation import counted_once, piece_of
from rlhf.rollout.group import run_groups
from rlhf.rollout.group_structure import Independent, Tree
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rollout.small_world import Corridor, tokenizer
from tests.rollout.test_group import LIMITS, coin, told

AGENT = ChatAgent(system="")


def grow(grouping, group_size, *, seed=1, environment=None, engine=None, tasks=None, limits=None, **kwargs):
    environment = environment or Corridor(length=4)
    tasks = environment.tasks("test")[:2] if tasks is None else tasks
    engine = engine or coin()
    limits = limits or replace(LIMITS, max_turns=6)
    parts = (environment, AGENT, engine, Renderer(tokenizer()), limits, SamplingParams())
    found = asyncio.run(run_groups(tasks, *parts, group_size=group_size, seed=seed, grouping=grouping, **kwargs))
    assert environment.counts.alive == 0 and not engine.sessions
    return found


def scored(attempts: list[Trajectory]) -> ScoredGroup:
    rewards = {"solved": WeightedReward("solved", 1.0, OutcomeReward())}
    task = next(t for t in Corridor().tasks("test") if t.id == attempts[0].task_id)
    return asyncio.run(score_group(task, attempts, rewards))


# --- the attempts ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.sampled_from(["random", "surprisal"]))
@settings(max_examples=12, deadline=None)
def test_a_tree_of_attempts(n, continuations, rounds, choose):
    tree = Tree(branches_per_round=n, continuations=continuations, rounds=rounds, choose=choose)
    assert tree.n_leaves == 1 + n * continuations * rounds
    for group in grow(tree, 2 * tree.n_leaves):
        assert [t.attempt for t in group] == list(range(2 * tree.n_leaves))
        assert [t.parent for t in group[:2]] == [None, None] and all(t.parent is not None for t in group[2:])
        for t in group[2:]:
            parent = group[t.parent]
            assert 1 <= t.n_shared < len(parent.turns)
            assert all(mine is theirs for mine, theirs in zip(t.turns[: t.n_shared], parent.turns, strict=False))
            # Token-exact: where it leaves, it reads what its parent read there.
            assert t.own_turns[0].generations[0].prompt == parent.turns[t.n_shared].generations[0].prompt
        # The estimators find the trees by what is shared; every tree is whole there.
        roots = list(range(len(group)))
        for t in group[2:]:
            roots[t.attempt] = roots[t.parent]
        found = tree_of(scored(group))
        for root in (0, 1):
            members = [i for i, r in enumerate(roots) if r == root]
            assert any(set(members) <= set(tree) for tree in trees(found.parents_V, found.leaves_G))


def test_one_seed_gives_one_tree_however_many_run_at_once():
    tree = Tree(rounds=2)
    limits = replace(LIMITS, max_turns=6)
    alone = told(grow(tree, 5, limits=replace(limits, max_concurrent=1)))
    assert alone == told(grow(tree, 5, limits=limits)) != told(grow(tree, 5, seed=2))
    assert told(grow(Independent(), 4)) == told(grow(Independent(), 4))


def test_groups_of_trees_have_a_size_that_trees_can_make():
    # M = 2, N = 2, L = 1, T = 1: 2 · (1 + 2) = 6 attempts. M = 6, N = 2, L = 1, T = 2: 6 · (1 + 4) = 30.
    assert Tree().n_from_start(6) == 2 and Tree(continuations=2).n_from_start(30) == 6
    for size in (2, 5, 7):
        with pytest.raises(ValueError, match="a multiple of 1 \\+ rounds x branches_per_round x continuations = 3"):
            Tree().n_from_start(size)


def test_a_tree_that_broke_has_no_branches():
    engine = coin(fails_on=range(1000))
    [group] = grow(Tree(), 3, engine=engine, tasks=Corridor().tasks("test")[:1])
    assert [t.outcome for t in group] == [Outcome.ENGINE_ERROR]


def test_a_tree_of_one_turn_branches_at_its_start():
    [group] = grow(Tree(), 3, environment=Corridor(length=1), tasks=Corridor().tasks("test")[:1], seed=3)
    assert len(group[0].turns) == 1, "the first attempt went straight through the door"
    assert [(t.parent, t.n_shared) for t in group] == [(None, 0), (0, 0), (0, 0)]


def test_trees_grow_from_start_states():
    [task] = Corridor().tasks("test")[:1]
    [first] = [g[0] for g in grow(Independent(), 1, tasks=[task])]
    start = task.started_after(first.turns[:2])
    [group] = grow(Tree(), 6, tasks=[start])
    assert {t.task_id for t in group} == {start.id} and all(t.n_given == 2 for t in group)
    assert all(t.n_shared > 2 for t in group[2:] if len(group[t.parent].own_turns) > 1)


# --- which states ----------------------------------------------------------------------------------------------------


def attempt(number, surprisals, parent=None, n_shared=0):
    """An attempt whose turns have one generation of two tokens, the second as surprising as is said."""
    turns = []
    for k, x in enumerate(surprisals):
        generation = Generation(Prompt((k, number)), (7, number), (-0.1, -x), Finish.STOP, 0)
        turns.append(Turn(Action("go", (generation,)), "..."))
    return Trajectory("t", number, "", tuple(turns), Outcome.FAILED, parent=parent, n_shared=n_shared)


def test_the_most_surprising_states_are_branched_from():
    first, second = attempt(0, [9.0, 1.0, 3.0, 2.0]), attempt(1, [0.5, 0.4])
    tree = Tree(branches_per_round=2, continuations=2, choose="surprisal")
    found = [(b.parent, len(b.turns)) for b in tree.branches([first, second], random.Random(0))]
    # The start is another tree, however surprising; the second tree has one state, which is taken twice.
    assert found == [(0, 2), (0, 2), (0, 3), (0, 3), (1, 1), (1, 1), (1, 1), (1, 1)]
    # A branch has states of its own behind the one it left from: turn 2 of the first attempt is not counted again.
    third = attempt(2, [9.0, 1.0, 8.0, 7.0], parent=0, n_shared=2)
    found = [(b.parent, len(b.turns)) for b in tree.branches([first, second, third], random.Random(0))]
    assert found[:4] == [(2, 3), (2, 3), (0, 2), (0, 2)]


def test_random_states_are_drawn_alike():
    first, branch = attempt(0, [1.0] * 3), attempt(1, [1.0] * 4, parent=0, n_shared=2)
    tree, rng = Tree(branches_per_round=1), random.Random(0)
    drawn = Counter((b.parent, len(b.turns)) for _ in range(900) for b in tree.branches([first, branch], rng))
    # Three states: after 1 and 2 turns of the first, after 3 of the branch. 300 each, deviation sqrt(900 · 2/9) = 14.
    assert set(drawn) == {(0, 1), (0, 2), (1, 3)} and all(abs(n - 300) < 70 for n in drawn.values())


# --- what shared tokens are worth ------------------------------------------------------------------------------------


def weights(group: ScoredGroup, estimator) -> dict[tuple[int, ...], float]:
    """The sum of the advantages over all rows, of the last token of each generation, by the ids up to it."""
    samples, _ = make_samples([group], [estimator(group)])
    found: dict[tuple[int, ...], float] = {}
    for trajectory, sample in zip(group.trajectories, samples, strict=True):
        for g in trajectory.generations:
            ids = g.prompt.token_ids + g.token_ids
            assert tuple(sample.token_ids[: len(ids)]) == ids
            found[ids] = found.get(ids, 0.0) + float(sample.advantages[len(ids) - 1])
    return found


@pytest.mark.parametrize("estimator", [TreeGRPO(), TreeRL()], ids=["tree_grpo", "treerl"])
@pytest.mark.parametrize("seed", range(4))
def test_each_sampled_token_weighs_what_its_estimator_says(estimator, seed):
    # Summed over the rows that hold it, a token weighs Σ over the leaves below of the advantage there, as the
    # estimator gives it: in Tree-GRPO the sum of those leaves' numbers, in TreeRL n / sqrt(n) = sqrt(n) times GA + LA.
    [attempts] = grow(Tree(branches_per_round=3, rounds=2), 14, seed=seed, tasks=Corridor().tasks("test")[:1])
    group = scored(attempts)
    totals = [s.total for s in group.scores]
    if len(set(totals)) == 1:
        group = replace(group, scores=tuple(Score({}, s.turns, float(i % 2)) for i, s in enumerate(group.scores)))
        totals = [s.total for s in group.scores]
    found = weights(group, estimator)
    below: dict[tuple[int, ...], list[int]] = {}
    for i, t in enumerate(group.trajectories):
        for g in t.generations:
            below.setdefault(g.prompt.token_ids + g.token_ids, []).append(i)
    assert any(len(leaves) > 1 for leaves in below.values())
    n, mean = len(totals), sum(totals) / len(totals)
    if isinstance(estimator, TreeGRPO):
        per_leaf = [rows[0][0] for rows in estimator(group).advantages_GNT]
        for ids, leaves in below.items():
            assert found[ids] == pytest.approx(sum(per_leaf[i] for i in leaves), abs=1e-5)
        # GRPO is centred within the group and within each tree, so what all of a tree share weighs its mean in the
        # group alone, times its size.
        std = math.sqrt(sum((x - mean) ** 2 for x in totals) / (n - 1))
        for ids, leaves in below.items():
            if set(leaves) == {i for i, t in enumerate(group.trajectories) if t.generations[0] == first_of(group, ids)}:
                assert found[ids] == pytest.approx(sum(totals[i] - mean for i in leaves) / (std + 1e-6), abs=1e-4)
    else:
        value = {
            ids: sum((totals[i] - mean) * n / (n - 1) for i in leaves) / len(leaves) for ids, leaves in below.items()
        }
        for i, t in enumerate(group.trajectories):
            chain = [g.prompt.token_ids + g.token_ids for g in t.generations]
            above, piece = 0.0, 0.0  # value of the parent piece, and of this one
            for k, ids in enumerate(chain):
                if k == 0 or below[ids] != below[chain[k - 1]]:
                    above, piece = piece, value[ids]
                expected = (piece + piece - above) * math.sqrt(len(below[ids]))
                assert found[ids] == pytest.approx(expected, abs=1e-4), i


def first_of(group: ScoredGroup, ids: tuple[int, ...]) -> Generation:
    """The first generation of the trajectories that hold `ids`."""
    holds = (t for t in group.trajectories if any(g.prompt.token_ids + g.token_ids == ids for g in t.generations))
    return next(holds).generations[0]


def test_what_is_shared_is_counted_once():
    [attempts] = grow(Tree(branches_per_round=2, rounds=2), 5, tasks=Corridor().tasks("test")[:1])
    metrics = RolloutBatch((scored(attempts),), 1.0).metrics()
    distinct = {id(g): g for t in attempts for g in t.generations}.values()
    assert metrics["rollout/n_tokens"] == sum(len(g.token_ids) for g in distinct) < sum(t.n_tokens for t in attempts)
    assert metrics["rollout/n_replayed_turns"] == sum(t.n_shared for t in attempts) > 0
    assert metrics["rollout/n_turns_mean"] == sum(len(t.turns) for t in attempts) / 5


def test_calls_before_the_one_that_attempts_part_in_are_counted_once():
    first, parting = (Generation(Prompt(p), (5, 6, 7), (-0.5,) * 3, Finish.STOP, 0) for p in ((1,), (1, 2)))
    head = piece_of(parting, 0, 1)
    turns = [[first, head, piece_of(parting, 1, 3)], [first, head, piece_of(parting, 1, 2)]]
    assert [g.n_tokens for g in counted_once(turns)] == [3, 1, 2, 1]
