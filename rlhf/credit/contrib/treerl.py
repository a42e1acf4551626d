"""TreeRL: global and local advantages of the values along a tree's segments."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from rlhf.credit.contrib.tree import members, tree_of, treerl_rewards
from rlhf.credit.flat_tokens import shape_of
from rlhf.credit.groups import CriticFree, group_counters, group_returns
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TreeRL(CriticFree):
    """TreeRL advantage of a tree segment s: ((V(s) − V(task)) + (V(s) − V(parent))) / sqrt(n(s)).

    It is the same for every token of segment s of an attempt.

    V(s) is the mean score of the n(s) trajectories of the group that contain s, each score minus the mean of the
    others'. The segments are those of the tree that trajectories make by what they share (`rlhf.credit.contrib.tree`),
    whether
    a rollout branched them or they happened to begin alike. Where nothing is shared this is RLOO, twice.

    Tokens that n trajectories share are trained on in each of them; divided by sqrt(n) they weigh as sqrt(n) tokens.

    Degenerate cases: what all trajectories share, equal scores, and a lone trajectory give exactly 0. An attempt that
    ends where others go on counts in the value of the segment it ends with.

    The formula is the paper's, with its code's scores. The code divides each V by its own sqrt(n) before it subtracts,
    2 V(s) / sqrt(n(s)) − V(parent) / sqrt(n(parent)) as V(task) is 0, shifts all by a mean over the step, and lets a
    segment that changed nothing repeat the number of the segment before it.

    Source: TreeRL, arXiv 2506.11902; THUDM/TreeRL, `tree_node.py`.
    """

    needs_branches: ClassVar[bool] = True

    leave_one_out: bool = True
    """Leave-one-out baseline: the mean of the others; else the mean of all, which shrinks advantages by G / (G − 1)."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        tree = tree_of(group)
        rewards_V = treerl_rewards(tree.parents_V, tree.leaves_G, returns, scaled=self.leave_one_out)
        tokens = tuple(
            tuple((rewards_V[node],) * n for node, n in zip(nodes, lengths, strict=True))
            for nodes, lengths in zip(tree.nodes_GN, shape_of(group), strict=True)
        )
        n_shared = sum(len(through) > 1 for through in members(tree.parents_V, tree.leaves_G)[1:])
        return Credit(tokens, group_counters(returns) | {"credit/n_shared_segments": float(n_shared)})
