"""A cost of the edits by which a policy grows a team."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

#: Note in which an agent of kind `team` keeps its edits, one a line.
_NOTE = "team"
_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeamCost:
    """Minus a cost for each role and each link that an agent of kind `team` adds, on the turn that adds them.

    The first `exempt` edits are free, so that a small team costs nothing: three roles and two links with the defaults
    cost .1 + .05 + .05 = .2, the first two roles being free. With `advantage: {kind: hrpo}` it is the absolute part of
    a step's credit.

    Source: MasHost, arXiv 2506.08507, which does not say its numbers; these are our own.
    """

    inline: ClassVar[bool] = True
    is_penalty: ClassVar[bool] = True

    role: _Cost = 0.1
    """Cost of a role."""
    link: _Cost = 0.05
    """Cost of a link."""
    exempt: Annotated[int, Field(ge=0)] = 2
    """First edits that are free."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Charge what was added."""
        left, per_turn, n = self.exempt, [], 0
        for turn in trajectory.turns:
            edits = turn.action.notes.get(_NOTE, "").splitlines()
            n += len(edits)
            charged, left = edits[left:], max(left - len(edits), 0)
            per_turn.append(0.0 - sum(self.link if edit.startswith("link ") else self.role for edit in charged))
        return Verdict(sum(per_turn), f"{n} edits of a team", tuple(per_turn))
