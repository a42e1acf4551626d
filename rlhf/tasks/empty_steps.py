"""Counter of consecutive steps without training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import TrainingError


@dataclass
class EmptySteps:
    """Counter of consecutive steps without training data, which ends a run after too many.

    Attributes:
        n: finished steps in a row, up to now, that trained on nothing.
    """

    n: int = 0

    def check(self, most: int | None, where: str) -> None:
        """Raise TrainingError after `most` empty steps in a row; None allows any number."""
        if most is not None and self.n >= most:
            raise TrainingError(
                f"{self.n} steps in a row had nothing to train on",
                where=where,
                got="no kept group with an advantage",
                expected=f"one in {most} steps (selection.max_empty_steps)",
                hint="look at the trajectories: the tasks are too easy or too hard, or the policy has collapsed",
            )

    def learn(self, n_trained: float, where: str) -> tuple[dict[str, float], dict[str, str]]:
        """Update on a finished step, with its number of trained attempts. Returns metrics and cautions."""
        self.n = 0 if n_trained else self.n + 1
        why = "no group that was kept has an advantage"
        text = f"caution: {where} had nothing to train on, so the policy stays as it is: {why}"
        return {"sampling/n_empty_steps": float(self.n)}, {} if n_trained else {"empty": text}

    def state_dict(self) -> dict[str, Any]:
        """Number of empty steps in a row."""
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.n = int(state["n"])
