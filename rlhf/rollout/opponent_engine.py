"""Opponents: seats of a game, or turns of an attempt, that another engine samples for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlhf.inference.engine import RolloutEngine


@dataclass(frozen=True, slots=True)
class OpponentEngine:
    """Engine of a seat or a turn.

    Attributes:
        name: recorded in its generations (`Generation.opponent`); empty for the policy.
        engine: samples for it; knows the policy's tokens.
    """

    name: str
    engine: RolloutEngine


def turn_key(turn: int) -> str:
    """Key of a turn among an attempt's opponents, whose other keys are seats; turns count from 0 after given ones."""
    return f"turn {turn}"


class OpponentSampler(Protocol):
    """Draws the opponents of an attempt."""

    def __call__(self, seed: int, attempt: int) -> Mapping[str, OpponentEngine]:
        """Opponent engines by seat, or by turn (`turn_key`); the same for the same arguments.

        Args:
            seed: of the attempt's task in this step, whichever the attempt.
            attempt: its number within the group.
        """
