"""Single-turn environment from a file of questions and answers; a verifier of the recipe judges the replies.

    environment: {kind: dataset, path: questions.jsonl, prompt: question, reference: answer}
    rewards:
      right: {kind: numeric}

A row becomes a task: its prompt is what the agent reads, its reference what verifiers compare with. Whether an attempt
is solved is what the first reward that compares with the reference says, or the one with `solved_at`.
"""

from __future__ import annotations

import hashlib
import json
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
from environments.dataset_files import Row, read
from environments.drawn import digest
from environments.splits import refuse_unknown
from rewards.exact import ExactMatch
from rewards.extract import boxed
from rlhf.data import Message, Role, Task
from rlhf.data.foreign import MAX_TEXT_BYTES
from rlhf.errors import EnvError, nearest
from rlhf.settings import STRICT

SPLITS = ("train", "dev", "test")
_SHARES: Mapping[str, float] = {"train": 0.8, "dev": 0.1, "test": 0.1}
#: Other names of splits in columns.
_NAMED = {"validation": "dev", "valid": "dev", "val": "dev", "eval": "dev", "training": "train", "testing": "test"}
#: Columns that are taken where the recipe names none, the first that is there.
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
REFERENCES = (
    "reference", "answer", "final_answer", "ground_truth", "target", "label", "solution", "output",
    "reward_model.ground_truth",
)  # fmt: skip

