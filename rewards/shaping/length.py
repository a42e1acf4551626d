"""Rewards for saying no more than is needed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import Reward
from rewards.combinators.ask import ask
from rewards.shaping.outcome import Outcome
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT
from rlhf.stats import sigmoid

Unit = Literal["tokens", "turns"]


def concise(correct_G: Sequence[bool], lengths_G: Sequence[float], alpha: float) -> list[float]:
    """Scores `[G]` of correct attempts, less for longer ones: 1 − α · σ((length − μ) / (s + 10⁻⁷)).

    Lengths 100, 200, 300, all correct, α .1: .977290, .95, .922710. One correct: σ(0) = .5, so 1 − α/2. None: all 0.
    Source: Training Language Models to Reason Efficiently, arXiv 2502.04463, and its released reward.
    """
    right = [length for length, correct in zip(lengths_G, correct_G, strict=True) if correct]
    if not right:
        return [0.0] * len(correct_G)
    mean, deviation = statistics.fmean(right), statistics.pstdev(right)
    shares = [sigmoid((length - mean) / (deviation + 1e-7)) for length in lengths_G]
    return [1 - alpha * share if correct else 0.0 for correct, share in zip(correct_G, shares, strict=True)]


def length(trajectory: Trajectory, unit: Unit) -> int:
    """Sampled tokens, or turns, of what the policy did itself."""
    if unit == "tokens":
        return trajectory.n_policy_tokens
    return sum(not any(g.opponent for g in turn.generations) for turn in trajectory.turns[trajectory.n_given :])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Concise:
    """Length reward: correct attempts earn more the shorter they are in their group; wrong ones 0.

    1 − α · σ((length − μ) / s), with mean μ and deviation s of the lengths of the correct attempts. In a group of one,
    as in an evaluation, a correct attempt earns 1 − α/2.

    Source: arXiv 2502.04463 (α of 0, .05, .1, .2, .4, with RLOO).
    """

    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Weight of the length; a correct attempt earns more than 1 − alpha."""
    unit: Unit = "tokens"
    """Unit of length: sampled tokens, or turns."""
    correct: Reward = Field(default_factory=Outcome)
    """The reward or verifier that says which attempts are correct: those worth at least `min_correct`."""
    min_correct: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Minimal value of `correct` for a correct attempt."""

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Judge a group; raises what `correct` raises."""
        right = [(await ask(self.correct, task, t)).value >= self.min_correct for t in trajectories]
        lengths = [length(t, self.unit) for t in trajectories]
        values = concise(right, lengths, self.alpha)
        return [
            Verdict(value, why=f"{'correct' if ok else 'wrong'}, {n} {self.unit}")
            for value, ok, n in zip(values, right, lengths, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Budget:
    """0 within a budget, and minus the share by which it is exceeded beyond, at worst −1.

    With a budget of 100 tokens: 100 tokens 0, 150 tokens −0.5, 200 and more −1.
    """

    is_penalty: ClassVar[bool] = True
    inline: ClassVar[bool] = True

    limit: Annotated[int, Field(ge=1)]
    """Free budget."""
    unit: Unit = "tokens"
    """Unit of the budget: sampled tokens, or turns."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Count; never raises."""
        used = length(trajectory, self.unit)
        return Verdict(-min(max(used / self.limit - 1, 0.0), 1.0), why=f"{used} of {self.limit} {self.unit}")
