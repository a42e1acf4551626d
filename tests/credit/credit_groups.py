"""Scored groups with made-up tokens, for tests of credit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.catalog import CATALOG
from rlhf.credit.estimator import AdvantageEstimator
from rlhf.data import (
    Action,
    Credit,
    Finish,
    Generation,
    Outcome,
    Prompt,
    Score,
    ScoredGroup,
    Trajectory,
    Turn,
    Values,
    Verdict,
)
from rlhf.recipe.builder import build_part
from tests.test_catalog import NEEDED


def call(ids: Sequence[int], role: str = "") -> Generation:
    """A generation of these tokens."""
    return Generation(Prompt((1, 2), stop_ids=(0,)), tuple(ids), (-0.5,) * len(ids), Finish.STOP, 0, role=role)


def turn(n_tokens: int = 2, state: str | None = None, ids: Sequence[int] | None = None, text: str = "act") -> Turn:
    """A turn with one generation of that many tokens, or of these."""
    return turn_of([call((7,) * n_tokens if ids is None else ids)], state, text=text)


def turn_of(calls: Sequence[Generation], state: str | None = None, *, text: str = "act", **notes: str) -> Turn:
    """A turn of these calls, which left notes."""
    return Turn(Action(text, tuple(calls), notes=notes), "reply", state_key=state)


def trajectory(turns: Sequence[Turn], attempt: int = 0, *, task: str = "task", solved: bool = False) -> Trajectory:
    return Trajectory(task, attempt, "opening", tuple(turns), Outcome.SOLVED if solved else Outcome.FAILED)


def score(rewards_K: Sequence[float]) -> Score:
    """A score whose only part, `steps`, says what each turn earned."""
    total = float(sum(rewards_K))
    parts = {"steps": Verdict(total, "", tuple(rewards_K))} if math.isfinite(total) else {}
    return Score(parts, tuple(rewards_K), total)


def group(
    rewards_GK: Sequence[Sequence[float]],
    states_GK: Sequence[Sequence[str | None]] | None = None,
    *,
    lengths_GK: Sequence[Sequence[int]] | None = None,
    task: str = "task",
    solved_G: Sequence[bool] | None = None,
) -> ScoredGroup:
    """A group whose turns earned `rewards_GK` in `states_GK`, with `lengths_GK` tokens each."""
    states_GK = states_GK or [[None] * len(row) for row in rewards_GK]
    lengths_GK = lengths_GK or [[2] * len(row) for row in rewards_GK]
    turns_GK = [[turn(n, s) for n, s in zip(*pair, strict=True)] for pair in zip(lengths_GK, states_GK, strict=True)]
    return group_of(turns_GK, rewards_GK, task=task, solved_G=solved_G)


def group_of(
    turns_GK: Sequence[Sequence[Turn]],
    rewards_GK: Sequence[Sequence[float]],
    *,
    task: str = "task",
    solved_G: Sequence[bool] | None = None,
) -> ScoredGroup:
    """A group of trajectories with these turns, which earned `rewards_GK`."""
    solved_G = solved_G or [False] * len(turns_GK)
    return ScoredGroup(
        task,
        tuple(
            trajectory(turns, attempt, task=task, solved=solved)
            for attempt, (turns, solved) in enumerate(zip(turns_GK, solved_G, strict=True))
        ),
        tuple(map(score, rewards_GK)),
    )


def taking(made: ScoredGroup, seconds_G: Sequence[float]) -> ScoredGroup:
    """The same group, whose trajectories took these seconds."""
    timed = (replace(t, duration_s=s) for t, s in zip(made.trajectories, seconds_G, strict=True))
    return replace(made, trajectories=tuple(timed))


def outcome_group(returns_G: Sequence[float], **how: Any) -> ScoredGroup:
    """A group of one-turn trajectories with these returns."""
    return group([[r] for r in returns_G], **how)


def estimators() -> dict[str, AdvantageEstimator]:
    """Every estimator of the catalogue, with no more settings than it needs."""
    return {
        kind: build_part("advantage", {"kind": kind, **NEEDED.get(("advantage", kind), {})}, kind, base=Path())
        for kind in CATALOG["advantage"]
    }


def critic(group: ScoredGroup, constant: float | None = None) -> Values:
    """Values that depend on what was sampled so far, or are all the same; 0.25, or the same, where a limit cut.

    Those of actions are higher by a little less for each token.
    """
    tokens, actions, cuts = [], [], []
    for t in group.trajectories:
        seen, rows = 0, []
        for generation in t.generations:
            row = []
            for i in generation.token_ids:
                row.append((seen * 3 % 7) / 7 if constant is None else constant)
                seen += i
            rows.append(tuple(row))
        is_cut = t.outcome in (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT)
        tokens.append(tuple(rows))
        actions.append(tuple(tuple(x if constant is not None else x + 0.5**i for i, x in enumerate(r)) for r in rows))
        cuts.append((0.25 if constant is None else constant) if is_cut else 0.0)
    return Values(tuple(tokens), tuple(cuts), tuple(actions))


def per_turn(credit: Credit) -> list[list[float]]:
    """`[G][K]` the number of each turn of one generation; fails where its tokens differ."""
    numbers = []
    for rows in credit.advantages_GNT:
        assert all(len(set(row)) == 1 for row in rows)
        numbers.append([row[0] for row in rows])
    return numbers


def per_trajectory(credit: Credit) -> list[float]:
    """`[G]` the number of each trajectory; fails where its tokens differ."""
    for row in per_turn(credit):
        assert len(set(row)) == 1
    return [row[0] for row in per_turn(credit)]


def per_token(credit: Credit) -> list[list[float]]:
    """`[G][tokens]` the numbers of each trajectory's tokens, all generations in order."""
    return [[x for row in rows for x in row] for rows in credit.advantages_GNT]
