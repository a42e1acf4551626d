"""Single-turn environment from a file of questions and answers; a verifier of the recipe judges the replies.

    environment: {kind: dataset, path: questions.jsonl, prompt: question, reference: answer}
    rewards:
      right: {kind: numeric}

A row becomes a task: its prompt is what the agent reads, its reference what verifiers compare with. Whether an attempt
is solved is what the first reward that compares with the reference says, or the one with `solved_at`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.core.procedural import digest
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset_files import Row, read
from environments.tasks.dataset_rows import SPLITS, Columns, Question, Wanted
from rewards.answers.exact import ExactMatch
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_RATIOS: Mapping[str, float] = {"train": 0.8, "dev": 0.1, "test": 0.1}
Preset = Literal["gsm8k", "math", "aime", "multiple_choice"]
#: What each preset stands for, where the recipe says nothing else.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "gsm8k": {"prompt": "question", "reference": "answer", "answer_pattern": r"####\s*(.+)"},
    "math": {"prompt": "problem", "reference": "solution", "answer_pattern": "boxed"},
    "aime": {"prompt": "problem", "reference": "answer"},
    "multiple_choice": {"prompt": "question", "reference": "answer", "choices": "choices"},
}
_EXACT = ExactMatch()
#: Files, and what tells that one has changed.
_State = tuple[tuple[Path, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dataset:
    """Single-turn environment from a file of questions and answers."""

    path: Path | None = None
    """JSON lines, JSON, CSV, TSV or Parquet, or a folder of the package `datasets`; split by `split_ratios`."""
    train: Path | None = None
    """Files that are a split each, instead of `path`."""
    dev: Path | None = None
    """See `train`."""
    test: Path | None = None
    """See `train`."""
    preset: Preset | None = None
    """Columns of a well-known form of data; keys that are given go before it."""
    prompt: str | None = None
    """Column of the question, as text or chat messages; or a text with columns in braces: `{question} In metres?`."""
    reference: str | None = None
    """Column of the answer that verifiers compare with; null finds one, and tasks may be without."""
    answer_pattern: str | None = None
    """Regular expression whose first group is the answer within the reference; `boxed` is what the last box holds."""
    choices: str | None = None
    """Column of the answers to choose from, which are listed as A, B, C; the reference is then a letter."""
    split_column: str | None = None
    """Column that names the split of each row; `validation` is `dev`."""
    split_ratios: Mapping[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=lambda: dict(_RATIOS))
    """Share of each split, where neither files nor a column say; a hash of the prompt decides."""
    overlap: Literal["refuse", "drop"] = "refuse"
    """Prompts of `train` that another split has too: `refuse` them, or `drop` them."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Only so many rows of each file, its first."""

    agent_defaults: ClassVar[Mapping[str, Any]] = {"system": "", "format": "text", "think": "allow"}
    limits_defaults: ClassVar[Mapping[str, Any]] = {"max_turns": 1, "max_tokens": 1024}

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        files = [name for name in SPLITS if getattr(self, name) is not None]
        if (self.path is None) == (not files):
            given = ["path"] * bool(self.path) + files
            raise ValueError(f"either path, or train/dev/test, says where the data is; got {given or 'none'}")
        if self.split_column and files:
            raise ValueError("split_column belongs to path: train, dev and test are splits already")
        if unknown := self.split_ratios.keys() - set(SPLITS):
            raise ValueError(f"split_ratios are of {', '.join(SPLITS)}, not of {', '.join(sorted(unknown))}")
        if abs(sum(self.split_ratios.values()) - 1) > 1e-6:
            raise ValueError(f"split_ratios have to add up to 1, and come to {sum(self.split_ratios.values()):g}")
        return self

    def __hash__(self) -> int:
        """Settings are hashed by their text, as `split_ratios` cannot be."""
        return hash(repr(self))

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits there can be."""
        if self.path is None:
            return tuple(name for name in SPLITS if getattr(self, name) is not None)
        return SPLITS if self.split_column else tuple(name for name in SPLITS if self.split_ratios.get(name))

    @property
    def properties(self) -> Properties:
        """Promises of this environment."""
        return Properties(
            deterministic=True,
            replayable=True,
            thread_safe=True,
            inline=True,
            oracle=True,
            splits=self.splits,
            judged_by_rewards=True,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split, in the order of the rows; duplicate rows are one task.

        Raises:
            EnvError: no such split, file, column, or row that can be used; splits have prompts in common.
            MissingPackageError: a data set without the package `datasets`.
        """
        refuse_unknown(split, self.splits, "Dataset.tasks")
        found = _tasks(self, self._state())[split]
        if not found:
            raise EnvError(
                "this split has no rows",
                where=f"environment, split {split!r}",
                got=str(self.path or getattr(self, split)),
                expected="rows of it",
                hint=f"see the column {self.split_column}" if self.split_column else "more rows, or a larger ratio",
            )
        return found

    def start(self, task: Task) -> DatasetEpisode:
        """Begin one attempt."""
        return DatasetEpisode(task)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """The reference as the reply; None where there is none, or something was replied."""
        return None if task.reference is None or taken else (task.reference,)

    def sources(self) -> Iterator[tuple[str, str, Iterator[tuple[int, Row]]]]:
        """Split (empty where a column or ratios say), name and rows of each source."""
        for split in ("", *SPLITS):
            path: Path | None = getattr(self, split or "path")
            if path is not None:
                yield split, path.name, read(path, f"environment.{split or 'path'}")

    def fingerprint(self) -> str:
        """SHA-256 of each file that is read, for the record of a run."""
        return ", ".join(f"{path.name} sha256:{_digest(path, marks)[:16]}" for path, marks in self._state())

    @property
    def wanted(self) -> Wanted:
        """Columns that are named here or by the preset."""
        preset = PRESETS.get(self.preset or "", {})
        own = {key.name: getattr(self, key.name) for key in fields(Wanted)}
        return Wanted(**{name: preset.get(name) if value is None else value for name, value in own.items()})

    def _state(self) -> _State:
        """Time and size of each file, so that a changed one is read again."""
        given = (path for path in (self.path, self.train, self.dev, self.test) if path is not None and path.exists())
        return tuple((path, _marks(path)) for path in given)


