"""Task advantage normalisation: one scale for the advantages of every type of task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.flat_tokens import whiten
from rlhf.credit.groups import with_counters
from rlhf.credit.wrapper import AdvantageWrapper
from rlhf.data import Credit, ScoredGroup
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskNormalised(AdvantageWrapper):
    """Advantage normalised within a task type: Ã_t = (A_t − mean A) / (std A + ε); A of `inner`.

    Statistics run over the tokens that the policy sampled for all tasks of one type in the step.

    The type of a task is its id without the part after the last slash: `babyai-1.3.1/GoToObj/train` for
    `babyai-1.3.1/GoToObj/train/17`, so that environments, games and levels are types of their own. `id_parts` takes as
    many parts of the id instead. A type with one token, or whose tokens all have the same number, is left as it is.

    Source: AgentRL, arXiv 2510.04206 (task advantage normalization); no code was found.
    """

    id_parts: Annotated[int, Field(ge=1)] | None = None
    """Number of leading parts of a task's id (between slashes) that name its type; null is all but the last."""
    subtract_mean: bool = True
    """Also subtract the mean; groups without signal then have non-zero advantages."""
    ddof: Literal[0, 1] = 0
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def type_of(self, task_id: str) -> str:
        """Type of a task; an id without slashes is its own type unless `id_parts` is given."""
        parts = task_id.split("/")
        return "/".join(parts[: self.id_parts or max(len(parts) - 1, 1)])

    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return `credits`, normalised within each type of task."""
        changed = list(credits)
        members: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            if group.trajectories:
                members.setdefault(self.type_of(group.task_id), []).append(number)
        for numbers in members.values():
            members_of, of_type = [groups[i] for i in numbers], [credits[i] for i in numbers]
            whitened = whiten(members_of, of_type, subtract_mean=self.subtract_mean, ddof=self.ddof, eps=self.eps)
            for i, credit in zip(numbers, whitened or of_type, strict=True):
                changed[i] = credit
        return with_counters(changed, {"credit/n_task_types": float(len(members))})
