"""Dynamic sampling (DAPO): draw tasks until enough groups have different rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.credit.groups import is_constant
from rlhf.data import ScoredGroup
from rlhf.errors import TrainingError
from rlhf.settings import STRICT
from rlhf.tasks.group_metric import incomparable, measured
from rlhf.tasks.selection import Selection


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dynamic:
    """Dynamic sampling: draw tasks until `tasks_per_step` groups have attempts that differ.

    A group whose attempts are all equal has no advantage, so without this a step trains on fewer groups the better, or
    the worse, the policy is. A group is kept if the population deviation of the metric is above 0: of the successes
    1111, 0100, 0000 and 1011 the deviations are 0, .433, 0 and .433, and the second and the fourth are kept. A further
    round draws as many tasks as are missing over the share that was kept so far, and never more than `tasks_per_step`.
    What is kept beyond `tasks_per_step` is left out, the last drawn first. Groups that failures of parts left with one
    attempt are not kept: they have no advantage here (the authors' code keeps them, where it is their score).

    Kept groups come from tasks of middling difficulty. Rounds cost episodes, which is much with agents: `sampler:
    {kind: greso}` leaves out beforehand what is likely to be dropped here.

    Source: Yu et al., DAPO, arXiv 2503.14476, which draws a whole round each time and at most 10.
    """

    metric: str = "success"
    """Metric in which attempts must differ: `success`; `score`; or `reward/<name>`, one unweighted reward. Do not use
    the score if it has penalties: attempts that differ only in these would count as informative."""
    max_rounds: Annotated[int, Field(ge=1)] = 4
    """Maximum sampling rounds per step; 1 only filters."""
    on_exhaustion: Literal["train", "stop"] = "train"
    """With too few groups after the last round: `train` on them, or `stop` the run."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a metric that the rewards do not have, and groups of one."""
        yield from incomparable("selection", self, context)

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about groups that are kept for their penalties."""
        names = context.recipe.penalties
        if names and self.metric == "score":
            yield (
                f"{context.path} keeps groups that differ only in penalties ({', '.join(names)}): set metric "
                "to success, or to reward/NAME"
            )

    def __call__(self, groups: Sequence[ScoredGroup], n_tasks: int, n_rounds: int) -> Selection:
        """Keep the first `n_tasks` groups that differ, or ask for more. Raises TrainingError if told to stop."""
        kept = tuple(i for i, group in enumerate(groups) if not is_constant(measured(group, self.metric)))
        n_missing = n_tasks - len(kept)
        if n_missing <= 0:
            return Selection(kept[:n_tasks])
        if n_rounds < self.max_rounds:
            return Selection(kept, n_more=min(n_tasks, -(-n_missing * len(groups) // max(len(kept), 1))))
        if self.on_exhaustion == "stop":
            raise TrainingError(
                f"{n_rounds} rounds gave too few groups with differing {self.metric}",
                where="selection",
                got=f"{len(kept)} of {len(groups)} groups",
                expected=f"{n_tasks}, as tasks_per_step says",
                hint="choose easier or harder tasks, more attempts (group_size), or on_exhaustion: train",
            )
        return Selection(kept)