Preset = Literal["gsm8k", "math", "aime", "multiple_choice"]
#: What each preset stands for, where the recipe says nothing else.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "gsm8k": {"prompt": "question", "reference": "answer", "answer_pattern": r"####\s*(.+)"},
    "math": {"prompt": "problem", "reference": "solution", "answer_pattern": "boxed"},
    "aime": {"prompt": "problem", "reference": "answer"},
    "multiple_choice": {"prompt": "question", "reference": "answer", "choices": "choices"},
}
_LETTERS = string.ascii_uppercase
_EXACT = ExactMatch()


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
    split_ratios: Mapping[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=lambda: dict(_SHARES))
    """Share of each split, where neither files nor a column say; a hash of the prompt decides."""
    overlap: Literal["refuse", "drop"] = "refuse"
    """What to do about prompts of `train` that are also in another split: an error, or without them."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Only so many rows of each file, its first."""

    agent_defaults: ClassVar[Mapping[str, Any]] = {"system": "", "format": "text", "think": "allow"}
    limit_defaults: ClassVar[Mapping[str, Any]] = {"max_turns": 1, "max_tokens": 1024}

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
        """What this environment promises."""
        return Properties(
            deterministic=True,
            replayable=True,
            thread_safe=True,
            inline=True,
            oracle=True,
            splits=self.splits,
            package=", ".join(f"{path.name} sha256:{_digest(path, mark)[:16]}" for path, mark in self._state()),
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

    def setting(self, key: str) -> str | None:
        """A key, or what the preset has for it."""
        own: str | None = getattr(self, key)
        return own if own is not None else PRESETS.get(self.preset or "", {}).get(key)

    def _state(self) -> tuple[tuple[Path, tuple[int, ...]], ...]:
        """Each file that is there, with time and size of what it holds: another content is read again."""
        given = (path for path in (self.path, self.train, self.dev, self.test) if path is not None and path.exists())
        return tuple((path, _marks(path)) for path in given)


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
        solved = reference is not None and _EXACT.normal(action) == _EXACT.normal(reference)
        return StepResult(
            "", float(solved), True, state_key=f"{self._task.id}/over", success=solved, valid=bool(action)
        )

    async def close(self) -> None:
        """Nothing is held open."""


# --- rows ---


@plain_dataclass(frozen=True, slots=True)
class _Question:
    """A row as it is used: where it stands, what is asked, the answer, and the other columns."""

    source: str
    number: int
    messages: tuple[Message, ...]
    prompt: str
    reference: str | None
    columns: Row

    @property
    def content(self) -> str:
        """What makes it the same question, whatever its spacing."""
        return repr([" ".join(text.split()) for text in (*(m.content for m in self.messages), self.prompt)])

    @property
    def task(self) -> Task:
        name = f"{self.source}/{digest(repr((self.content, self.reference)), 8)}"
        return Task(
            id=f"dataset/{name}",
            messages=self.messages,
            reference=self.reference,
            info={"prompt": self.prompt, "row": self.number, "columns": self.columns},
        )


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _marks(path: Path) -> tuple[int, ...]:
    return tuple(n for stat in (file.stat() for file in _files(path)) for n in (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=32)
def _digest(path: Path, marks: tuple[int, ...]) -> str:
    """SHA-256 of a file, or of all files of a folder, in hexadecimal."""
    whole = hashlib.sha256()
    for file in _files(path):
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


@lru_cache(maxsize=8)
def _tasks(settings: Dataset, state: tuple[tuple[Path, tuple[int, ...]], ...]) -> Mapping[str, tuple[Task, ...]]:
    found: dict[str, dict[str, _Question]] = {split: {} for split in SPLITS}
    for named, source, rows in settings.sources():
        columns: _Columns | None = None
        number = 0
        for i, (number, row) in enumerate(rows):
            if settings.max_rows is not None and i >= settings.max_rows:
                break
            columns = columns or _Columns.of(settings, source, row)
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
        found = [name for name in PROMPTS if name in row]
        prompt = settings.setting("prompt") or (found[0] if found else None)
        if prompt is None:
            raise _absent("prompt", "none of " + ", ".join(PROMPTS), source, row)
        if len(found) > 1 and not settings.setting("prompt"):
            both = " ".join(f"{{{name}}}" for name in found)
            raise EnvError(
                "several columns may be the prompt",
                where=f"environment.prompt, {source}",
                got=", ".join(found),
                expected="one of them, or a text with several",
                hint=f"write prompt: {found[0]}, or prompt: '{both}'",
            )
        reference = settings.setting("reference")
        named = {"reference": reference, "choices": settings.setting("choices"), "split_column": settings.split_column}
        for key, name in named.items():
            if name is not None and not _has(row, name):
                raise _absent(key, name, source, row)
        if reference is None:
            reference = next((name for name in REFERENCES if _has(row, name) and name != prompt), None)
        for name in _fields(prompt) if "{" in prompt else [prompt]:
            if not _has(row, name):
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
        if len(prompt) > MAX_TEXT_BYTES // 4:
            got = f"{len(prompt):,} characters"
            raise EnvError("a prompt is too long", where=where, got=got, expected=f"at most {MAX_TEXT_BYTES // 4:,}")
        reference = None if self.reference is None else self._cell(row, self.reference, where, may_lack=True)
        choices = self.settings.setting("choices")
        if choices is not None:
            listed = self._cell(row, choices, where)
            prompt, reference = _with_choices(prompt, listed, reference, where)
        used = {name.partition(".")[0] for name in (self.prompt, self.reference or "", choices or "")}
        others = {str(name): value for name, value in row.items() if name not in used and _is_plain(value)}
        return _Question(self.source, number, messages, prompt, self._answer(reference, where), others)

    def split(self, number: int, row: Row) -> str:
        """Split by the column; empty where there is none."""
        if self.settings.split_column is None:
            return ""
        said = str(self._cell(row, self.settings.split_column, f"{self.source}:{number}")).strip().lower()
        split = _NAMED.get(said, said)
        refuse_unknown(split, SPLITS, f"{self.source}:{number}, column {self.settings.split_column}")
        return split

    def _cell(self, row: Row, name: str, where: str, *, may_lack: bool = False) -> Any:
        value = _at(row, name)
        if value is None and not may_lack and _has(row, name):
            raise EnvError("an empty cell", where=where, got=f"{name}: null", expected="text", hint="take the row out")
        if value is None and not may_lack:
            raise EnvError(
                "a row lacks a column that the first one has",
                where=where,
                got=", ".join(row)[:200],
                expected=name,
                hint=nearest(name, row) or "take the row out, or give it this column",
            )
        return value

    def _answer(self, value: Any, where: str) -> str | None:
        if value is None or not str(value).strip():
            return None
        if isinstance(value, dict | list):
            raise EnvError("a reference is one text or number", where=where, got=str(value)[:80], expected="text")
        text, pattern = str(value).strip(), self.settings.setting("answer_pattern")
        if pattern is None:
            return text
        if pattern == "boxed":
            found = boxed(text)
        else:
            match = re.search(pattern, text)
            found = match and (match.group(1) if match.re.groups else match.group(0))
        if not found:
            raise EnvError(
                "the reference has not the form that answer_pattern looks for",
                where=where,
                got=text[-80:],
                expected=pattern,
                hint="change environment.answer_pattern, or take the row out",
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
    """A question with its choices by letters, and the letter of the right one; also of ARC's {text: [], label: []}."""
    texts, labels = listed, None
    if isinstance(listed, dict):
        texts, labels = listed.get("text"), listed.get("label")
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(_LETTERS):
        raise EnvError(
            "no choices",
            where=where,
            got=str(listed)[:80],
            expected="a list of 2 to 26 texts",
            hint="see environment.choices",
        )
    letters = _LETTERS[: len(texts)]
    told = "\n".join([prompt, *(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))])
    if reference is None or reference == -1 or not str(reference).strip():
        return told, None  # of a test set whose answers are held back
    if isinstance(reference, int):
        return told, letters[reference] if 0 <= reference < len(texts) else _refuse_choice(reference, letters, where)
    said = str(reference).strip()
    for names in (labels, texts, list(letters), [str(i) for i in range(len(texts))]):
        if isinstance(names, list) and said in (found := [str(name).strip() for name in names]):
            return told, letters[found.index(said)]
    return told, said.upper() if said.upper() in tuple(letters) else _refuse_choice(said, letters, where)


def _refuse_choice(reference: object, letters: str, where: str) -> str:
    raise EnvError(
        "the reference is none of the choices",
        where=where,
        got=str(reference)[:80],
        expected=f"{letters[0]} to {letters[-1]}, an index from 0, or the text of one",
    )


def _has(row: Row, name: str) -> bool:
    """Whether there is a column, or a key in a column: `reward_model.ground_truth`."""
    outer, _, inner = name.partition(".")
    return name in row or (bool(inner) and isinstance(row.get(outer), dict) and inner in row[outer])


def _at(row: Row, name: str) -> Any:
    outer, _, inner = name.partition(".")
    return row[name] if name in row else row[outer].get(inner) if inner and isinstance(row.get(outer), dict) else None


def _is_plain(value: object) -> bool:
    """Whether a value is plain JSON, as `Task.info` holds it."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _absent(key: str, name: str, source: str, row: Row) -> EnvError:
    return EnvError(
        "no such column",
        where=f"environment.{key}, {source}",
        got=name,
        expected=", ".join(map(str, row)),
        hint=nearest(name, map(str, row)) or f"name the column: environment.{key}=...",
    )
