"""Flat arrays over the sampled tokens of a step, for estimators on tokens or whole steps.

A step may have millions of tokens. Sums are exact (`math.fsum`) here too, so the order of groups and trajectories does
not matter, not even in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from rlhf.credit.groups import is_constant, turn_rewards, with_counters
from rlhf.data import Credit, ScoredGroup
from rlhf.data.scoring import TokensGNT

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ShapeGN = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class FlatTokens:
    """Sampled tokens of a step end to end: N tokens of S trajectories, in K turns that have any.

    What the policy did not sample is not there, and so are turns in which it sampled nothing.

    Attributes:
        tokens_S: int `[S]`, sampled tokens of each trajectory.
        turns_S: int `[S]`, turns of each trajectory in which something was sampled.
        tokens_K: int `[K]`, sampled tokens of each of these turns, at least 1.
        rewards_K: `[K]`, the reward of each. That of a turn in which nothing was sampled has gone to the turn before
            it, or after it where none is before: it is lost only with a trajectory that sampled nothing at all.
    """

    tokens_S: Ints
    turns_S: Ints
    tokens_K: Ints
    rewards_K: Floats

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup]) -> FlatTokens:
        """Lay out the trajectories of `groups`. Raises DataError where a turn's score is not finite."""
        trajectories = [t for group in groups for t in group.trajectories]
        rewards = [row for group in groups for row in turn_rewards(group)]
        sampled = [[sum(g.n_tokens for g in turn.generations) for turn in t.turns] for t in trajectories]
        tokens_S: list[int] = []
        turns_S: list[int] = []
        tokens_K: list[int] = []
        rewards_K: list[float] = []
        for counts, earned in zip(sampled, rewards, strict=True):
            first, early = len(tokens_K), 0.0
            for n, reward in zip(counts, earned, strict=True):
                if n:
                    tokens_K.append(n)
                    rewards_K.append(reward + early)
                    early = 0.0
                elif len(tokens_K) > first:
                    rewards_K[-1] += reward
                else:
                    early += reward
            tokens_S.append(sum(counts))
            turns_S.append(len(tokens_K) - first)
        return cls(_ints(tokens_S), _ints(turns_S), _ints(tokens_K), np.array(rewards_K, np.float64))

    @property
    def first_K(self) -> Ints:
        """Position of each turn's first sampled token."""
        return np.cumsum(self.tokens_K) - self.tokens_K

    @property
    def last_K(self) -> Ints:
        """Position of each turn's last sampled token."""
        return np.cumsum(self.tokens_K) - 1

    @property
    def rewards_N(self) -> Floats:
        """`[N]`, the reward of each turn on its last sampled token, 0 elsewhere."""
        rewards = np.zeros(int(self.tokens_K.sum()))
        rewards[self.last_K] = self.rewards_K
        return rewards


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def following(values_N: Floats, lengths_S: Ints, last_S: Floats) -> Floats:
    """Successor of each entry `[N]` within segments of these lengths; `last_S` ends each segment.

    Segments may be empty; `last_S` has an entry for each all the same.
    """
    some = lengths_S > 0
    shifted = np.empty_like(values_N)
    shifted[:-1] = values_N[1:]
    shifted[np.cumsum(lengths_S)[some] - 1] = last_S[some]
    return shifted


def scan(x_N: Floats, lengths_S: Ints, factor: float) -> Floats:
    """Reverse discounted scan `[N]`: y_t = x_t + factor · y_{t+1} within each segment.

    Runs backwards through all segments at once: as many array operations as the longest has entries.
    """
    y_N = x_N.copy()
    order = np.argsort(-lengths_S, kind="stable")
    lengths, at = lengths_S[order], np.cumsum(lengths_S)[order] - 1
    longest = int(lengths[0]) if len(lengths) else 0
    # How many segments have more than 1, 2, ... entries: the first so many in `order`.
    n_longer = np.searchsorted(-lengths, -np.arange(1, longest)).tolist()
    running = y_N[at[: np.count_nonzero(lengths)]]
    for n in n_longer:
        at = at[:n] - 1
        running = x_N[at] + factor * running[:n]
        y_N[at] = running
    return y_N


