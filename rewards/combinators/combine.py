"""Weighted combination of rewards, with schedules, gates and caps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import Reward
from rewards.combinators.ask import ask
from rewards.validation import earned
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    """A number that goes from `start` to `end` while the policy is updated.

    The step is the version of the policy that sampled the attempt, so the same attempt is always worth the same. From
    1 to 0 over 100 steps: .5 at step 50; by cosine, .853553 at step 25 and .5 at step 50.
    """

    start: _Number
    """The number up to step `begin`."""
    end: _Number
    """The number from step `begin` + `steps` on."""
    steps: Annotated[int, Field(ge=1)]
    """Number of updates of the schedule."""
    begin: Annotated[int, Field(ge=0)] = 0
    """The update after which it begins to change."""
    shape: Literal["linear", "cosine"] = "linear"
    """Evenly, or slowly at both ends."""

    def at(self, step: int) -> float:
        """Return the number at a step."""
        share = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share


def step_of(trajectory: Trajectory) -> int:
    """The version of the policy that sampled the newest token; 0 where there is none."""
    return max((v for g in trajectory.generations if not g.opponent for v in g.versions), default=0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Part:
    """Member reward, with its weight and bounds."""

    reward: Reward
    """A reward or a verifier, with its kind and keys."""
    weight: _Number | Schedule = 1.0
    """Weight in the sum; a number, or a schedule over the steps. 0 for a part that is only a gate."""
    min_value: _Number | None = None
    """Its value counts for no less than this."""
    max_value: _Number | None = None
    """Its value counts for no more than this."""

    def __post_init__(self) -> None:
        _check_bounds(self.min_value, self.max_value)

    def weight_at(self, step: int) -> float:
        """Return the weight at a step."""
        return self.weight.at(step) if isinstance(self.weight, Schedule) else self.weight


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Combine:
    """Clipped sum Σ weight · value over clipped `parts`; `gated_score` where a gate is not reached.

    Weights 1 and .5, values 1 and −.4 clipped at −.2: 1 + .5 · −.2 = .9. Every part is asked, behind a closed gate too,
    and stands in the reason. Parts with values per turn count on those turns, the others on the last; what a cap takes
    away or adds, and a closed gate, count on the last turn too. Bounds and gates of what the policy earns look at its
    own turns, without those given by the task.
    """

    parts: Mapping[str, Part]
    """The rewards by names of your choice."""
    gates: Mapping[str, _Number] = Field(default_factory=dict)
    """Part -> the least value, as that part gives it, for the sum to count at all: `{form: 1}` is "form must pass"."""
    gated_score: _Number = 0.0
    """Reward of an attempt that a gate stops."""
    min_value: _Number | None = None
    """The sum is no less than this."""
    max_value: _Number | None = None
    """The sum is no more than this."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: at least one reward to combine")
        if unknown := sorted(set(self.gates) - set(self.parts)):
            raise ValueError(f"gates: there is no part '{unknown[0]}'; there are {', '.join(self.parts)}")
        _check_bounds(self.min_value, self.max_value)

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Ask every part; raises what they raise."""
        verdicts = {name: await ask(part.reward, task, trajectory) for name, part in self.parts.items()}
        step, n_turns, n_given = step_of(trajectory), len(trajectory.turns), trajectory.n_given
        found = self.sum(verdicts, step, n_turns)
        if not n_given or found.per_turn is None:
            return found
        own = self.sum({name: earned(verdict, n_given) for name, verdict in verdicts.items()}, step, n_turns)
        assert own.per_turn is not None
        return replace(found, per_turn=(own.per_turn[0] + found.value - own.value, *own.per_turn[1:]))

    def sum(self, verdicts: Mapping[str, Verdict], step: int, n_turns: int) -> Verdict:
        """Combine the verdicts of the parts."""
        terms = {
            n: p.weight_at(step) * clipped(verdicts[n].value, p.min_value, p.max_value) for n, p in self.parts.items()
        }
        why = ", ".join(f"{name} {verdicts[name].value:g} → {term:g}" for name, term in terms.items())
        shut = [name for name, least in self.gates.items() if verdicts[name].value < least]
        total = self.gated_score if shut else clipped(math.fsum(terms.values()), self.min_value, self.max_value)
        found = Verdict(total, why=f"{' and '.join(shut)} closed; {why}" if shut else why)
        if not n_turns or all(v.per_turn is None for v in verdicts.values()):
            return found
        turns = [0.0] * n_turns
        for name, part in self.parts.items():
            if not shut:
                for k, value in enumerate(verdicts[name].per_turn or ()):
                    turns[k] += part.weight_at(step) * value
        turns[-1] += total - math.fsum(turns)
        return replace(found, per_turn=tuple(turns))


def clipped(value: float, low: float | None, high: float | None) -> float:
    """Return `value` brought between two bounds, either of which may be missing."""
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def _check_bounds(low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise ValueError(f"min_value: {low:g} is more than max_value: {high:g}")
