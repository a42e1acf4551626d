"""Value-guided tree rollouts: branches where a judge's values or the policy's log-probs say so."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import GroupReward, Reward
from rlhf.data import Task, Trajectory
from rlhf.errors import RewardError
from rlhf.rollout.branching import Branch
from rlhf.rollout.contrib.strategies import BestOfN, judged, unseen
from rlhf.rollout.group_structure import Tree, trees_of
from rlhf.settings import STRICT


@plain_dataclass(eq=False)
class Node:
    """State of a tree in which the policy was to act.

    Attributes:
        attempt: number of the first attempt that met it.
        turn: number of the turn that follows it there.
        logprob: Σ log π of all tokens on the way to it, nats.
        leaves: numbers of the attempts through it.
        ways: what was done next there, each once.
    """

    attempt: Trajectory
    turn: int
    logprob: float
    leaves: list[int] = field(default_factory=list)
    ways: set[tuple[int, ...]] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValueTree(Tree):
    """Trees that branch from the most promising states; statistics accumulate over rounds.

    With a judge, the value of a leaf is what the judge gives the attempt; it is backed up to all states on its way, and
    a state that n of the tree's N leaves passed is worth mean value + c √(ln N / n), the upper confidence bound. Leaves
    with a value are counted, in N also those that ended after one turn. Leaves worth 1 and 0 that both passed it,
    c = 1: .5 + √(ln 2 / 2) = 1.088705; with a third that ended before it, .5 + √(ln 3 / 2) = 1.241152.

    Without one it is best-first search by the policy: states are taken by Σ log π of the tokens that lead there, over
    L^α, L the turns on the way, and no state again before all others. Log-probs −2 over 2 turns and −1.2 over 1: with
    α = .5 −1.414214 and −1.2, so the second; with α = 1 −1 and −1.2, so the first.

    States are those of `tree` with `at: turn`, and the start is among them only where there is no other. Rounds of one
    state each (`branches_per_round: 1`) look again before every branch. The judge is not told the reference, nor how an
    attempt came out; where it fails on an attempt, that has no value. Where it fails on all attempts at a task, a
    warning says so, and branches leave from the states that were met first.

    Sources: bandit-based planning, Kocsis and Szepesvári, 2006; policy-guided tree search, arXiv 2502.06813; best-first
    search of BFS-Prover, arXiv 2502.03438.
    """

    choose: ClassVar[str] = "value"  # type: ignore[misc]
    at: ClassVar[str] = "turn"  # type: ignore[misc]

    judge: Reward | GroupReward | None = None
    """A reward, with its kind and keys; null uses the log-probs of the policy."""
    explore: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """c, in units of the judge's values."""
    length_power: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """α: 0 prefers short paths, 1 the highest mean log-prob per turn."""

    def __post_init__(self) -> None:
        """Refuse a judge that knows whether an attempt was right."""
        BestOfN(judge=self.judge)

    async def branches_by_value(
        self, task: Task, group: Sequence[Trajectory], rng: random.Random, timeout_s: float
    ) -> list[Branch]:
        """Return the next round's branches, tree by tree."""
        values = await self._values(task, group, timeout_s)
        return [
            Branch(node.attempt.attempt, node.attempt.turns[: node.turn])
            for attempts in trees_of(group)
            for node in self.chosen(nodes_of(attempts), values)
            for _ in range(self.continuations)
        ]

    async def _values(self, task: Task, group: Sequence[Trajectory], timeout_s: float) -> dict[int, float]:
        """Judge's value of each attempt, by its number, without those that ended with infrastructure errors."""
        alive = [t for t in group if not t.outcome.is_infrastructure_error]
        if self.judge is None or not alive:
            return {}
        try:
            found = await judged(self.judge, *unseen(task, alive), timeout_s)
        except RewardError as error:
            told = f"value_tree: the judge fails on every attempt at {task.id}, so branches are chosen without it"
            warnings.warn(f"{told}: {error.got}", RuntimeWarning, stacklevel=2)
            return {}
        return {alive[i].attempt: value for i, value in found.items()}

    def chosen(self, nodes: Sequence[Node], values: Mapping[int, float]) -> list[Node]:
        """Return the states of a tree to branch from, best first; from the first again where there are fewer."""
        n_leaves = len({i for node in nodes for i in node.leaves if i in values})
        nodes = [node for node in nodes if node.turn > node.attempt.n_given] or list(nodes)
        worth = (lambda node: self.bound(node, values, n_leaves)) if self.judge is not None else self.likely
        order = sorted(nodes, key=worth, reverse=True)  # stable: of equals, the one that was met first
        return [order[i % len(order)] for i in range(self.branches_per_round if order else 0)]

    def bound(self, node: Node, values: Mapping[int, float], n_leaves: int) -> float:
        """Upper confidence bound of a state's value; that of a state without values is never reached by others."""
        found = [values[i] for i in node.leaves if i in values]
        if not found:
            return -math.inf
        return math.fsum(found) / len(found) + self.explore * math.sqrt(math.log(n_leaves) / len(found))

    def likely(self, node: Node) -> tuple[int, float]:
        """Sort key of a state: minus its further branches so far, then its log-prob over L^α."""
        length = max(node.turn - node.attempt.n_given, 1)
        return 1 - len(node.ways), node.logprob / length**self.length_power


def nodes_of(attempts: Sequence[Trajectory]) -> list[Node]:
    """States of a tree in the order in which they were met; what attempts share is the same generations in both."""
    nodes: dict[tuple[int, ...], Node] = {}
    for t in attempts:
        if t.outcome.is_infrastructure_error:
            continue
        way: tuple[int, ...] = ()
        logprob = 0.0
        for k in range(t.n_given, len(t.turns)):
            node = nodes.setdefault(way, Node(t, k, logprob))
            node.leaves.append(t.attempt)
            generations = t.turns[k].generations
            node.ways.add(tuple(map(id, generations)))
            way += tuple(map(id, generations)) or (-k,)
            logprob += math.fsum(x for g in generations for x in g.logprobs)
    return list(nodes.values())
