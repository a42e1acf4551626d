"""Input rows of a process reward model: the ids of an attempt, and where each turn ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhf.data import Trajectory
from rlhf.errors import DataError

Aggregate = Literal["min", "product", "last", "mean"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of ids.

    Attributes:
        token_ids: `[L]` everything that was read and said, up to the end of the last of its turns.
        ends: `[S]` the place of the last token that was sampled in each turn.
        turns: `[S]` the number of that turn in the attempt.
        begins: `[S]` the place of the first token that was sampled in it.
    """

    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    turns: tuple[int, ...]
    begins: tuple[int, ...] = field(default=(), compare=False)


def step_rows(trajectory: Trajectory) -> list[StepRow]:
    """Rows of an attempt: a new one wherever its context was rewritten.

    Turns without sampled tokens, such as those given to the policy, are no steps. A turn of several calls ends where
    the last of them does.
    """
    rows: list[StepRow] = []
    for number, turn in enumerate(trajectory.turns):
        said = [g for g in turn.generations if g.n_tokens]
        if not said:
            continue
        ids = said[-1].full_ids
        before = rows[-1] if rows and ids[: len(rows[-1].token_ids)] == rows[-1].token_ids else StepRow((), (), ())
        if before.ends:
            rows.pop()
        first = next(g for g in said if g.full_ids == ids[: len(g.full_ids)])
        begin = first.prompt.n_tokens
        ends, turns = (*before.ends, len(ids) - 1), (*before.turns, number)
        rows.append(StepRow(ids, ends, turns, (*before.begins, begin)))
    return rows


def node_row(row: StepRow, first: int, last: int, mark: int) -> tuple[tuple[int, ...], int]:
    """Ids of a node of several steps, after context and mark, and the place of its end.

    The node reaches from the first sampled token of step `first` of the row to the last of step `last`, replies between
    them included. The mark tells the model where what it judges begins: two steps read as one node are then something
    else than the second of them. 1 2 | 3 4, read 5, said 6: with mark 0, the second step is 1 2 3 4 5 0 6, the node of
    both is 1 2 0 3 4 5 6.
    """
    begin, end = row.begins[first], row.ends[last]
    return (*row.token_ids[:begin], mark, *row.token_ids[begin : end + 1]), end + 1


def cut(n_steps: int, n: int) -> list[tuple[int, int]]:
    """First and last step of each node of `n` steps; the last node has the rest.

    5 steps, 2 at a time: (0, 1), (2, 3), (4, 4).
    """
    return [(i, min(i + n, n_steps) - 1) for i in range(0, n_steps, n)]


def telescoped(p_S: Sequence[float]) -> list[float]:
    """Credit of each step by the probability that the attempt comes out right: p_k − p_{k−1}, with p_0 = 0.

    It sums to the last p, whatever happened on the way, so that no step can be said twice to earn twice; a sum of p_k
    would pay for every step more. (.9, .8, .3) gives (.9, −.1, −.5). Source: potential-based shaping, Ng, Harada and
    Russell, ICML 1999.
    """
    return [p - before for p, before in zip(p_S, [0.0, *p_S], strict=False)]


def aggregated(p_S: Sequence[float], how: Aggregate) -> float:
    """One number for an attempt from those of its steps; 0 where there are none.

    (.9, .8, .3): least .3, product .216, last .3, mean .666667.
    """
    if not all(0 <= p <= 1 for p in p_S):
        raise DataError("no probabilities", where="aggregated", got=str(list(p_S))[:80], expected="between 0 and 1")
    if not p_S:
        return 0.0
    if how == "min":
        return min(p_S)
    if how == "product":
        return math.prod(p_S)
    return p_S[-1] if how == "last" else math.fsum(p_S) / len(p_S)
