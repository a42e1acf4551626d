"""Labels of attempts and steps: probability of success from here on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rewards.models.step_rows import step_rows
from rlhf.credit.contrib.tree import members, tree_of
from rlhf.data import ScoredGroup
from rlhf.errors import DataError


@dataclass(frozen=True, slots=True)
class Labelled:
    """A row with what a model is to say at some of its places.

    Attributes:
        task_id: of the attempt.
        attempt: which of the attempts at that task, counted over the group.
        token_ids: `[L]` what is read.
        ends: `[S]` the places.
        labels: `[S]` between 0 and 1.
        right: whether the attempt came out right.
        is_last: whether the last place is the end of the attempt.
    """

    task_id: str
    attempt: int
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    labels: tuple[float, ...]
    right: bool
    is_last: bool = True


def soft_mean(rewards_J: Sequence[float], eta: float) -> float:
    """Entropy-regularised value of a state whose continuations earned this: (1/η) ln mean_j exp(η r_j).

    With η → 0 it is the mean, and with η → ∞ the best; one continuation gives its own reward. Half of them right is
    .620115 with η = 1, .716890 with 2 and .501250 with .01; a quarter is .357374 with 1.

    Args:
        rewards_J: of the continuations, at least one.
        eta: at least 0, which stands for the limit.

    Source: ER-PRM, arXiv 2412.11006.
    """
    if not rewards_J or eta < 0:
        raise DataError(
            "the soft mean is not defined",
            where="soft_mean",
            got=f"{len(rewards_J)} rewards, eta {eta}",
            expected="at least one reward, and eta at least 0",
        )
    if eta == 0:
        return math.fsum(rewards_J) / len(rewards_J)
    most = max(rewards_J)
    # Minus the largest, so that nothing overflows; expm1 and log1p, so that a small η loses no digits.
    return most + math.log1p(math.fsum(math.expm1(eta * (r - most)) for r in rewards_J) / len(rewards_J)) / eta


def labelled(groups: Iterable[ScoredGroup], *, steps: bool, success_threshold: float, eta: float) -> Iterator[Labelled]:
    """Give the rows of all attempts with their labels, in order.

    An attempt is right, 1, if its score is at least `success_threshold`, else wrong, 0. Of whole attempts (`steps`
    false) that is the label of the last place. Of steps, the label of a turn is the soft mean over all attempts that
    did and read the same up to the end of that turn, which are many where attempts branch; that of the last turn is its
    own.

    Args:
        groups: attempts that were made, with their scores.
        steps: whether each turn has a label, or only the last.
        success_threshold: the score from which an attempt is right.
        eta: of the soft mean.
    """
    for group in groups:
        right = [score.total >= success_threshold for score in group.scores]
        for i, (trajectory, shared) in enumerate(zip(group.trajectories, passing(group), strict=True)):
            of_turn = {k: soft_mean([float(right[j]) for j in attempts], eta) for k, attempts in shared.items()}
            rows = step_rows(trajectory)
            for row in rows:
                is_last = row is rows[-1]
                labels = [of_turn[number] for number in row.turns]
                if is_last:
                    labels[-1] = float(right[i])
                elif not steps:
                    continue
                first = 0 if steps else len(labels) - 1
                yield Labelled(
                    group.origin, i, row.token_ids, row.ends[first:], tuple(labels[first:]), right[i], is_last
                )


def passing(group: ScoredGroup) -> list[dict[int, tuple[int, ...]]]:
    """Attempts through each turn, by attempt: those identical up to the end of that turn.

    The turns are those that the policy took. Each attempt is among its own.
    """
    tree = tree_of(group)
    through = members(tree.parents_V, tree.leaves_G)
    found: list[dict[int, tuple[int, ...]]] = []
    for trajectory, nodes_N in zip(group.trajectories, tree.nodes_GN, strict=True):
        of_turn, n = {}, 0
        for number, turn in enumerate(trajectory.turns):
            n += len(turn.generations)
            if turn.generations:
                of_turn[number] = tuple(through[nodes_N[n - 1]])
        found.append(of_turn)
    return found
