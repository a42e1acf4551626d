"""Questions of a file or data set of one's own: one question, one reply, and a verifier of the recipe judges it.

    environment: {kind: dataset, path: questions.jsonl, prompt: question, reference: answer}
    rewards:
      right: {kind: numeric}

A row becomes a task: its prompt is what the agent reads, its reference what verifiers compare with. Whether an attempt
is solved is what the first reward says (`solves: 1.0`, unless another one has that key); exact match by itself.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.dataset_files import Row, of_hub, read
from environments.drawn import digest
from environments.splits import refuse_unknown
from rewards.extract import boxed
from rlhf.data import Message, Role, Task
from rlhf.errors import EnvError, nearest
from rlhf.settings import STRICT

SPLITS = ("train", "dev", "test")
_SHARES: Mapping[str, float] = {"train": 0.8, "dev": 0.1, "test": 0.1}
#: Other names of splits in columns.
_NAMED = {"validation": "dev", "valid": "dev", "val": "dev", "eval": "dev", "training": "train", "testing": "test"}
#: Columns that are taken where the recipe names none, the first that is there.
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
REFERENCES = ("reference", "answer", "final_answer", "ground_truth", "target", "label", "solution", "output")

Preset = Literal["gsm8k", "math", "aime", "multiple_choice"]
#: What each preset stands for, where the recipe says nothing else.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "gsm8k": {"prompt": "question", "reference": "answer", "pattern": r"####\s*(.+)"},
    "math": {"prompt": "problem", "reference": "solution", "pattern": "boxed"},
    "aime": {"prompt": "problem", "reference": "answer"},
    "multiple_choice": {"prompt": "question", "reference": "answer", "choices": "choices"},
}
_LETTERS = string.ascii_uppercase


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dataset:
    """A file of questions with their answers, as tasks of one turn."""

    path: Path | None = None
    """JSON lines, JSON, CSV, TSV or Parquet, or a folder of the package `datasets`; split by `shares`."""
    train: Path | None = None
    """Files that are a split each, instead of `path`."""
    dev: Path | None = None
    """See `train`."""
    test: Path | None = None
    """See `train`."""
    hub: str | None = None
    """Name of a data set on the hub, instead of `path`; its splits `train` and `test` are these."""
    subset: str | None = None
    """Of the data set on the hub."""
    preset: Preset | None = None
    """Columns of a well-known form of data; keys that are given go before it."""
    prompt: str | None = None
    """Column of the question, as text or chat messages; or a text with columns in braces: `{question} In metres?`."""
    reference: str | None = None
    """Column of the answer that verifiers compare with; null finds one, and tasks may be without."""
    pattern: str | None = None
    """Regular expression whose first group is the answer within the reference; `boxed` is what the last box holds."""
    choices: str | None = None
    """Column of the answers to choose from, which are listed as A, B, C; the reference is then a letter."""
    split: str | None = None
    """Column that names the split of each row; `validation` is `dev`."""
    shares: Mapping[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=lambda: dict(_SHARES))
    """Share of each split, where neither files nor a column say; a hash of the prompt decides."""
    overlap: Literal["refuse", "drop"] = "refuse"
    """What to do about prompts of `train` that are also in another split: an error, or without them."""
    n: Annotated[int, Field(ge=1)] | None = None
    """Only so many rows of each file."""

    agent_defaults: ClassVar[Mapping[str, Any]] = {"system": "", "format": "text", "think": "allow"}

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        files = [name for name in SPLITS if getattr(self, name) is not None]
        given = [name for name, value in (("path", self.path), ("hub", self.hub), ("train", files)) if value]
        if len(given) != 1:
            raise ValueError(f"one of path, hub, or train/dev/test says where the data is; got {given or 'none'}")
        if self.subset and not self.hub:
            raise ValueError("subset belongs to hub")
        if self.split and self.path is None:
            raise ValueError("the column split belongs to path: train, dev and test, or hub, are splits already")
        if unknown := self.shares.keys() - set(SPLITS):
            raise ValueError(f"shares are of {', '.join(SPLITS)}, not of {', '.join(sorted(unknown))}")
        if abs(sum(self.shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares have to add up to 1, and come to {sum(self.shares.values()):g}")
        return self

    def __hash__(self) -> int:
        """Settings are hashed by their text, as `shares` cannot be."""
        return hash(repr(self))

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits there can be."""
        if self.hub:
            return ("train", "test")
        if self.path is None:
            return tuple(name for name in SPLITS if getattr(self, name) is not None)
        return SPLITS if self.split else tuple(name for name in SPLITS if self.shares.get(name))

    @property
    def properties(self) -> Properties:
        """What this environment promises."""
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
        """List the tasks of a split, in the order of the rows; a row that is there twice is one task.

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
                got=str(self.path),
                expected="rows of it",
                hint=f"see the column {self.split}" if self.split else "give it a larger share, or more rows",
            )
        return found

    def start(self, task: Task) -> DatasetEpisode:
        """Begin one attempt."""
        return DatasetEpisode(task)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """The reference as the reply; None where there is none, or something was replied."""
        return None if task.reference is None or taken else (task.reference,)

    def sources(self) -> Iterator[tuple[str, str, Iterator[tuple[int, Row]]]]:
        """Split (empty where a column or shares say), name and rows of each source."""
        if self.hub:
            yield from ((split, f"{self.hub}/{split}", of_hub(self.hub, self.subset, split)) for split in self.splits)
        for split in ("", *SPLITS):
            path: Path | None = getattr(self, split or "path")
            if path is not None:
                yield split, path.name, read(path, f"environment.{split or 'path'}")

    def said(self, key: str) -> str | None:
        """A key, or what the preset has for it."""
        own: str | None = getattr(self, key)
        return own if own is not None else PRESETS.get(self.preset or "", {}).get(key)

    def _state(self) -> tuple[float, ...]:
        """When each file was written last: another file is read again."""
        files = (self.path, self.train, self.dev, self.test)
        return tuple(path.stat().st_mtime if path is not None and path.exists() else 0.0 for path in files)


class DatasetEpisode:
    """One reply to one question."""

    def __init__(self, task: Task) -> None:
        self._task, self._is_over = task, False
        self.opening = StepResult(str(task.info["prompt"]), state_key=task.id)

    async def step(self, action: str) -> StepResult:
        """Take the reply."""
        if self._is_over:
            raise after_end(self._task.id, action)
        self._is_over = True
        reference = self._task.reference
        solved = reference is not None and _plain(action) == _plain(reference)
        return StepResult(
            "", float(solved), True, state_key=f"{self._task.id}/over", success=solved, valid=bool(action)
        )

    async def close(self) -> None:
        """Nothing is held open."""


# --- rows ---


@plain_dataclass(frozen=True, slots=True)
class _Question:
    """A row as it is used: where it stands, what is asked, and the answer."""

    source: str
    number: int
    messages: tuple[Message, ...]
    prompt: str
    reference: str | None

    @property
    def content(self) -> str:
        """What makes it the same question, whatever its spacing and capitals."""
        return _plain(repr([m.content for m in self.messages]) + self.prompt)

    @property
    def task(self) -> Task:
        name = f"{self.source}/{digest(repr((self.content, self.reference)), 8)}"
        return Task(
            id=f"dataset/{name}",
            messages=self.messages,
            reference=self.reference,
            info={"prompt": self.prompt, "row": self.number},
        )


@lru_cache(maxsize=8)
def _tasks(settings: Dataset, state: tuple[float, ...]) -> Mapping[str, tuple[Task, ...]]:
    found: dict[str, dict[str, _Question]] = {split: {} for split in SPLITS}
    for named, source, rows in settings.sources():
        columns: _Columns | None = None
        for i, (number, row) in enumerate(rows):
            if settings.n is not None and i >= settings.n:
                break
            columns = columns or _Columns.of(settings, source, row)
            one = columns.question(number, row)
            split = named or columns.split(number, row) or _drawn(settings, one.content)
            found[split].setdefault(repr((one.content, one.reference)), one)
    _keep_apart(settings, found)
    return {split: tuple(one.task for one in by_content.values()) for split, by_content in found.items()}


def _drawn(settings: Dataset, content: str) -> str:
    """Split by a hash of the content, in the given shares."""
    at, total = int(digest(f"dataset/{content}", 8), 16) / 2**64, 0.0
    for split in settings.splits:
        total += settings.shares[split]
        if at < total:
            return split
    return settings.splits[-1]


def _keep_apart(settings: Dataset, found: dict[str, dict[str, _Question]]) -> None:
    """Refuse prompts that are in two splits, or take those of `train` away."""
    held_out = {one.content: one for split in ("dev", "test") for one in found[split].values()}
    shared = [(key, one, held_out[one.content]) for key, one in found["train"].items() if one.content in held_out]
    tests = {one.content: one for one in found["test"].values()}
    both = [(one, tests[one.content]) for one in found["dev"].values() if one.content in tests]
    if settings.overlap == "drop":
        for key, *_ in shared:
            del found["train"][key]
        shared = []
    pairs = [(a, b) for _, a, b in shared] or both
    if pairs:
        some = "; ".join(f"{a.source}:{a.number} is {b.source}:{b.number}" for a, b in pairs[:3])
        raise EnvError(
            "splits have prompts in common: what is trained on would be measured",
            where="environment",
            got=f"{len(pairs)} of them: {some}",
            expected="each prompt in one split",
            hint="overlap: drop takes those of train away" if shared else "take them out of one of the files",
        )


@plain_dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of a source are used, found at its first row."""

    settings: Dataset
    source: str
    prompt: str
    reference: str | None

    @classmethod
    def of(cls, settings: Dataset, source: str, row: Row) -> _Columns:
        prompt = settings.said("prompt") or next((name for name in PROMPTS if name in row), None)
        if prompt is None:
            raise _absent("prompt", "none of " + ", ".join(PROMPTS), source, row)
        reference = settings.said("reference")
        for key, name in (("reference", reference), ("choices", settings.said("choices")), ("split", settings.split)):
            if name is not None and name not in row:
                raise _absent(key, name, source, row)
        if reference is None:
            reference = next((name for name in REFERENCES if name in row and name != prompt), None)
        for name in _fields(prompt) if "{" in prompt else [prompt]:
            if name not in row:
                raise _absent("prompt", name, source, row)
        return cls(settings, source, prompt, reference)

    def question(self, number: int, row: Row) -> _Question:
        where = f"{self.source}:{number}"
        if "{" in self.prompt:
            needed = _fields(self.prompt)
            asked: Any = self.prompt.format_map({name: self._cell(row, name, where) for name in needed})
        else:
            asked = self._cell(row, self.prompt, where)
        messages, prompt = _messages(asked, where)
        reference = None if self.reference is None else self._cell(row, self.reference, where, may_lack=True)
        choices = self.settings.said("choices")
        if choices is not None:
            listed = self._cell(row, choices, where)
            prompt, reference = _with_choices(prompt, listed, reference, where)
        return _Question(self.source, number, messages, prompt, self._answer(reference, where))

    def split(self, number: int, row: Row) -> str:
        """Split by the column; empty where there is none."""
        if self.settings.split is None:
            return ""
        said = str(self._cell(row, self.settings.split, f"{self.source}:{number}")).strip().lower()
        split = _NAMED.get(said, said)
        refuse_unknown(split, SPLITS, f"{self.source}:{number}, column {self.settings.split}")
        return split

    def _cell(self, row: Row, name: str, where: str, *, may_lack: bool = False) -> Any:
        value = row.get(name)
        if value is None and not may_lack:
            raise EnvError(
                "a row lacks a column that the first one has" if name not in row else "an empty cell",
                where=where,
                got=", ".join(row)[:200],
                expected=name,
                hint=nearest(name, row) or "take the row out, or give it this column",
            )
        return value

    def _answer(self, value: Any, where: str) -> str | None:
        if value is None:
            return None
        if isinstance(value, dict | list):
            raise EnvError("a reference is one text or number", where=where, got=str(value)[:80], expected="text")
        text, pattern = str(value).strip(), self.settings.said("pattern")
        if pattern is None:
            return text
        if pattern == "boxed":
            found = boxed(text)
        else:
            match = re.search(pattern, text)
            found = match and (match.group(1) if match.re.groups else match.group(0))
        if not found:
            raise EnvError(
                "the reference has not the form that pattern looks for",
                where=where,
                got=text[-80:],
                expected=pattern,
                hint="change environment.pattern, or take the row out",
            )
        return found.strip()


