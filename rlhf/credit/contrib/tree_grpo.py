"""Tree-GRPO: compare attempts that share a beginning, and compare all attempts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.contrib.tree import tree_grpo_advantages, tree_of, trees
from rlhf.credit.groups import CriticFree, broadcast_trajectories, group_counters, group_returns
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TreeGRPO(CriticFree):
    """Tree-GRPO: A_i = (R_i − mean_tree) / (std_tree + ε) + (R_i − mean) / (std + ε).

    It is the same for every token of trajectory i.

    The first term is over the trajectories of the same tree, the second over the group. A tree are trajectories whose
    first generations are the same (`rlhf.credit.contrib.tree`), whether a rollout branched them or they happened to
    begin
    alike. Where nothing is shared this is GRPO.

    Tokens that several trajectories share are trained on in each of them, with each one's number: they get the sum, in
    which signs cancel, so that a beginning is moved by how its continuations did and not by how many there are.

    Degenerate cases: a tree of one trajectory, and one of equal scores, have 0 in the first term, where verl's rule
    gives a lone trajectory its raw score; equal scores and a lone trajectory in the group give exactly 0.

    Source: Tree-GRPO, arXiv 2509.21240; AMAP-ML/Tree-GRPO, `ray_trainer_ts.py`.
    """

    needs_branches: ClassVar[bool] = True

    normalize: Literal["mean_std", "mean"] = "mean_std"
    """`mean` only subtracts the means."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviations."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        tree = tree_of(group)
        advantages = tree_grpo_advantages(
            tree.parents_V, tree.leaves_G, returns, by_std=self.normalize == "mean_std", ddof=self.ddof, eps=self.eps
        )
        sizes = [len(members) for members in trees(tree.parents_V, tree.leaves_G)]
        counters = {
            "credit/n_trees": float(sum(n > 1 for n in sizes)),
            "credit/n_singleton_trees": float(sum(n == 1 for n in sizes)),
        }
        return Credit(broadcast_trajectories(group, advantages), group_counters(returns) | counters)
