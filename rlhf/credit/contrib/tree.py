"""Trees of attempts: which attempts share a beginning, and what each beginning was worth.

A tree is given by three short lists. Node 0 is the task, before anything was done; every other node is a segment of an
attempt, taken by one attempt or by several together.

    parents_V   `[V]`, each node's parent, which comes before it; of the task it is -1
    leaves_G    `[G]`, the node in which each attempt ends; the task itself where it did nothing
    rewards_G   `[G]`, the score of each attempt

Several attempts may end in one node, and one may end where others go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.credit.groups import normalise
from rlhf.credit.rloo import leave_one_out
from rlhf.data import Generation, ScoredGroup
from rlhf.errors import DataError


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of a group.

    Attributes:
        parents_V: each node's parent.
        leaves_G: the node each trajectory ends in.
        nodes_GN: `[G][N]`, the node of each generation of each trajectory.
    """

    parents_V: tuple[int, ...]
    leaves_G: tuple[int, ...]
    nodes_GN: tuple[tuple[int, ...], ...]


def tree_of(group: ScoredGroup) -> Tree:
    """Return the tree that the trajectories of a group make by what they have in common.

    A generation is the unit: two trajectories share it if prompt ids and sampled ids are the same, and all before it
    is shared too. A node is a longest run of generations that the same trajectories share, so an attempt that shares
    nothing is one node. Trajectories that part within a generation share nothing of it; whoever branches there records
    the common segment as a generation of its own, which the prompt of the next one extends.
    """
    calls_GN = [t.generations for t in group.trajectories]
    parents, leaves = [-1], [0] * len(calls_GN)
    nodes_GN: list[list[int]] = [[] for _ in calls_GN]
    waiting = [(list(range(len(calls_GN))), 0, 0)]  # members, the number of generations they share, and their node
    while waiting:
        members, n, node = waiting.pop()
        parts: dict[tuple[object, ...], list[int]] = {}
        for i in members:
            leaves[i] = node
            if n < len(calls_GN[i]):
                parts.setdefault(_ids(calls_GN[i][n]), []).append(i)
        for part in parts.values():
            end = _end_of_run([calls_GN[i] for i in part], n + 1)
            parents.append(node)
            for i in part:
                nodes_GN[i].extend([len(parents) - 1] * (end - n))
            waiting.append((part, end, len(parents) - 1))
    return Tree(tuple(parents), tuple(leaves), tuple(map(tuple, nodes_GN)))


def _ids(generation: Generation) -> tuple[object, ...]:
    return generation.token_ids, generation.prompt.token_ids


def _end_of_run(calls: Sequence[Sequence[Generation]], n: int) -> int:
    """Return the number of generations that all have in common, knowing that the first `n` are."""
    first = calls[0]
    while n < len(first) and all(n < len(other) and _ids(other[n]) == _ids(first[n]) for other in calls[1:]):
        n += 1
    return n


def path(parents_V: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the task down to `node`."""
    nodes = [node]
    while parents_V[nodes[-1]] >= 0:
        nodes.append(parents_V[nodes[-1]])
    return nodes[::-1]


def members(parents_V: Sequence[int], leaves_G: Sequence[int]) -> list[list[int]]:
    """Return `[V]`, the attempts that pass each node or end there.

    Raises:
        DataError: a parent does not come before its child, or a leaf is no node.
    """
    is_tree = list(parents_V[:1]) == [-1] and all(0 <= p < v for v, p in enumerate(parents_V[1:], start=1))
    if not is_tree or not all(0 <= leaf < len(parents_V) for leaf in leaves_G):
        raise DataError(
            "not a tree",
            where="rlhf.credit.contrib.tree",
            got=f"parents {list(parents_V)}, leaves {list(leaves_G)}",
            expected="-1 first, then for each node the number of one before it; leaves that are nodes",
        )
    found: list[list[int]] = [[] for _ in parents_V]
    for i, leaf in enumerate(leaves_G):
        for node in path(parents_V, leaf):
            found[node].append(i)
    return found


def node_values(
    parents_V: Sequence[int], leaves_G: Sequence[int], rewards_G: Sequence[float]
) -> tuple[list[float], list[int]]:
    """Value and count of each tree node, `[V]` each: mean score of, and number of, attempts through it.

    A node that no attempt passes has the value of its parent.
    """
    passing = members(parents_V, leaves_G)
    values: list[float] = []
    for node, through in enumerate(passing):
        above = values[parents_V[node]] if node else 0.0
        values.append(math.fsum(rewards_G[i] for i in through) / len(through) if through else above)
    return values, [len(through) for through in passing]


def treerl_rewards(
    parents_V: Sequence[int], leaves_G: Sequence[int], rewards_G: Sequence[float], *, scaled: bool = True
) -> list[float]:
    """TreeRL rewards `[V]`: ((V(s) − V(task)) + (V(s) − V(parent))) / sqrt(n(s)) of each node s; 0 of the task.

    V(s) is the mean score of the n(s) attempts that pass s, each minus the mean of the other attempts. Unless `scaled`
    it is minus the mean of all: the same, but for a factor G / (G − 1). Equal scores, up to rounding, give exactly 0.
    """
    centred = leave_one_out(rewards_G) if scaled else normalise(rewards_G, by_std=False)
    values, counts = node_values(parents_V, leaves_G, centred)
    return [0.0] + [
        (2 * values[s] - values[0] - values[parents_V[s]]) / math.sqrt(max(counts[s], 1))
        for s in range(1, len(parents_V))
    ]


def tree_grpo_advantages(
    parents_V: Sequence[int],
    leaves_G: Sequence[int],
    rewards_G: Sequence[float],
    *,
    by_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> list[float]:
    """Return `[G]`, each score normalised among the attempts of its tree, plus the same among all attempts.

    The trees are the children of the task with all below; an attempt that did nothing is a tree of its own. A tree of
    one attempt, or of equal scores, adds exactly 0.
    """
    advantages = normalise(rewards_G, by_std=by_std, ddof=ddof, eps=eps)
    for through in trees(parents_V, leaves_G):
        within = normalise([rewards_G[i] for i in through], by_std=by_std, ddof=ddof, eps=eps)
        for i, a in zip(through, within, strict=True):
            advantages[i] += a
    return advantages


def trees(parents_V: Sequence[int], leaves_G: Sequence[int]) -> list[list[int]]:
    """Attempts of each tree: of each child of the task, and of each attempt that did nothing."""
    passing = members(parents_V, leaves_G)
    grown = [passing[node] for node, parent in enumerate(parents_V) if parent == 0 and passing[node]]
    return grown + [[i] for i, leaf in enumerate(leaves_G) if leaf == 0]
