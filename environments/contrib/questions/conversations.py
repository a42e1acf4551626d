"""Questions after long conversations read in pieces: files of LoCoMo or MemoryAgentBench.

    Caroline: I went to the support group yesterday. ...
    > next
    ...
    Question: When did Caroline go to the support group?

Neither data set is in a registry; their files are read as they are published: LoCoMo, arXiv 2402.17753 (JSON, CC BY-NC
4.0), and MemoryAgentBench, arXiv 2507.05257 (rows with `context`, `questions` and `answers`, MIT).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.core.procedural import Attempt, digest, split_of
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset import digest_of
from environments.tasks.dataset_files import read
from rewards.answers.qa import exact, f1
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_SPLITS = ("train", "dev", "test")
_SESSION = re.compile(r"session_(\d+)")
_ANSWER = re.compile(r"^answer\b[\s:\[(]*", re.IGNORECASE)


@plain_dataclass(frozen=True)
class Conversation:
    """Pieces of a conversation in order, and questions about it, each with the answers that are right."""

    name: str
    pieces: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Conversations:
    """Read a long conversation, piece by piece, and answer a question about it; a file of one's own."""

    #: Properties of the environment.
    properties: ClassVar[Properties] = Properties(
        deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True, splits=_SPLITS
    )

    path: Path
    """JSON of LoCoMo; or JSON lines, JSON or Parquet with `context`, `questions` and `answers`."""
    piece_words: Annotated[int, Field(ge=20)] = 200
    """Words of a piece at most; a turn of the conversation is not cut in two unless it is longer."""

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split, one a question; all of a conversation are of one split, told by its name.

        Raises:
            EnvError: no such split, or a file in neither form.
        """
        refuse_unknown(split, _SPLITS, "Conversations.tasks")
        return [
            Task(id=f"conversations/{split}/{c.name}/{i}", reference=json.dumps(answers), info={"at": [k, i]})
            for k, c in enumerate(self._all())
            if split_of(f"conversations/{c.name}") == split
            for i, (_, answers) in enumerate(c.questions)
        ]

    def start(self, task: Task) -> ConversationEpisode:
        """Begin one attempt."""
        conversation, number = self._all()[task.info["at"][0]], task.info["at"][1]
        return ConversationEpisode(conversation, number, str(task.reference))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Read on to the end, and answer; None where too few steps are left."""
        episode = self.start(task)
        episode.after(taken)
        if episode.over:
            return () if episode.solved else None
        path = (*("next",) * episode.n_left, f"answer: {json.loads(str(task.reference))[0]}")
        return path if len(path) <= episode.steps_left else None

    def fingerprint(self) -> str:
        """SHA-256 of the file, for the record of a run."""
        return f"{self.path.name} sha256:{digest_of(self.path)[:16]}"

    def _all(self) -> tuple[Conversation, ...]:
        return _read(self.path, self.piece_words, digest_of(self.path) if self.path.exists() else "")


class ConversationEpisode(Attempt):
    """One question: pieces come one a turn, the question after the last."""

    def __init__(self, conversation: Conversation, number: int, reference: str) -> None:
        super().__init__(len(conversation.pieces) + 1)
        self._pieces, self._reference, self._at = conversation.pieces, reference, 0
        self._question, _ = conversation.questions[number]
        self._name = digest(f"{conversation.name}/{number}")
        self.opening = self.opened(self._shown())

    @property
    def n_left(self) -> int:
        """Pieces that were not read yet."""
        return len(self._pieces) - 1 - self._at

    def _shown(self) -> str:
        piece = self._pieces[self._at]
        return f"{piece}\nSay 'next' to read on." if self.n_left else f"{piece}\nQuestion: {self._question}"

    def do(self, action: str) -> tuple[str, bool]:
        """Read on, or answer; an answer before the question is not understood."""
        if self.n_left:
            if action.strip().casefold().strip("'\".") != "next":
                return "Say 'next' to read on; the question comes at the end.", False
            self._at += 1
            return self._shown(), True
        said = _ANSWER.sub("", action.strip()).rstrip("])")
        self.done, self.solved = True, exact(said, self._reference)
        self.score = 1.0 if self.solved else f1(said, self._reference)
        return "Right." if self.solved else "Wrong.", True

    def state(self) -> str:
        """Return the question, and how far it is read."""
        return f"{self._name}/{self._at}{'/answered' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Return that one may read on."""
        return ("next",) if self.n_left else ()


@lru_cache(maxsize=4)
def _read(path: Path, words: int, state: str) -> tuple[Conversation, ...]:
    if not state:
        raise EnvError("there is no such file", where="environment.path", got=str(path), expected="a file")
    try:
        rows = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else [r for _, r in read(path, "path")]
    except ValueError as error:
        raise EnvError(
            "this file is no JSON", where="environment.path", got=f"{path}: {error}", expected="JSON"
        ) from error
    found = [_of_row(row, number, words) for number, row in enumerate(rows if isinstance(rows, list) else [rows])]
    return tuple(c for c in found if c.questions)


def _of_row(row: Mapping[str, Any], number: int, words: int) -> Conversation:
    try:
        if "conversation" in row:
            found = Conversation(str(row.get("sample_id", number)), cut(_said(row["conversation"]), words),
                                 tuple(_asked(row["qa"])))  # fmt: skip
        else:
            answers = [(a,) if isinstance(a, str) else tuple(map(str, a)) for a in row["answers"]]
            lines = [line for line in str(row["context"]).splitlines() if line.strip()]
            found = Conversation(str(number), cut(lines, words), tuple(zip(row["questions"], answers, strict=True)))
        if not found.pieces or not all(answers for _, answers in found.questions):
            raise ValueError("the conversation is empty, or a question has no answer")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(
            "this conversation has neither the format of LoCoMo nor that of MemoryAgentBench",
            where=f"environment.path, number {number}",
            got=f"{type(error).__name__}: {error}",
            expected="conversation and qa; or context, questions and answers",
        ) from error


def _said(conversation: Mapping[str, Any]) -> Iterator[str]:
    """The turns of LoCoMo's sessions, each session under its date."""
    sessions = sorted((int(m[1]), key) for key in conversation if (m := _SESSION.fullmatch(key)))
    for _, key in sessions:
        yield f"[{conversation.get(f'{key}_date_time', key)}]"
        yield from (f"{turn['speaker']}: {turn['text']}" for turn in conversation[key])


def _asked(questions: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Questions with an answer; LoCoMo's fifth category has none."""
    return ((str(q["question"]), (str(q["answer"]),)) for q in questions if "answer" in q)


def cut(lines: Iterator[str] | Sequence[str], words: int) -> tuple[str, ...]:
    """Join lines into pieces of at most this many words; a longer line is cut."""
    pieces: list[list[str]] = [[]]
    n = 0
    for line in lines:
        said = line.split()
        for part in (" ".join(said[i : i + words]) for i in range(0, len(said), words)):
            n += len(part.split())
            if n > words and pieces[-1]:
                pieces.append([])
                n = len(part.split())
            pieces[-1].append(part)
    return tuple("\n".join(piece) for piece in pieces if piece)
