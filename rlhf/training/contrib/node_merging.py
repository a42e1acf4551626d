"""Recipe keys of turns merged into nodes, for a process reward model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Merging:
    """A process reward model that also reads consecutive turns as one node.

    Each turn is learnt by itself and merged with those before it, up to `max_turns` in all; a node has the label of
    its last turn, so that what a later turn mends is not held against an earlier one. A mark before the node, which is
    the tokenizer's padding id, tells the model where what it judges begins. Each node is a row of its own.

    Compression makes more trees of the tree that attempts make: with probability `compress`, one child of a turn that
    has at least `min_children` is merged with it and hangs from the turn before; the label of the turn is then what
    became of its other children. What the tree was without it is learnt as well.

    Source: hierarchical reward models and node compression, arXiv 2503.13551, and the released code, which has
    probability .5 and 4 children.
    """

    max_turns: Annotated[int, Field(ge=1, le=8)] = 2
    """Maximum turns of a node; 1 merges only by compression."""
    compress: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability that a turn with enough children is merged with one of them; 0 for none."""
    min_children: Annotated[int, Field(ge=2)] = 4
    """Minimum children for merging a turn with one of them: different next actions of the attempts."""