class DatasetEpisode:
    """Reply to a question."""

    def __init__(self, task: Task) -> None:
        self._task, self._is_over = task, False
        self.opening = StepResult(str(task.info["prompt"]), state_key=task.id)

    async def step(self, action: str) -> StepResult:
        """Take the reply."""
        if self._is_over:
            raise after_end(self._task.id, action)
        self._is_over = True
        reference = self._task.reference
        solved = reference is not None and _EXACT.normal(action) == _EXACT.normal(reference)
        return StepResult(
            "", float(solved), True, state_key=f"{self._task.id}/over", success=solved, valid=bool(action)
        )

    async def close(self) -> None:
        """Nothing is held open."""


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _marks(path: Path) -> tuple[int, ...]:
    return tuple(n for stat in (file.stat() for file in _files(path)) for n in (stat.st_mtime_ns, stat.st_size))


def digest_of(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder, in hexadecimal."""
    return _digest(path, _marks(path))


@lru_cache(maxsize=32)
def _digest(path: Path, marks: tuple[int, ...]) -> str:
    """SHA-256 of a file, or of all files of a folder, in hexadecimal."""
    whole = hashlib.sha256()
    for file in _files(path):
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


@lru_cache(maxsize=8)
def _tasks(settings: Dataset, state: _State) -> Mapping[str, tuple[Task, ...]]:
    found: dict[str, dict[str, Question]] = {split: {} for split in SPLITS}
    for named, source, rows in settings.sources():
        columns: Columns | None = None
        number = 0
        for i, (number, row) in enumerate(rows):
            if settings.max_rows is not None and i >= settings.max_rows:
                break
            columns = columns or Columns.of(settings.wanted, source, row)
            one = columns.question(number, row)
            split = named or columns.split(number, row) or _drawn(settings, one.content)
            found[split].setdefault(repr((one.content, one.reference)), one)
        if not number:
            raise EnvError("this file has no rows", where=f"environment.{named or 'path'}", got=source, expected="rows")
    _keep_apart(settings, found)
    return {split: tuple(one.task for one in by_content.values()) for split, by_content in found.items()}


def _drawn(settings: Dataset, content: str) -> str:
    """Split by a hash of the content, in the given shares."""
    at, total = int(digest(f"dataset/{content}", 8), 16) / 2**64, 0.0
    for split in settings.splits:
        total += settings.split_ratios[split]
        if at < total:
            return split
    return settings.splits[-1]


def _keep_apart(settings: Dataset, found: dict[str, dict[str, Question]]) -> None:
    """Refuse prompts that are in two splits; with `overlap: drop`, take those of `train` away."""
    pairs: list[tuple[Question, Question]] = []
    held_out: dict[str, Question] = {}
    for split in ("test", "dev", "train"):
        own = found[split].values()
        shared = [one for one in own if one.content in held_out]
        if split == "train" and settings.overlap == "drop":
            found[split] = {key: one for key, one in found[split].items() if one.content not in held_out}
        else:
            pairs += [(one, held_out[one.content]) for one in shared]
        held_out |= {one.content: one for one in own}
    if pairs:
        some = "; ".join(f"{a.source}:{a.number} is {b.source}:{b.number}" for a, b in pairs[:3])
        raise EnvError(
            "splits have prompts in common: what is trained on would be measured",
            where="environment",
            got=f"{len(pairs)} of them: {some}",
            expected="each prompt in one split",
            hint="take them out of one; overlap: drop takes away those of train",
        )
