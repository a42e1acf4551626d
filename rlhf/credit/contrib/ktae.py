"""KTAE: token-level advantage from the association of token ids with correct attempts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import correct
from rlhf.credit.wrapper import AdvantageWrapper
from rlhf.data import Credit, Generation, ScoredGroup
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KTAE(AdvantageWrapper):
    """Key-token advantage estimation: Ã_t = A_t + κ, with A of `inner`.

    κ of the token's id comes from which attempts of the group it occurs in.

    Of a right and b wrong attempts that contain the id, c and d that do not:

        κ = top · (2 σ(key) − 1),  key = s (w₁ F + w₂ I) / (w₁ + w₂),  s = h + x / (y + 1e-5) − y / (x + 1e-5)
        F = exp(−2 p), p of Fisher's two-sided exact test, 0 where p is 1;  I, the information gain in bits
        h = asin √(a / (a + c)) − asin √(b / (b + d))
        x = tf (k₁ + 1) / (tf + k₁ (1 − β + β n / mean n))

    tf is the id's share of the n tokens of right attempts; y is x of wrong ones, and mean n is over both.

    A group with right or with wrong attempts only, or where either sampled nothing, has κ = 0, and so have stop tokens
    (those of the prompt; the authors name one id). κ is not centred. The authors' p is from log-gammas: where a p of 1
    rounds to less F is .135 there and not 0, which changes κ by up to .27.

    Source: KTAE, arXiv 2505.16826; xiaolizh1/KTAE, `compute_key_tokens.py`.
    """

    max_bonus: Annotated[float, Field(ge=0)] = 1.0
    """Maximum κ."""
    fisher_weight: Annotated[float, Field(ge=0)] = 1.0
    """w₁, the weight of Fisher's test."""
    gain_weight: Annotated[float, Field(ge=0)] = 1.0
    """w₂, the weight of the information gain."""
    k1: Annotated[float, Field(gt=0)] = 2.0
    """Saturation constant k1 of x and y in an id's frequency; larger saturates later."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """β, how much they make up for one side having sampled more tokens."""
    correct_above: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """null: an attempt is correct if the environment reports success. A number: if its total score is above it."""

    def __post_init__(self) -> None:
        if not self.fisher_weight + self.gain_weight:
            raise ValueError("fisher_weight and gain_weight must not both be 0")

    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return `credits` with κ added."""
        return [self._added(group, credit) for group, credit in zip(groups, credits, strict=True)]

    def _added(self, group: ScoredGroup, credit: Credit) -> Credit:
        right: list[list[int]] = []
        wrong: list[list[int]] = []
        for trajectory, is_right in zip(group.trajectories, correct(group, self.correct_above), strict=True):
            (right if is_right else wrong).append(
                [i for g in trajectory.generations if not g.opponent for i in g.token_ids]
            )
        kappa = self.kappa(right, wrong)

        def raised(row: Sequence[float], generation: Generation) -> tuple[float, ...]:
            stops = generation.prompt.stop_ids
            return tuple(
                a if i in stops else a + kappa.get(i, 0.0) for a, i in zip(row, generation.token_ids, strict=True)
            )

        tokens = tuple(
            tuple(map(raised, rows, trajectory.generations))
            for trajectory, rows in zip(group.trajectories, credit.advantages_GNT, strict=True)
        )
        return replace(credit, advantages_GNT=tokens)

    def kappa(self, right: Sequence[Sequence[int]], wrong: Sequence[Sequence[int]]) -> dict[int, float]:
        """Return κ of every id, from its counts in right and wrong attempts, `[G][tokens]` each.

        It is empty where there are no right, or no wrong attempts.
        """
        n_right, n_wrong = (sum(map(len, attempts)) for attempts in (right, wrong))
        if not n_right or not n_wrong:
            return {}
        mean = (n_right + n_wrong) / 2
        count_x, count_y = (Counter(i for ids in attempts for i in ids) for attempts in (right, wrong))
        holds_x, holds_y = (Counter(i for ids in attempts for i in set(ids)) for attempts in (right, wrong))
        kappa = {}
        for i in count_x | count_y:
            a, b = holds_x[i], holds_y[i]
            c, d = len(right) - a, len(wrong) - b
            p = fisher_p(a, b, c, d)
            evidence = self.fisher_weight * (math.exp(-2 * p) if p < 1 else 0.0)
            evidence += self.gain_weight * information_gain(a, b, c, d)
            x = self._saturated(count_x[i] / n_right, n_right / mean)
            y = self._saturated(count_y[i] / n_wrong, n_wrong / mean)
            strength = math.asin(math.sqrt(a / (a + c))) - math.asin(math.sqrt(b / (b + d)))
            strength += x / (y + 1e-5) - y / (x + 1e-5)
            key = strength * evidence / (self.fisher_weight + self.gain_weight)
            kappa[i] = self.max_bonus * math.tanh(key / 2)  # 2 σ(key) − 1, without overflow
        return kappa

    def _saturated(self, share: float, length: float) -> float:
        return share * (self.k1 + 1) / (share + self.k1 * (1 - self.beta + self.beta * length))


def fisher_p(a: int, b: int, c: int, d: int) -> float:
    """P value of Fisher's two-sided exact test of the table ((a, b), (c, d)).

    It sums over all tables no likelier than this one.
    """
    n, row, column = a + b + c + d, a + b, a + c

    def ways(k: int) -> int:
        return math.comb(column, k) * math.comb(n - column, row - k)

    tables = range(max(0, row + column - n), min(row, column) + 1)
    return sum(w for w in map(ways, tables) if w <= ways(a)) / math.comb(n, row)


def information_gain(a: int, b: int, c: int, d: int) -> float:
    """Information gain, in bits, of the columns of ((a, b), (c, d)) by its rows."""
    n = a + b + c + d
    return _entropy(a + c, b + d) - (a + b) / n * _entropy(a, b) - (c + d) / n * _entropy(c, d)


def _entropy(*counts: int) -> float:
    n = sum(counts)
    return -math.fsum(k / n * math.log2(k / n) for k in counts if k)
