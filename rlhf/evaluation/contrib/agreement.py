"""Agreement of a reward with labels that people gave, with 95% intervals; the unit of evidence is the prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import combinations

from rlhf.evaluation.contrib.rescore import rank_correlation
from rlhf.evaluation.statistics import Estimate, mean_interval

#: Value from which a reply counts as right, where all values lie between 0 and 1.
CUT = 0.5
_Z = 1.959964


def is_binary(values: Sequence[float]) -> bool:
    """True if all are 0 or 1."""
    return set(values) <= {0.0, 1.0}


def accuracy(values: Sequence[float], labels: Sequence[float], prompts: Sequence[Hashable]) -> Estimate:
    """Estimate the share of `values` [N], 1 from `CUT` on, that equal `labels` [N], 0 or 1; clustered by `prompts`."""
    equal = [float((value >= CUT) == bool(label)) for value, label in zip(values, labels, strict=True)]
    return mean_interval(equal, prompts, within=(0.0, 1.0))


def kappa(agreed: Estimate, values: Sequence[float], labels: Sequence[float]) -> Estimate | None:
    """Cohen's kappa: agreement beyond chance, (p − c) / (1 − c), for an accuracy p and chance agreement c.

    The interval is that of p, with c held as it is, as in Cohen's own standard error (Educational and Psychological
    Measurement 20, 1960). Of 10 replies 5 are right; a reward that takes 4 of these and 1 other for right has p = .8,
    c = .5 and kappa .6. None where both always say the same thing, as then c is 1.
    """
    n = len(values)
    said, right = sum(value >= CUT for value in values) / n, sum(map(bool, labels)) / n
    chance = said * right + (1 - said) * (1 - right)
    if chance == 1:
        return None
    kappas = [(p - chance) / (1 - chance) for p in (agreed.value, agreed.low, agreed.high)]
    return Estimate(kappas[0], max(-1.0, kappas[1]), kappas[2], n)


def order(
    values: Sequence[float], labels: Sequence[float], groups: Sequence[Hashable], prompts: Sequence[Hashable]
) -> tuple[Estimate, int]:
    """Estimate pairwise accuracy: how often the reply with the higher label of two scores higher; a tie counts half.

    Args:
        values: `[N]` of the reward.
        labels: `[N]` on any scale; pairs with one label are left out.
        groups: `[N]`; replies of one group are compared.
        prompts: `[N]`, by which the interval is clustered.

    Returns:
        the share, whose `n` is the number of pairs, and the number of ties.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    pairs = [
        pair for found in members.values() for pair in combinations(found, 2) if labels[pair[0]] != labels[pair[1]]
    ]
    up = [(values[i] - values[j]) * (labels[i] - labels[j]) for i, j in pairs]
    kept = [0.5 if x == 0 else float(x > 0) for x in up]
    return mean_interval(kept, [prompts[i] for i, _ in pairs], within=(0.0, 1.0)), kept.count(0.5)


def correlation(values: Sequence[float], labels: Sequence[float], prompts: Sequence[Hashable]) -> Estimate | None:
    """Spearman's rank correlation r, or None where one of the two does not vary.

    The interval is Fisher's, with the error √((1 + r²/2) / (n − 3)) of D. G. Bonett and T. A. Wright (Psychometrika 65,
    2000) for n prompts; r is brought towards 0 by (n − 1) / n there, so that few that agree have a width.
    """
    r, n = rank_correlation(values, labels), len(set(prompts))
    if r is None:
        return None
    found = Estimate(r, -1.0, 1.0, len(values))
    if n <= 3:
        return found
    z, half = math.atanh(r * (n - 1) / n), _Z * math.sqrt((1 + r * r / 2) / (n - 3))
    return replace(found, low=min(r, math.tanh(z - half)), high=max(r, math.tanh(z + half)))
