"""Tree-GRPO and TreeRL: worked examples on given trees, and the tree that trajectories make by what they share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.tree import members, node_values, path, tree_grpo_advantages, tree_of, treerl_rewards, trees
from rlhf.credit.contrib.tree_grpo import TreeGRPO
from rlhf.credit.contrib.treerl import TreeRL
from rlhf.credit.grpo import GRPO
from rlhf.credit.rloo import RLOO
from rlhf.data import Action, Finish, Generation, Prompt, Turn
from rlhf.errors import DataError
from tests.credit.credit_groups import group_of, outcome_group, per_token, per_trajectory

#: The task, n1 below it with a and b, and c: a is right.
SMALL = ([-1, 0, 1, 1, 0], [2, 3, 4], [1.0, 0.0, 0.0])
#: Two trees of three leaves each.
TWO = ([-1, 0, 0, 1, 1, 1, 2, 2, 2], [3, 4, 5, 6, 7, 8], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0])

attempts = st.lists(st.lists(st.sampled_from([3, 5]), max_size=4), min_size=1, max_size=6)
rewards_of = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=6, max_size=6)


def said(ids_K):
    """Turns of one token each, whose prompts hold all that was said before."""
    seen, turns = (1, 2), []
    for i in ids_K:
        turns.append(Turn(Action("act", (Generation(Prompt(seen), (i,), (-0.5,), Finish.STOP, 0),)), "reply"))
        seen += (i, 9)
    return turns


def spoken(ids_GK, rewards_G=None):
    """A group of attempts that said these; each earned its reward in its last turn."""
    rewards_G = rewards_G or [0.0] * len(ids_GK)
    rows = [[0.0] * (len(ids) - 1) + [r] if ids else [] for ids, r in zip(ids_GK, rewards_G, strict=False)]
    return group_of([said(ids) for ids in ids_GK], rows)


def test_treerl_worked_example():
    # Each score minus the mean of the other two: 1, −.5, −.5. V(n1) = .25, V(task) = 0. n1: (.25 + .25) / √2 = .353553;
    # a: 1 + (1 − .25) = 1.75; b: −.5 − .75 = −1.25; c: −.5 − .5.
    assert treerl_rewards(*SMALL) == pytest.approx([0, 0.353553, 1.75, -1.25, -1.0], abs=1e-6)
    # Of raw scores V(n1) = .5, V(task) = 1/3: n1 (1/6 + 1/6) / √2; a 2/3 + 1/2; b −1/3 − 1/2; c −1/3 − 1/3.
    assert treerl_rewards(*SMALL, scaled=False) == pytest.approx(
        [0, 0.235702, 1.166667, -0.833333, -0.666667], abs=1e-6
    )
    assert node_values(*SMALL) == (pytest.approx([1 / 3, 0.5, 1, 0, 0]), [3, 2, 1, 1, 1])


def test_tree_grpo_worked_example():
    # Tree 1 scores 1, 0, 0: mean 1/3, deviation .577350: 1.154699, −.577349 twice; tree 2 scores 1, 1, 0: .577349
    # twice, −1.154699. All six: mean .5, deviation .547723: ±.912869. Sums.
    found = tree_grpo_advantages(*TWO)
    assert found == pytest.approx([2.067568, -1.490219, -1.490219, 1.490219, 1.490219, -2.067568], abs=1e-5)
    # Of means alone: ±.5 and 2/3, −1/3, −1/3, 1/3, 1/3, −2/3.
    means = [1.166667, -0.833333, -0.833333, 0.833333, 0.833333, -1.166667]
    assert tree_grpo_advantages(*TWO, by_std=False) == pytest.approx(means, abs=1e-5)


def test_both_estimators_find_the_worked_trees():
    # SMALL: a says 3 5, b says 3 7, c says 7 7 7, which is one segment of three turns.
    small = spoken([[3, 5], [3, 7], [7, 7, 7]], SMALL[2])
    credit = TreeRL()(small)
    assert [pytest.approx(row, abs=1e-6) for row in per_token(credit)] == [
        [0.353553, 1.75],
        [0.353553, -1.25],
        [-1.0] * 3,
    ]
    assert credit.metrics["credit/n_shared_segments"] == 1
    assert per_token(TreeRL(leave_one_out=False)(small))[0] == pytest.approx([0.235702, 1.166667], abs=1e-6)
    # TWO: trees that begin with 3 and with 5.
    two = spoken([[3, 1], [3, 2], [3, 3], [5, 1], [5, 2], [5, 3]], TWO[2])
    credit = TreeGRPO()(two)
    assert per_trajectory(credit) == pytest.approx(tree_grpo_advantages(*TWO))
    assert credit.metrics["credit/n_trees"] == 2 and credit.metrics["credit/n_singleton_trees"] == 0
    assert per_trajectory(TreeGRPO(normalize="mean")(two)) == pytest.approx(tree_grpo_advantages(*TWO, by_std=False))


def test_a_tree_is_made_of_segments_that_the_same_trajectories_share():
    # 3 5 is common to the first three, the second ends there, and 7 7 belongs to the third and fourth, which are equal.
    tree = tree_of(spoken([[3, 5, 1], [3, 5], [3, 5, 7, 7], [3, 5, 7, 7], [9], []]))
    first = tree.nodes_GN[0][0]
    assert tree.nodes_GN[1] == (first, first) and tree.leaves_G[1] == first and tree.parents_V[first] == 0
    assert tree.nodes_GN[0][:2] == (first, first) and tree.parents_V[tree.leaves_G[0]] == first
    assert tree.nodes_GN[2] == tree.nodes_GN[3] and len(set(tree.nodes_GN[2][2:])) == 1
    assert tree.leaves_G[5] == 0 and tree.nodes_GN[5] == ()
    assert len(tree.parents_V) == 5  # the task, 3 5, 1, 7 7, 9
    assert sorted(map(sorted, trees(tree.parents_V, tree.leaves_G))) == [[0, 1, 2, 3], [4], [5]]


def test_prompts_tell_generations_apart_and_calls_of_one_turn_are_generations():
    def call(prompt, *ids):
        return Generation(Prompt(prompt), ids, (-0.5,) * len(ids), Finish.STOP, 0)

    def plan(*calls):
        return [Turn(Action("act", calls), "reply")]

    # The planner says the same, the executor differs; the last is asked something else and answers the same.
    made = group_of(
        [plan(call((1,), 3), call((2,), 4)), plan(call((1,), 3), call((2,), 5)), plan(call((8,), 3), call((2,), 4))],
        [[1.0], [0.0], [0.0]],
    )
    a, b, c = tree_of(made).nodes_GN
    assert a[0] == b[0] and a[1] != b[1] and set(c).isdisjoint(a + b) and c[0] == c[1]
    # Sampled ids that begin alike share nothing; recorded as two generations they share the first.
    whole = group_of([plan(call((1,), 3, 4)), plan(call((1,), 3, 5))], [[1.0], [0.0]])
    assert tree_of(whole).parents_V == (-1, 0, 0)
    parts = group_of([plan(call((1,), 3), call((1, 3), 4)), plan(call((1,), 3), call((1, 3), 5))], [[1.0], [0.0]])
    assert tree_of(parts).parents_V == (-1, 0, 1, 1)


@given(ids_GK=attempts)
def test_trajectories_share_a_node_exactly_where_all_up_to_it_is_the_same(ids_GK):
    made = spoken(ids_GK)
    tree = tree_of(made)
    for i, ids in enumerate(ids_GK):
        assert len(tree.nodes_GN[i]) == len(ids)
        assert [0, *dict.fromkeys(tree.nodes_GN[i])] == path(tree.parents_V, tree.leaves_G[i])
        for j, others in enumerate(ids_GK):
            for n in range(min(len(ids), len(others))):
                assert (tree.nodes_GN[i][n] == tree.nodes_GN[j][n]) == (ids[: n + 1] == others[: n + 1])
    # Segments are as long as they can be: whoever is alone below a node is one segment, and no node has the same
    # members as its parent but for those that all trajectories pass.
    passing = members(tree.parents_V, tree.leaves_G)
    assert all(passing[v] != passing[p] for v, p in enumerate(tree.parents_V) if p > 0)


@given(ids_GK=attempts, rewards=rewards_of)
def test_what_a_branching_adds_cancels_over_the_branches(ids_GK, rewards):
    tree = tree_of(spoken(ids_GK))
    rewards = rewards[: len(ids_GK)]
    values, counts = node_values(tree.parents_V, tree.leaves_G, rewards)
    assert values[0] == pytest.approx(sum(rewards) / len(rewards)) and counts[0] == len(rewards)
    for node in range(len(tree.parents_V)):
        children = [v for v, p in enumerate(tree.parents_V) if p == node]
        ending = [r for r, leaf in zip(rewards, tree.leaves_G, strict=True) if leaf == node]
        below = [counts[v] * (values[v] - values[node]) for v in children] + [r - values[node] for r in ending]
        assert math.fsum(below) == pytest.approx(0, abs=1e-9)


@given(rewards=st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=6))
def test_where_nothing_is_shared_they_are_grpo_and_twice_rloo(rewards):
    made = spoken([[10 + i, 3, 3][: 1 + i % 3] for i in range(len(rewards))], rewards)
    assert TreeGRPO()(made).advantages_GNT == GRPO()(made).advantages_GNT
    twice = [[2 * x for x in row] for row in per_token(RLOO()(made))]
    assert per_token(TreeRL()(made)) == [pytest.approx(row, abs=1e-12) for row in twice]


@given(ids_GK=attempts, rewards=rewards_of)
def test_where_all_is_shared_nothing_is_learnt_from_what_is_common(ids_GK, rewards):
    common = spoken([[8, 8, *ids] for ids in ids_GK], rewards[: len(ids_GK)])
    assert all(row[:2] == [0.0, 0.0] for row in per_token(TreeRL()(common)))
    # One tree: the comparison within it is that with everybody.
    doubled = [[2 * x for x in row] for row in per_token(GRPO()(common))]
    assert per_token(TreeGRPO()(common)) == [pytest.approx(row) for row in doubled]
    found = [row[0] for row in per_token(TreeGRPO()(common))]
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)


@given(ids_GK=attempts, rewards=rewards_of)
def test_tokens_that_n_share_weigh_as_the_root_of_n(ids_GK, rewards):
    made = spoken(ids_GK, rewards[: len(ids_GK)])
    tree = tree_of(made)
    totals = [row[-1] if row else 0.0 for row in (s.turns for s in made.scores)]
    values, counts = node_values(tree.parents_V, tree.leaves_G, totals)
    sums = [0.0] * len(counts)
    for nodes, row in zip(tree.nodes_GN, TreeRL(leave_one_out=False)(made).advantages_GNT, strict=True):
        for node in dict.fromkeys(nodes):
            sums[node] += row[nodes.index(node)][0]
    for node in range(1, len(counts)):
        gain = 2 * values[node] - values[0] - values[tree.parents_V[node]]
        assert sums[node] == pytest.approx(math.sqrt(counts[node]) * gain, abs=1e-9)


@pytest.mark.parametrize(
    ("parents", "leaves"), [([], [0]), ([0, 0], [1]), ([-1, 2, 0], [1]), ([-1, -1], [1]), ([-1, 0], [2]), ([-1], [-1])]
)
def test_what_is_no_tree_is_refused(parents, leaves):
    with pytest.raises(DataError, match="not a tree"):
        members(parents, leaves)


def test_nodes_that_nobody_passes_and_equal_scores_are_nothing():
    assert node_values([-1, 0, 1], [1], [0.5]) == ([0.5, 0.5, 0.5], [1, 1, 0])
    assert treerl_rewards([-1, 0, 1], [1], [0.5]) == [0, 0, 0]
    assert treerl_rewards([-1, 0, 0], [1, 2], [0.1 + 0.2, 0.3]) == [0, 0, 0]
    assert tree_grpo_advantages([-1, 0, 0], [1, 2], [0.1 + 0.2, 0.3]) == [0, 0]
    alone = per_trajectory(GRPO()(outcome_group([1.0, 0.0, 0.0])))  # those that did nothing are trees of their own
    assert tree_grpo_advantages([-1, 0], [1, 0, 0], [1.0, 0.0, 0.0]) == alone
