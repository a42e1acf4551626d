"""Verdicts to be learnt: which of two replies is better, and whether a reply keeps to a principle.

A policy trained here is a generative reward model for `rewards: {kind: judge}` or `{kind: principles}`: it is asked in
the same words, and answers in the same form. Lines of the file are pairs, or labels of a principle:

    {"prompt": "Say red.", "chosen": "red", "rejected": "blue"}
    {"prompt": "Say red.", "response": "red", "principle": "the reply is one word", "label": true}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.core.procedural import split_of
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset import digest_of
from environments.tasks.dataset_files import read
from rewards.judges.asking import Unreadable, marked
from rewards.judges.judge import compared, of_principle
from rlhf.data import Message, Role, Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_SPLITS = ("train", "dev", "test")
_PAIR, _LABEL = ("prompt", "chosen", "rejected"), ("prompt", "response", "principle", "label")
#: Labels, also as CSV writes them.
_HOLDS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Verdicts:
    """Tell the better of two replies, or whether a principle holds; 1 if right, in one reply.

    Each pair is two tasks, with the better one shown first and second, so that a place earns nothing. All lines of one
    prompt are of one split: half of the prompts `train`, a quarter `dev`, a quarter `test`.

    Sources: Think-RM, arXiv 2505.16265, and Reward Reasoning Models, arXiv 2505.14674, for pairs; RLBFF, arXiv
    2509.21319, and Sparrow, arXiv 2209.14375, for labels of principles and rules.
    """

    #: Properties of the environment.
    properties: ClassVar[Properties] = Properties(
        deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True, splits=_SPLITS
    )

    path: Path
    """JSON lines, JSON, CSV or Parquet, or a folder of `datasets`: rows of `prompt`, `chosen` and `rejected`, or of
    `prompt`, `response`, `principle` and `label`."""
    question: str = "Which attempt does better what the agent was asked to do?"
    """Question about a pair: the same as the judge's `question`."""

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split. Raises EnvError: no such split, or a file or line that cannot be used."""
        refuse_unknown(split, _SPLITS, "Verdicts.tasks")
        return _tasks(self, digest_of(self.path) if self.path.exists() else "")[split]

    def start(self, task: Task) -> VerdictEpisode:
        """Begin one attempt."""
        return VerdictEpisode(task)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """The verdict alone; None where something was said."""
        if taken:
            return None
        mark = task.info["mark"]
        return (f"VERDICT {mark}: {task.reference}" if mark else str(task.reference),)

    def fingerprint(self) -> str:
        """SHA-256 of the file, for the record of a run."""
        return f"{self.path.name} sha256:{digest_of(self.path)[:16]}"


class VerdictEpisode:
    """One verdict. A tie is wrong, as is what holds no verdict, which is not understood."""

    def __init__(self, task: Task) -> None:
        self._task, self._is_over = task, False
        self.opening = StepResult(str(task.info["text"]), state_key=task.id)

    async def step(self, action: str) -> StepResult:
        """Read the verdict."""
        if self._is_over:
            raise after_end(self._task.id, action)
        self._is_over = True
        found = self._read(action)
        right = found == self._task.reference
        said = "No verdict." if found is None else "Right." if right else "Wrong."
        state = f"{self._task.id}/over"
        return StepResult(said, float(right), True, state_key=state, success=right, valid=found is not None)

    def _read(self, text: str) -> str | None:
        if not self._task.info["mark"]:
            word = text.strip(" \t\n\"'*.").casefold()
            return word.capitalize() if word in ("yes", "no") else None
        try:
            return marked(text, self._task.info["mark"], "A|B|TIE")
        except Unreadable:
            return None

    async def close(self) -> None:
        """Nothing is held open."""


@lru_cache(maxsize=8)
def _tasks(settings: Verdicts, state: str) -> Mapping[str, tuple[Task, ...]]:
    found: dict[str, list[Task]] = {split: [] for split in _SPLITS}
    for number, row in read(settings.path, "environment.path"):
        split = split_of(f"verdicts/{row.get('prompt')}")
        found[split] += _of_row(settings, row, f"verdicts/{split}/{number}", number)
    return {split: tuple(tasks) for split, tasks in found.items()}


def _of_row(settings: Verdicts, row: Mapping[str, Any], name: str, number: int) -> Iterator[Task]:
    if all(isinstance(row.get(key), str) for key in _PAIR):
        records = {key: f"user: {row['prompt']}\nAction 1: {row[key]}" for key in ("chosen", "rejected")}
        for order, right in ((("chosen", "rejected"), "A"), (("rejected", "chosen"), "B")):
            question = compared(settings.question, *(records[key] for key in order))
            yield _asked(f"{name}/{right}", question, right, question.mark)
        return
    label = _HOLDS.get(str(row.get("label")).strip().casefold())
    if all(key in row for key in _LABEL) and label is not None:
        record = f"user: {row['prompt']}\nAction 1: {row['response']}"
        yield _asked(name, of_principle(str(row["principle"]), record), "Yes" if label else "No", "")
        return
    raise EnvError(
        "this line is neither a pair nor a label",
        where=f"environment.path, line {number}",
        got=", ".join(map(str, row)),
        expected=f"texts {', '.join(_PAIR)}; or {', '.join(_LABEL)}, the last true, false, 1 or 0",
    )


def _asked(name: str, question: Any, right: str, mark: str) -> Task:
    system = Message(Role.SYSTEM, question.system)
    return Task(id=name, messages=(system,), reference=right, info={"text": question.text, "mark": mark})
