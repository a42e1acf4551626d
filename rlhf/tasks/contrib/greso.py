"""GRESO: skip prompts whose groups will likely have zero variance, before rollout."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem
from rlhf.data import ScoredGroup, Task
from rlhf.errors import DataError
from rlhf.settings import STRICT
from rlhf.tasks.group_metric import incomparable, measured
from rlhf.tasks.shuffled import walk

Chance = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GRESO:
    """Shuffled tasks that skip, by chance, those recently too easy or too hard (GRESO).

    A visit is easy if the mean of the metric over the attempts is at least `easy_from`, hard if it is at most
    `hard_up_to`. z is the number of the last visits of a task, without a break, that were all easy or all hard. It is
    skipped with probability 1 − max(p^z, min_keep), where p is that of its class: for p = .5 and z = 0, 1, 2, 3, 7 that
    is 0, .5, .75, .875, .99. A task not seen yet has z = 0 and is not skipped; being skipped leaves z as it is; any
    other visit sets it to 0. After a step the p of a class falls by `p_step` if the class made up its target share of
    the tasks attempted or more, and rises by it if not; not during the first pass over the tasks, in which nothing can
    be skipped and p has no effect on the shares.

    Use it with `selection: {kind: dynamic}`, which draws what is missing after the attempts were made.

    Source: Zheng et al., GRESO, arXiv 2506.02177, and its code.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys("p_step", 0, ("p_min", "p_max", "easy_target", "hard_target")),
    )

    metric: str = "success"
    """Metric of the mean: `success`, `score`, or `reward/<name>`, one unweighted reward."""
    easy_from: float = 0.98
    """Mean from which on a visit was too easy."""
    hard_up_to: float = 0.11
    """Mean up to which a visit was too hard."""
    p_start: Chance = 0.5
    """Initial p of both classes, until every task has been visited once."""
    p_step: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Change of p per step; 0 keeps it fixed."""
    p_min: Chance = 0.05
    """Smallest p."""
    p_max: Chance = 0.95
    """Largest p."""
    easy_target: Annotated[float, Field(ge=0, le=1)] = 0.25 / 3
    """Target share of easy tasks in a step."""
    hard_target: Annotated[float, Field(ge=0, le=1)] = 0.5 / 3
    """Target share of hard tasks in a step."""
    min_keep: Chance = 0.01
    """Minimum probability of a task to be drawn when visited."""

    def __post_init__(self) -> None:
        if not self.p_min <= self.p_start <= self.p_max:
            raise ValueError(f"p_start: {self.p_start} is not between p_min: {self.p_min} and p_max: {self.p_max}")
        if not self.hard_up_to < self.easy_from:
            raise ValueError(f"hard_up_to: {self.hard_up_to} is not below easy_from: {self.easy_from}")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a metric that the rewards do not have, and groups of one."""
        yield from incomparable("sampler", self, context)

    def start(self, tasks: Sequence[Task], seed: int) -> GresoTasks:
        """Return a source that has seen no task."""
        return GresoTasks(self, tasks, seed, p_easy=self.p_start, p_hard=self.p_start)

    def keep_probability(self, p: float, z: int) -> float:
        """Return max(p^z, min_keep): how likely a task is drawn when it comes; 1 for z = 0."""
        return max(p**z, self.min_keep)

    def next_p(self, p: float, share: float, target: float) -> float:
        """Next p of a class after a step in which it was `share` of the tasks."""
        return max(p - self.p_step, self.p_min) if share >= target else min(p + self.p_step, self.p_max)


@plain_dataclass
class GresoTasks:
    """Tasks in order, some skipped, as a pure function of the seed and of what is remembered.

    Attributes:
        settings: the recipe keys.
        tasks: all tasks of a split, in the environment's order.
        seed: gives the order, and the draws that skip.
        p_easy, p_hard: of the next step.
        n_passed: places of the order that are behind, skipped ones included.
        streaks: by task id, how many of the last visits were all easy, or minus how many were all hard; ids without
            either are left out.
    """

    settings: GRESO
    tasks: Sequence[Task]
    seed: int
    p_easy: float
    p_hard: float
    n_passed: int = 0
    streaks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError("there are no tasks to draw from", where="GresoTasks", expected="at least one task")

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return the next `n` tasks that are not skipped."""
        return [task for _, task in islice(self._drawn(), already, already + n)]

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Advance past the tasks that were drawn, and remember how they went."""
        passed = self.n_passed
        for place, _ in islice(self._drawn(), len(groups)):
            passed = place
        n_skipped, self.n_passed = passed - self.n_passed - len(groups), passed
        visits = [visit for group in groups if (visit := self._visit(group)) is not None]
        for task_id, kind in visits:
            self._remember(task_id, kind)
        easy, hard = (sum(kind == wanted for _, kind in visits) / max(len(visits), 1) for wanted in (1, -1))
        if visits and self.n_passed > len(self.tasks):
            self.p_easy = self.settings.next_p(self.p_easy, easy, self.settings.easy_target)
            self.p_hard = self.settings.next_p(self.p_hard, hard, self.settings.hard_target)
        return {
            "sampling/n_skipped_tasks": float(n_skipped),
            "sampling/easy_share": easy,
            "sampling/hard_share": hard,
            "sampling/p_easy": self.p_easy,
            "sampling/p_hard": self.p_hard,
        }

    def state_dict(self) -> dict[str, Any]:
        """Place, probabilities and histories."""
        return {
            "n_passed": self.n_passed,
            "p_easy": self.p_easy,
            "p_hard": self.p_hard,
            "streaks": dict(self.streaks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.n_passed = int(state["n_passed"])
        self.p_easy, self.p_hard = float(state["p_easy"]), float(state["p_hard"])
        self.streaks = {str(name): int(n) for name, n in state["streaks"].items()}

    def _drawn(self) -> Iterator[tuple[int, Task]]:
        """Yield the tasks that are not skipped, each with the number of places that are then behind."""
        order, place = walk(len(self.tasks), self.seed, self.n_passed), self.n_passed
        while True:
            task, place = self.tasks[next(order)], place + 1
            z = self.streaks.get(task.id, 0)
            keep = self.settings.keep_probability(self.p_easy if z > 0 else self.p_hard, abs(z))
            if random.Random(f"{self.seed}/skip/{place}").random() < keep:
                yield place, task

    def _visit(self, group: ScoredGroup) -> tuple[str, int] | None:
        """Task with 1 if it was easy, -1 if hard, else 0; None if no attempt tells."""
        values = measured(group, self.settings.metric)
        if not values:
            return None
        mean = math.fsum(values) / len(values)
        return group.task_id, int(mean >= self.settings.easy_from) - int(mean <= self.settings.hard_up_to)

    def _remember(self, task_id: str, kind: int) -> None:
        z = self.streaks.pop(task_id, 0)
        if kind:
            self.streaks[task_id] = z + kind if z * kind > 0 else kind
