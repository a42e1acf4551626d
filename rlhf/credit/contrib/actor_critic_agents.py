"""Credit for a critic of proposals: paid for correct reviews, not for the actor's outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.contrib.critic import ACCEPT, CRITIC, REVIEW, REVISE
from agents.roles import roles_of
from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import missing_part
from rlhf.credit.groups import correct, normalise, with_counters
from rlhf.credit.wrapper import AdvantageWrapper
from rlhf.data import Credit, ScoredGroup, Trajectory
from rlhf.data.generation import calls_of
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reviews(AdvantageWrapper):
    """Advantages of critic tokens from whether the review was right, compared within the group; `inner` for the others.

    A review is right if it accepts a proposal of an attempt that succeeds, or sends one back in an attempt that fails;
    one that could not be read is wrong. With x = 1 for right and 0 for wrong over all n reviews of a group,

        A = (x − mean) / (std + ε), + `outcome` times what `inner` gives

    with the deviation over n − 1. Where all reviews of a group are right, or none is, A is 0.

    Reviews are the calls with the role `critic` of an agent of kind `critic`, in the order of the lines of its note
    `review`; a turn that a full context broke off has no note. Without any this is `inner`.

    Worked: a successful attempt with two reviews, accept and revise; a failed one with one, revise. x = (1, 0) and (1),
    mean 2/3, deviation sqrt((1/9 + 4/9 + 1/9) / 2) = 0.57735, so A = (0.57735, −1.15470) and (0.57735).

    Source: our own; a critic rewarded for telling right from wrong is CTRL's idea, arXiv 2502.03492.
    """

    correct_above: float | None = None
    """Score above which an attempt counts as successful; null uses the environment's success."""
    outcome: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of `inner`'s advantage on the critic's tokens."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """ε."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse an agent without a critic."""
        agent = context.recipe.agent
        if CRITIC not in roles_of(agent) and not context.is_trained:
            why = f"an agent of kind {context.kind_of('agent', agent)} has no critic"
            yield missing_part(self, context, why, "use agent: {kind: critic}, or its inner estimator alone")

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about a critic that is trained alone, and only to predict outcomes."""
        if context.stage is not None and context.stage.train_roles == (CRITIC,) and not self.outcome:
            yield (
                f"{context.at('outcome')} is 0 and {context.stage_path}.train_roles is the critic alone: its reward "
                "is for predicting outcomes, not for improving them, and it may end up always or never accepting; "
                "watch credit/accepted_reviews_share, and set outcome: 1.0, or train the actor too"
            )

    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return `credits` with the critic's tokens paid for being right."""
        changed, n_reviews, n_right = [], 0, 0.0
        for group, credit in zip(groups, credits, strict=True):
            right_G = correct(group, self.correct_above)
            found = [
                list(reviews(trajectory, is_right))
                for trajectory, is_right in zip(group.trajectories, right_G, strict=True)
            ]
            values = [x for of in found for _, x in of]
            n_reviews, n_right = n_reviews + len(values), n_right + math.fsum(values)
            numbers = iter(normalise(values, by_std=True, eps=self.eps))
            rows_G = [list(rows) for rows in credit.advantages_GNT]
            for rows, of in zip(rows_G, found, strict=True):
                for places, _ in of:
                    number = next(numbers)
                    for n in places:
                        rows[n] = tuple(number + self.outcome * x for x in rows[n])
            changed.append(replace(credit, advantages_GNT=tuple(map(tuple, rows_G))))
        if not n_reviews:
            return with_counters(changed, {"credit/n_reviews": 0.0})
        shares = {"right_reviews": n_right / n_reviews, "accepted_reviews": _accepted(groups)}
        figures = {f"credit/{name}_share": value for name, value in shares.items()}
        return with_counters(changed, {"credit/n_reviews": float(n_reviews), **figures})


def _accepted(groups: Sequence[ScoredGroup]) -> float:
    """Share of the reviews that accept; 1 or 0 is a critic that has stopped to look."""
    notes = (turn.action.notes.get(REVIEW) for group in groups for t in group.trajectories for turn in t.turns)
    said = [verdict for note in notes if note is not None for verdict in note.split("\n")]
    return said.count(ACCEPT) / max(len(said), 1)


def reviews(trajectory: Trajectory, is_right: bool) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the generation numbers of each review of an attempt, and its reward x.

    Args:
        trajectory: of an agent of kind `critic`.
        is_right: whether it succeeded.
    """
    number = 0
    for turn in trajectory.turns:
        said = iter(turn.action.notes[REVIEW].split("\n") if REVIEW in turn.action.notes else ())
        for call in calls_of(turn.generations):
            places = tuple(range(number, number + len(call)))
            number += len(call)
            verdict = next(said, None) if call[0].role == CRITIC else None
            if verdict is not None:
                yield places, float(verdict == (ACCEPT if is_right else REVISE))
