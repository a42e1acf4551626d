"""Start states along demonstrations: near the goal first, or all of them mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import ScoredGroup, Task, Trajectory
from rlhf.errors import RecipeError
from rlhf.settings import STRICT
from rlhf.tasks.contrib.start_states.base import is_due, start_metrics
from rlhf.tasks.shuffled import walk

_COUNTS = ("n_steps", "n_drawn", "n_beginnings", "n_starts")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReverseCurriculum:
    """Reverse curriculum: episodes begin inside a demonstration, with the goal within reach.

    A solved demonstration of n turns is cut into M segments: its start states are those after ⌊n·j/M⌋ turns, for j from
    M − 1, one segment before the goal, down to 0, the task itself. Four turns in four segments give starts with 3, 2, 1
    and 0 turns. `mixed` draws from all of them: each start once, in a shuffled order, before any comes again. `staged`
    draws starts of one segment count at a time, nearest to the goal first, for `stage_steps` steps each.

    Groups are of one start state each: it is a task of its own, named `<id>@<turns given>`. Evaluations always begin at
    the beginning.

    Degenerate cases: starts of one demonstration that coincide count once; tasks without a solved demonstration are
    drawn from the beginning only.

    Source: R³, arXiv 2402.05808 (mixed is R³, staged its vanilla variant).
    """

    replays: ClassVar[bool] = True

    schedule: Literal["mixed", "staged"] = "mixed"
    """All start states mixed, or staged from the goal back to the beginning."""
    segments: Annotated[int, Field(ge=2)] = 4
    """M, the segments of a demonstration."""
    beginning_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of drawn tasks that start at the initial state, of all tasks of the split. By default 1 / segments if
    mixed, as for any other start; and 0 if staged, whose last stage is nothing else."""
    stage_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of each stage of `staged`, except the last, which stays; by default 10."""
    n_demonstrations: Annotated[int, Field(ge=1)] = 256
    """Tasks, the first of the split, that the environment's oracle plays before the run begins; kept in its folder."""

    def __post_init__(self) -> None:
        if self.schedule == "mixed" and self.stage_steps is not None:
            raise ValueError(f"stage_steps: {self.stage_steps} has no effect, because the schedule is mixed")

    def shown(self, demonstrations: Sequence[Trajectory]) -> Shown:
        """Return the sampler that knows `demonstrations`, each from the beginning of its task."""
        return Shown(self, demonstrations)

    def start(self, tasks: Sequence[Task], seed: int, demonstrations: Sequence[Trajectory] = ()) -> ReverseTasks:
        """Return a source that stands at the first stage.

        Args:
            tasks: all of the stage's split.
            seed: of the run.
            demonstrations: of tasks among these, each from the beginning; unsolved ones are left out.

        Raises:
            RecipeError: no demonstration is solved in two turns or more.
        """
        by_id = {task.id: task for task in tasks}
        solved = [d for d in demonstrations if d.solved and d.task_id in by_id]
        stages = [
            [by_id[d.task_id].started_after(d.turns[: len(d.turns) * j // self.segments]) for d in solved]
            for j in range(self.segments - 1, 0, -1)
        ]
        later = {task.id: task for stage in stages for task in stage if task.prefix}
        if not later:
            raise RecipeError(
                "no demonstration is long enough for a later start state",
                where="sampler",
                got=f"{len(demonstrations)} demonstrations, {len(solved)} of them solved, none in two turns or more",
                expected="an oracle that solves tasks of this split within limits.max_turns",
                hint="raise limits.max_turns, or use sampler: {kind: shuffled}",
            )
        pools = [list(later.values())] if self.schedule == "mixed" else [*stages, list(tasks)]
        return ReverseTasks(self, tasks, pools, seed)


@plain_dataclass(frozen=True)
class Shown:
    """A reverse curriculum along known demonstrations."""

    settings: ReverseCurriculum
    demonstrations: Sequence[Trajectory]

    def start(self, tasks: Sequence[Task], seed: int) -> ReverseTasks:
        """Return a source that stands at the first stage."""
        return self.settings.start(tasks, seed, self.demonstrations)


@plain_dataclass
class ReverseTasks:
    """Tasks and start states, as a pure function of the seed and of what is remembered.

    Attributes:
        settings: the recipe keys.
        tasks: all tasks of the split, from the beginning.
        pools: the starts of each stage; of `mixed`, one of all starts that are not beginnings.
        seed: gives the orders.
        n_steps: finished steps.
        n_drawn: tasks drawn, of all stages.
        n_beginnings: tasks drawn from the beginning, by the share of these.
        n_starts: tasks drawn from the present pool.
    """

    settings: ReverseCurriculum
    tasks: Sequence[Task]
    pools: Sequence[Sequence[Task]]
    seed: int
    n_steps: int = 0
    n_drawn: int = 0
    n_beginnings: int = 0
    n_starts: int = 0

    @property
    def stage(self) -> int:
        """Index of the present pool."""
        return min(self.n_steps // (self.settings.stage_steps or 10), len(self.pools) - 1)

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return the next `n` tasks."""
        return [task for _, task in islice(self._drawn(), already, already + n)]

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Advance past the tasks that were drawn, and to the next stage where that is due."""
        drawn = list(islice(self._drawn(), len(groups)))
        logged = dict(start_metrics([task for _, task in drawn], groups))
        if len(self.pools) > 1:
            logged["sampling/stage"] = float(self.stage)
        n_beginnings, stage = sum(is_beginning for is_beginning, _ in drawn), self.stage
        self.n_steps += 1
        self.n_drawn += len(drawn)
        self.n_beginnings += n_beginnings
        self.n_starts = self.n_starts + len(drawn) - n_beginnings if self.stage == stage else 0
        return logged

    def state_dict(self) -> dict[str, Any]:
        """Progress of the curriculum."""
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in _COUNTS:
            setattr(self, name, int(state[name]))

    def _drawn(self) -> Iterator[tuple[bool, Task]]:
        """Yield the tasks to come, each with whether it is one of the share of beginnings."""
        share, pool = self.settings.beginning_share, self.pools[self.stage]
        if share is None:
            share = 1 / self.settings.segments if self.settings.schedule == "mixed" else 0.0
        beginnings = walk(len(self.tasks), f"{self.seed}/beginnings", self.n_beginnings)
        starts = walk(len(pool), f"{self.seed}/starts/{self.stage}", self.n_starts)
        place = self.n_drawn
        while True:
            is_beginning = is_due(place, share)
            yield is_beginning, self.tasks[next(beginnings)] if is_beginning else pool[next(starts)]
            place += 1
