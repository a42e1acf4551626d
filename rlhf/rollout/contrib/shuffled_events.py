"""Groups some of whose attempts read the events of their task in another order."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.data import Task
from rlhf.errors import DataError
from rlhf.inference.seeds import stable_seed
from rlhf.rollout.group_structure import Independent
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShuffledEvents(Independent):
    """Attempts that read the events of a question in order, and among them some that read them shuffled.

    Attempts `every` − 1, 2 `every` − 1, ... are the shuffled ones: with 3, one for each two in order. An event is what
    `event` finds in the question of a `dataset`; the shuffled events stand where the events were, in an order that task
    and attempt decide, and never the told one. `advantage: {kind: event_order}` compares the two and trains on the
    attempts in order alone.

    Sources: TimeHC-RL, arXiv 2505.24500, for stories of social events; T-GRPO of Video-R1, arXiv 2503.21776, for frames
    (half as many shuffled attempts as others).
    """

    every: Annotated[int, Field(ge=2)] = 3
    """One in this many attempts sees the events shuffled."""
    event: str = r"[^\n]+(?=\n)"
    """Regular expression of an event; the default is every line but the last, the question."""

    def __post_init__(self) -> None:
        """Refuse what is no regular expression."""
        try:
            re.compile(self.event)
        except re.error as error:
            raise ValueError(f"event is {self.event!r}, expected a regular expression: {error}") from error

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse estimators that would train on the shuffled attempts."""
        advantage = getattr(context.stage, "advantage", None)
        kind = "none" if advantage is None else context.kind_of("advantage", advantage)
        if kind != "event_order" and (advantage is None or context.recipe.is_listed("advantage", advantage)):
            yield Problem(
                "the estimator would not tell attempts with shuffled events apart",
                where=context.at("kind"),
                got=f"shuffled_events with advantage {kind}",
                expected="an estimator that handles them",
                do="use it in a stage of kind policy_gradient with advantage: {kind: event_order}",
            )

    def n_from_start(self, group_size: int) -> int:
        """All of them. Raises ValueError where none would be shuffled."""
        if group_size < self.every:
            raise ValueError(f"at least every = {self.every}")
        return group_size

    def posed(self, task: Task, attempt: int) -> Task:
        """Return the task as attempt number `attempt` reads it. Raises DataError for a task without a question."""
        if (attempt + 1) % self.every:
            return task
        if (told := task.info.get("prompt")) is None:
            raise DataError(
                "only the events of a question can be shuffled",
                where=f"task {task.id}",
                got="a task without a prompt",
                expected="a task of environment: {kind: dataset}",
            )
        events = [found.group() for found in re.finditer(self.event, str(told))]
        shuffled, rng = list(events), random.Random(stable_seed(task.id, attempt, "events"))
        while shuffled == events and len(set(events)) > 1:
            rng.shuffle(shuffled)
        left = iter(shuffled)
        return replace(task, info={**task.info, "prompt": re.sub(self.event, lambda _: next(left), str(told))})
