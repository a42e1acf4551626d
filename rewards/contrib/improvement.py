"""Reward for the improvement of a retry over the attempt before it (SCoRe)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import Reward
from rewards.combinators.ask import ask
from rewards.shaping.outcome import Outcome
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Improvement:
    """Gain α (v_i − v_parent) of a retry over the attempt it was shown; 0 for first attempts.

    v is what `reward` gives. Tries worth 0, 1 and 1 in a chain earn 0, α and 0; one that spoils what was right, −α.
    Beside v itself it makes right first tries and mended ones equal, and a policy that repeats itself earn nothing for
    it. An attempt whose parent failed by a part has no difference, and 0.

    Source: the shaped reward of SCoRe, arXiv 2409.12917, stage II.
    """

    reward: Reward = Field(default_factory=Outcome)
    """Reward that is to get better."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """α, what a difference of 1 is worth."""

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Judge a group; raises what `reward` raises."""
        values = {t.attempt: (await ask(self.reward, task, t)).value for t in trajectories}
        found = []
        for t in trajectories:
            before = None if t.parent is None else values.get(t.parent)
            gain = 0.0 if before is None else values[t.attempt] - before
            found.append(Verdict(self.alpha * gain, why="a first try" if before is None else f"{gain:+g} to the last"))
        return found
