"""The next sentence of a text, after those before it: reinforcement learning on raw text.

The text is cut into sentences; a task shows `context` of them and asks for the next. What counts as right is a reward's
to say (`rouge`, `grade`, `similarity`): the reference is the sentence. After RLPT, arXiv 2509.19249, whose reward is a
model that compares meanings, and whose second form also shows the sentence after the gap (`after`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset import DatasetEpisode, digest_of
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_SPLITS = ("train", "dev", "test")
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NextSegment:
    """Say the next sentence of a file of text, given those before it."""

    path: Path
    """A text file, UTF-8. The last eighth of it is `test`, the eighth before `dev`, the rest `train`."""
    context: Annotated[int, Field(ge=1)] = 3
    """Sentences that are shown before the one to say."""
    after: Annotated[int, Field(ge=0)] = 0
    """Sentences that are shown behind it."""
    min_words: Annotated[int, Field(ge=1)] = 3
    """Sentences of fewer words are shown and not asked for."""
    ask: str = "Write the sentence that stands in the place of [...]."
    """Instruction."""

    @property
    def properties(self) -> Properties:
        """Properties of the environment; a text may repeat itself."""
        return Properties(
            deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True, splits=_SPLITS,
            judged_by_rewards=True, repeats=True,
        )  # fmt: skip

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split, in the order of the text; none shows a sentence of another split.

        Raises:
            EnvError: no such split, no file, or too short a text.
        """
        refuse_unknown(split, _SPLITS, "NextSegment.tasks")
        sentences = sentences_of(self.path)
        n = len(sentences)
        begin, end = {"train": (0, n - n // 4), "dev": (n - n // 4, n - n // 8), "test": (n - n // 8, n)}[split]
        found = [
            self._task(split, sentences, i)
            for i in range(begin + self.context, end - self.after)
            if len(sentences[i].split()) >= self.min_words
        ]
        if not found:
            raise EnvError(
                f"this text has no sentence to ask for in the split '{split}'",
                where="environment.path",
                got=f"{self.path}, {n} sentences, {end - begin} of the split",
                expected=f"more than {self.context + self.after}",
                hint="give a longer text, or a smaller context",
            )
        return found

    def _task(self, split: str, sentences: Sequence[str], i: int) -> Task:
        shown = " ".join([*sentences[i - self.context : i], "[...]", *sentences[i + 1 : i + 1 + self.after]])
        info = {"prompt": f"{shown}\n{self.ask}"}
        return Task(id=f"next_segment/{split}/{i}", seed=i, reference=sentences[i], info=info)

    def start(self, task: Task) -> DatasetEpisode:
        """Begin one attempt: one reply."""
        return DatasetEpisode(task, task.reference)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """The sentence; None where something was said."""
        return None if taken or task.reference is None else (task.reference,)

    def fingerprint(self) -> str:
        """SHA-256 of the file, for the record of a run."""
        return f"{self.path.name} sha256:{digest_of(self.path)[:16]}"


def sentences_of(path: Path) -> tuple[str, ...]:
    """The sentences of a text, each on one line. Raises EnvError where the file cannot be read as UTF-8."""
    try:
        return _cut(path, path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(
            "this text cannot be read",
            where="environment.path",
            got=f"{path}: {type(error).__name__}",
            expected="a text file in UTF-8",
        ) from error


@lru_cache(maxsize=8)
def _cut(path: Path, changed: int) -> tuple[str, ...]:
    pieces = (" ".join(piece.split()) for piece in _END.split(path.read_text("utf-8")))
    return tuple(piece for piece in pieces if piece)