def _fields(template: str) -> list[str]:
    """Names of the columns in a template. Raises EnvError where it is none."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise EnvError("no template", where="environment.prompt", got=template[:80], expected="{column}") from error


def _messages(asked: Any, where: str) -> tuple[tuple[Message, ...], str]:
    """What is said before, and the last message, which is the user's."""
    if isinstance(asked, str) and asked.strip():
        return (), asked
    if (
        isinstance(asked, list)
        and asked
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in asked)
    ):
        roles = [str(m["role"]) for m in asked]
        if (
            roles[-1] == "user"
            and set(roles) <= {role.value for role in Role}
            and all(isinstance(m["content"], str) for m in asked)
        ):
            *before, last = asked
            return tuple(Message(Role(m["role"]), m["content"]) for m in before), last["content"]
    raise EnvError(
        "no question",
        where=where,
        got=str(asked)[:80],
        expected="a text, or messages of which the user's is the last: [{role: user, content: ...}]",
        hint="see environment.prompt",
    )


def _with_choices(prompt: str, listed: Any, reference: Any, where: str) -> tuple[str, str | None]:
    """A question with its choices by letters, and the letter of the right one."""
    texts = listed.get("text") if isinstance(listed, dict) else listed  # as ARC has them: {text: [...], label: [...]}
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(_LETTERS):
        raise EnvError("no choices", where=where, got=str(listed)[:80], expected="a list of 2 to 26 texts")
    letters = _LETTERS[: len(texts)]
    told = "\n".join([prompt, *(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))])
    if reference is None:
        return told, None
    is_index = isinstance(reference, int) or str(reference).isdigit()
    if is_index and int(reference) < len(texts):
        return told, letters[int(reference)]
    if str(reference).strip().upper() in tuple(letters):
        return told, str(reference).strip().upper()
    if reference in texts:
        return told, letters[texts.index(reference)]
    raise EnvError(
        "the reference is none of the choices",
        where=where,
        got=str(reference)[:80],
        expected=f"{letters[0]} to {letters[-1]}",
    )


def _absent(key: str, name: str, source: str, row: Row) -> EnvError:
    return EnvError(
        "no such column",
        where=f"environment.{key}, {source}",
        got=name,
        expected=", ".join(map(str, row)),
        hint=nearest(name, map(str, row)) or f"name the column: environment.{key}=...",
    )


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