def flat(tokens: Iterable[TokensGNT]) -> Floats:
    """Return the numbers of all tokens of all groups, end to end."""
    rows = chain.from_iterable(chain.from_iterable(tokens))
    return np.fromiter(chain.from_iterable(rows), np.float64)


def nested(shapes: Iterable[ShapeGN], values_N: Floats) -> list[TokensGNT]:
    """Return `values_N` cut into groups of these shapes; the inverse of `flat`."""
    numbers = iter(values_N.tolist())
    return [tuple(tuple(tuple(islice(numbers, n)) for n in row) for row in shape) for shape in shapes]


def shape_of(group: ScoredGroup) -> ShapeGN:
    """Return `[G][N]`, the sampled tokens of each generation of each trajectory."""
    return [[g.n_tokens for turn in t.turns for g in turn.generations] for t in group.trajectories]


def own_tokens(groups: Iterable[ScoredGroup]) -> npt.NDArray[np.bool_]:
    """Mask `[N]` of the tokens that the policy sampled, and no opponent in its place (`Generation.opponent`)."""
    generations = [g for group in groups for t in group.trajectories for g in t.generations]
    return np.repeat([not g.opponent for g in generations], [g.n_tokens for g in generations]).astype(np.bool_)


def whitened(
    values_N: Floats,
    own_N: npt.NDArray[np.bool_] | None = None,
    *,
    subtract_mean: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Floats | None:
    """Whitened values (x − mean) / (std + ε); None where all are equal up to rounding.

    Without `subtract_mean` it is x / (std + ε). Statistics are of the tokens in the mask `own_N` `[N]`; None is all.
    """
    counted = values_N if own_N is None else values_N[own_N]
    values = counted.tolist()
    if is_constant(values):
        return None
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum(np.square(counted - mean).tolist()) / (len(values) - ddof))
    scaled: Floats = (values_N - mean if subtract_mean else values_N) / (std + eps)
    return scaled


def whiten(
    groups: Sequence[ScoredGroup],
    credits: Sequence[Credit],
    *,
    subtract_mean: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> list[Credit] | None:
    """Return the `credits` of `groups`, `whitened` over the tokens that the policy sampled; None where these are equal.

    A token counts as one value, so long trajectories weigh more.
    """
    values_N, own_N = flat(c.advantages_GNT for c in credits), own_tokens(groups)
    found = whitened(values_N, own_N, subtract_mean=subtract_mean, ddof=ddof, eps=eps)
    if found is None:
        return None
    shapes = ([[len(row) for row in rows] for rows in c.advantages_GNT] for c in credits)
    return [replace(c, advantages_GNT=tokens) for c, tokens in zip(credits, nested(shapes, found), strict=True)]


def silenced(credits: Sequence[Credit]) -> list[Credit]:
    """Return `credits` with 0 for every token."""
    return [
        replace(c, advantages_GNT=tuple(tuple((0.0,) * len(row) for row in rows) for rows in c.advantages_GNT))
        for c in credits
    ]


def credits_of(
    groups: Sequence[ScoredGroup], credit_N: Floats, returns_N: Floats | None = None, *, is_flat: bool
) -> list[Credit]:
    """Credit of each group from flat token arrays of a step, with the step's counters.

    Args:
        groups: of the step.
        credit_N: a number for each of their tokens.
        returns_N: what a critic is to be trained on at each of their tokens.
        is_flat: whether there was nothing to tell tokens apart by; counted unless there are no trajectories at all.
    """
    shapes = [shape_of(group) for group in groups]
    credit = nested(shapes, credit_N)
    returns: Sequence[TokensGNT | None] = [None] * len(groups) if returns_N is None else nested(shapes, returns_N)
    credits = [
        Credit(c, {"credit/n_groups": float(len(group.trajectories) > 0)}, r)
        for group, c, r in zip(groups, credit, returns, strict=True)
    ]
    return with_counters(credits, {"credit/n_zero_std_steps": float(is_flat and any(g.trajectories for g in groups))})
