"""Problems that the policy makes for itself: it writes one, reads it, and answers it.

Here are problems. Write another one of their kind, that can be answered.
1. What is 3 + 4?
2. What is 12 - 5?
> What is 9 - 2?
Your problem: What is 9 - 2?
> 7
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.core.procedural import digest, split_of
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset import digest_of
from environments.tasks.dataset_files import read
from environments.tasks.dataset_rows import PROMPTS
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_SPLITS = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SelfMade:
    """Write a problem like those of a file, then answer it: both are trained, and no answer is known.

    A task is some problems of the file, drawn by its number; half of the problems are of `train`, a quarter each of
    `dev` and `test`. What the policy writes is shown to it as a problem, and its next reply ends the episode. A problem
    that is one of those shown, is empty or too long is not understood, and ends the episode at once.

    Success is a problem of its own and any answer to it; whether that is right a reward has to say. `grade` with an
    earlier policy as the judge, renewed by `judge_refresh`, closes the loop of making, solving and judging; `majority`
    takes the vote of the group, whose problems are unlike ones, so it does not go with this.

    Source: Self Rewarding Self Improving, arXiv 2505.08827.
    """

    #: Properties of the environment.
    properties: ClassVar[Properties] = Properties(
        deterministic=True, replayable=True, thread_safe=True, inline=True, splits=_SPLITS
    )

    path: Path
    """Problems: JSON lines, JSON, CSV or Parquet, or a folder of `datasets`, with a column as `dataset` names it."""
    column: str | None = None
    """Column of the problem; null takes the first of prompt, question, problem and the like that there is."""
    shown: Annotated[int, Field(ge=1, le=16)] = 3
    """Problems that are shown."""
    max_chars: Annotated[int, Field(ge=1)] = 400
    """Longest problem."""
    n_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Tasks of each split."""
    ask: str = "Here are problems. Write another one of their kind, that can be answered."
    """First instruction."""

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split. Raises EnvError: no such split, or a file that has too few problems."""
        refuse_unknown(split, _SPLITS, "SelfMade.tasks")
        known = _problems(self.path, self.column, digest_of(self.path) if self.path.exists() else "")
        own = [problem for problem in known if split_of(f"self_made/{problem}") == split]
        if len(own) < self.shown:
            raise EnvError(
                "there are too few problems for the prompt's examples",
                where=f"environment.path, split {split}",
                got=f"{len(own)} of {len(known)} different ones",
                expected=f"at least {self.shown}",
                hint="give a longer file, or a lower `shown`",
            )
        return [self._task(split, own, number) for number in range(self.n_tasks)]

    def _task(self, split: str, own: Sequence[str], number: int) -> Task:
        drawn = random.Random(f"self_made/{split}/{number}").sample(own, self.shown)
        return Task(id=f"self_made/{split}/{number}", seed=number, info={"problems": drawn})

    def start(self, task: Task) -> SelfMadeEpisode:
        """Begin one attempt."""
        return SelfMadeEpisode(task, self)

    def fingerprint(self) -> str:
        """SHA-256 of the file, for the record of a run."""
        return f"{self.path.name} sha256:{digest_of(self.path)[:16]}"


@plain_dataclass
class SelfMadeEpisode:
    """A problem, and an answer to it."""

    task: Task
    settings: SelfMade
    problem: str = ""
    is_over: bool = False

    @property
    def opening(self) -> StepResult:
        """The problems that are shown."""
        listed = [f"{i}. {problem}" for i, problem in enumerate(self.task.info["problems"], start=1)]
        return StepResult("\n".join([self.settings.ask, *listed]), state_key=self.task.id)

    async def step(self, action: str) -> StepResult:
        """Take a problem, then an answer."""
        if self.is_over:
            raise after_end(self.task.id, action)
        said = " ".join(action.split())
        if self.problem:
            return self._end("Noted.", is_whole=bool(said))
        is_known = said.casefold() in (" ".join(p.split()).casefold() for p in self.task.info["problems"])
        if not said or is_known or len(said) > self.settings.max_chars:
            why = "That is one of the problems above." if is_known else "That is no problem of the length allowed."
            return self._end(why, is_whole=False)
        self.problem = said
        return StepResult(f"Your problem: {said}", state_key=f"{self.task.id}/{digest(said)}")

    def _end(self, said: str, *, is_whole: bool) -> StepResult:
        self.is_over = True
        return StepResult(said, 0.0, True, success=is_whole, state_key=f"{self.task.id}/over", valid=is_whole)

    async def close(self) -> None:
        """Nothing is held open."""


@lru_cache(maxsize=8)
def _problems(path: Path, column: str | None, state: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for number, row in read(path, "environment.path"):
        named: Any = column or next((name for name in PROMPTS if name in row), None)
        if not isinstance(row.get(named), str):
            raise EnvError(
                "this line has no text in the column of the problem",
                where=f"environment.path, line {number}",
                got=", ".join(map(str, row)),
                expected=column or f"one of {', '.join(PROMPTS)}",
            )
        found[row[named].strip()] = None
    return tuple(found)
