"""Node labels of trees: turns alone and merged with earlier ones, and compressed trees."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rewards.models.step_rows import node_row, step_rows
from rlhf.data import ScoredGroup
from rlhf.training.contrib.node_merging import Merging
from rlhf.training.contrib.step_labels import Labelled, passing, soft_mean

#: Of each attempt, turn -> the attempts that did and read the same up to its end.
Shared = Sequence[Mapping[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Compression:
    """A turn merged with one of its children.

    Attributes:
        turn: number of the turn.
        child: number of the turn that follows it.
        merged: attempts that took both.
        others: attempts that took the first and went on otherwise, or ended there.
    """

    turn: int
    child: int
    merged: tuple[int, ...]
    others: tuple[int, ...]


def compressions(shared: Shared, merging: Merging, draw: random.Random) -> Iterator[Compression]:
    """Yield merges of tree nodes (HRM): a turn of `min_children` or more with one of them, with probability `compress`.

    The tree is as it was when the next turn is looked at: each is a tree of its own, compressed in one place.
    """
    done = set()
    for of_turn in shared:
        numbers = list(of_turn)
        for k, child in pairwise(numbers):
            through = of_turn[k]
            if (k, through) in done:
                continue
            done.add((k, through))
            children = list(dict.fromkeys(shared[j][child] for j in through if child in shared[j]))
            if len(children) >= merging.min_children and draw.random() < merging.compress:
                merged = draw.choice(children)
                yield Compression(k, child, merged, tuple(j for j in through if j not in merged))


def labelled_nodes(
    groups: Iterable[ScoredGroup],
    merging: Merging,
    *,
    success_threshold: float,
    eta: float,
    mark: int,
    draw: random.Random,
) -> Iterator[Labelled]:
    """Yield a row for each node of each attempt, labelled by its last turn, then those of compression.

    Labels of turns are those of `labelled`. Nodes of several turns lie within one row of the attempt: where the context
    is rewritten, nothing is merged. A turn of which 4 attempts took 4 different ones next, 2 of them right, has the
    label .5 with η = 0; merged with a right one, the node has 1, and the turn 1/3, of the others.

    Args:
        groups: attempts that were made, with their scores.
        merging: how turns are merged.
        success_threshold: the score from which an attempt is right.
        eta: of the soft mean.
        mark: the id before a node.
        draw: decides on compression.
    """
    for group in groups:
        attempts = _Attempts(group, success_threshold, eta, mark)
        found = list(attempts.nodes(merging.max_turns))
        for merge in compressions(attempts.shared, merging, draw):
            if merging.max_turns == 1:  # else it is there already
                own = {i: attempts.shared[i][merge.child] for i in merge.merged}
                found += [attempts.row(i, merge.turn, merge.child, through) for i, through in own.items()]
            going_on = (i for i in merge.others if not attempts.ends_in(i, merge.turn))
            found += [attempts.row(i, merge.turn, merge.turn, merge.others) for i in going_on]
        yield from (row for row in found if row is not None)


class _Attempts:
    """The attempts of a group, and the rows of their nodes."""

    def __init__(self, group: ScoredGroup, success_threshold: float, eta: float, mark: int) -> None:
        self.task_id, self.eta, self.mark = group.origin, eta, mark
        self.right = [score.total >= success_threshold for score in group.scores]
        self.shared = passing(group)
        self.rows_G = [step_rows(trajectory) for trajectory in group.trajectories]

    def ends_in(self, i: int, turn: int) -> bool:
        """True if attempt `i` ends in a turn, which then has its own label."""
        return bool(self.rows_G[i]) and self.rows_G[i][-1].turns[-1] == turn

    def nodes(self, longest: int) -> Iterator[Labelled | None]:
        """The nodes of every attempt, in order."""
        for i, rows in enumerate(self.rows_G):
            for row in rows:
                for n, turn in enumerate(row.turns):
                    for first in row.turns[max(n - longest + 1, 0) : n + 1]:
                        yield self.row(i, first, turn, self.shared[i][turn], ends=True)

    def row(self, i: int, first: int, last: int, among: Sequence[int], *, ends: bool = False) -> Labelled | None:
        """Node of attempt `i` between two turns, labelled by `among`; None where no row holds it.

        It may stand for the end of the attempt where `ends` says so and it is its last turn alone.
        """
        is_end = self.ends_in(i, last)
        label = float(self.right[i]) if is_end else soft_mean([float(self.right[j]) for j in among], self.eta)
        for row in self.rows_G[i]:
            if first in row.turns and last in row.turns:
                ids, end = node_row(row, row.turns.index(first), row.turns.index(last), self.mark)
                is_last = ends and is_end and first == last
                return Labelled(self.task_id, i, ids, (end,), (label,), self.right[i], is_last)
        return None
