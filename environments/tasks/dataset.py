"""Environment from a file of questions and answers, of one turn or with tools, judged by a verifier of the recipe.

    environment: {kind: dataset, path: questions.jsonl, prompt: question, reference: answer}
    rewards:
      right: {kind: numeric}

A row becomes a task: its prompt is what the agent reads, its reference what verifiers compare with. Whether an attempt
is solved is what the first reward that compares with the reference says, or the one with `success_threshold`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import fields
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.core.procedural import digest
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset_files import Row, has_old_ends, load_hub, read, refuse_too_large, size_of
from environments.tasks.dataset_index import Index, ReadTasks, Source
from environments.tasks.dataset_reader import OfDatasets, RowReader, reader_of
from environments.tasks.dataset_rows import CODE, NAMED, SPLITS, Columns, Wanted, refuse_pattern
from environments.tasks.own_tools import AttemptTools, Toolbox, call_in, file_of, load_tools, result_of, task_info
from rewards.answers.exact import ExactMatch
from rewards.code.unit_tests import solution_of
from rlhf.data import Task
from rlhf.data.untrusted import number
from rlhf.errors import EnvError, RecipeError, nearest
from rlhf.settings import STRICT

_RATIOS: Mapping[str, float] = {"train": 0.8, "dev": 0.1, "test": 0.1}
Preset = Literal["gsm8k", "math", "aime", "multiple_choice", "humaneval", "mbpp", "mbpp_sanitized"]
#: What each preset stands for, where the recipe says nothing else.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "gsm8k": {"prompt": "question", "reference": "answer", "answer_pattern": r"####\s*(.+)"},
    "math": {"prompt": "problem", "reference": "solution", "answer_pattern": "boxed"},
    "aime": {"prompt": "problem", "reference": "answer"},
    "multiple_choice": {"prompt": "question", "reference": "answer", "choices": "choices"},
    "humaneval": {
        "prompt": "Complete this program, and answer with all of it in a block of Python.\n```python\n{prompt}\n```",
        "reference": "{prompt}{canonical_solution}",
        "tests": "test",
        "entry_point": "entry_point",
        "preamble": "prompt",
    },
    "mbpp": {
        "prompt": "{text}\nAnswer with a block of Python. A test that it has to pass:\n{test_list[0]}",
        "reference": "code",
        "tests": "test_list",
        "test_setup": "test_setup_code",
    },
    "mbpp_sanitized": {
        "prompt": "{prompt}\nAnswer with a block of Python. A test that it has to pass:\n{test_list[0]}",
        "reference": "code",
        "tests": "test_list",
        "test_setup": "test_imports",
    },
}
_EXACT = ExactMatch()
_NO_TOOLS = AttemptTools(MappingProxyType({}))
#: What the environment suggests for an agent, without tools and with them.
_ONE_REPLY: Mapping[str, Any] = {"system": "", "format": "text", "think": "allow"}
_WITH_TOOLS: Mapping[str, Any] = {
    "kind": "tools",
    "system": "Call tools as you need them. A reply without a call is your answer.",
    "think": "allow",
}
#: Files, and what tells that one has changed.
_State = tuple[tuple[Path, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dataset:
    """Questions and answers from a file, for one reply or with tools."""

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
    tests: str | None = None
    """Column of the unit tests of a programming task, for the reward `unit_tests`: a Python text, a list of
    assertions, or what that reward reads; `reference` is then a program that passes them, for demonstrations."""
    entry_point: str | None = None
    """Column of the name of the function that is tested, for tests with a function `check(candidate)`."""
    test_setup: str | None = None
    """Column of what stands before the tests, such as imports."""
    preamble: str | None = None
    """Column of what is put before each program that is tested, such as the beginning that the prompt shows."""
    tools: Path | None = None
    """Python file whose functions the agent may call before it answers, in several turns, or `FILE.py:Class` for the
    methods of an object that each attempt has of its own; docstrings and type hints say what they take."""
    split_column: str | None = None
    """Column that names the split of each row; `validation` is `dev`."""
    split_ratios: Mapping[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=lambda: dict(_RATIOS))
    """Share of each split, where neither files nor a column say; a hash of the prompt decides."""
    overlap: Literal["refuse", "drop"] = "refuse"
    """Prompts of `train` that another split has too: `refuse` them, or `drop` them."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Only so many rows of each file, its first; of each split of a `hub`, from a stream that ends there."""
    hub: str | None = None
    """Data set of the hub, instead of files, by the name that `datasets.load_dataset` takes."""
    hub_config: str | None = None
    """Configuration of the data set of the hub, where it has several."""
    max_held_mb: Annotated[int, Field(ge=0)] = 64
    """Larger files are indexed, and their rows read when they are drawn; the tasks and their order are the same."""

    def __post_init__(self) -> None:
        """Refuse keys that do not go with each other: a RecipeError in Python as in YAML."""
        files = [name for name in SPLITS if getattr(self, name) is not None]
        given = ["path"] * bool(self.path) + files + ["hub"] * bool(self.hub)
        if bool(self.path) + bool(files) + bool(self.hub) != 1:
            many, got = "data comes from one place", " and ".join(given)
            what, do = (many, "remove one of them") if given else ("nothing says where the data is", "write path: FILE")
            raise _misfit("path", what, got or "none of these keys", "either path, or train/dev/test, or hub", do)
        if self.hub_config and not self.hub:
            raise _misfit("hub_config", "hub_config belongs to hub", self.hub_config, "hub: NAME", "name the data set")
        wanted = self.wanted
        if wanted.tests is None and (alone := next((key for key in CODE if getattr(wanted, key)), None)):
            what, got = f"{alone} belongs to tests, which are not given", str(getattr(wanted, alone))
            raise _misfit(alone, what, got, "tests: COLUMN", "name the column of the unit tests, or remove it")
        if wanted.tests and (
            other := next((key for key in ("choices", "answer_pattern") if getattr(wanted, key)), None)
        ):
            what, got = f"{other} is for answers, and tests are for programs", str(getattr(wanted, other))
            raise _misfit(other, what, got, "one of the two", f"remove tests, or {other}")
        refuse_pattern(self.answer_pattern or "")
        if self.split_column and files:
            what = "split_column belongs to path: train, dev and test are splits already"
            raise _misfit("split_column", what, f"{self.split_column} beside {', '.join(files)}", "path", "remove it")
        ratios = self.split_ratios
        if (by := self.split_column or ", ".join(files)) and dict(ratios) != _RATIOS:
            what = "split_ratios divide a file, and these rows are divided already"
            raise _misfit("split_ratios", what, f"{dict(ratios)} beside {by}", "one of the two", "remove one")
        if unknown := sorted(ratios.keys() - set(SPLITS)):
            what = f"split_ratios are of {', '.join(SPLITS)}, not of {', '.join(unknown)}"
            do = nearest(unknown[0], SPLITS) or "name one of these"
            raise _misfit("split_ratios", what, ", ".join(ratios), ", ".join(SPLITS), do)
        if abs((total := sum(ratios.values())) - 1) > 1e-6:
            what = "split_ratios have to add up to 1"
            raise _misfit("split_ratios", what, f"{total:g}", "1", "for instance {train: 0.8, dev: 0.1, test: 0.1}")

    def __hash__(self) -> int:
        """Settings are hashed by their text, as `split_ratios` cannot be."""
        return hash(repr(self))

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits there can be."""
        if self.hub is not None and "" not in (named := hub_splits(self.hub, self.hub_config, self.max_rows)):
            return tuple(named)
        if self.path is None and self.hub is None:
            return tuple(name for name in SPLITS if getattr(self, name) is not None)
        return SPLITS if self.split_column else tuple(name for name in SPLITS if self.split_ratios.get(name))

    @property
    def agent_defaults(self) -> Mapping[str, Any]:
        """Recipe keys of the agent: the whole reply is the answer; with tools one that calls none."""
        return _ONE_REPLY if self.tools is None else _WITH_TOOLS

    @property
    def limits_defaults(self) -> Mapping[str, Any]:
        """Recipe keys of the limits: one turn, or several with tools."""
        return {"max_turns": 1 if self.tools is None else 8, "max_tokens": 1024}

    @property
    def offers_tools(self) -> bool:
        """True if there are tools."""
        return self.tools is not None

    @property
    def demonstrates(self) -> bool:
        """False with a class of tools, which may judge, and want more than the reference as a reply."""
        return self.tools is None or not file_of(self.tools)[1]

    @property
    def properties(self) -> Properties:
        """Promises of this environment; none are made for functions of others."""
        is_known = self.tools is None
        return Properties(
            deterministic=is_known,
            replayable=is_known,
            thread_safe=is_known,
            inline=is_known,
            oracle=self.demonstrates,
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
        by_split, _ = _tasks(self, self._state())
        found = by_split[split]
        if not found:
            counts = ", ".join(f"{len(own)} in {name}" for name, own in by_split.items() if name in self.splits)
            raise EnvError(
                "this split has no rows",
                where=f"environment, split {split!r}",
                got=f"{self.path or getattr(self, split)}: {counts}",
                expected="rows of it",
                hint=f"see the column {self.split_column}"
                if self.split_column
                else f"add rows, change environment.split_ratios, or give it a file: environment.{split}=FILE",
            )
        return found

    def n_merged(self, split: str) -> int:
        """Rows of a split that are no tasks, as an earlier row of it has their prompt and answer."""
        return _tasks(self, self._state())[1].get(split, 0)

    def start(self, task: Task) -> DatasetEpisode:
        """Begin one attempt."""
        return DatasetEpisode(task, self._right(task), self._toolbox.begun(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """The reference as the reply, or the program in it; None where there is none, or another was given."""
        right, tools = self._right(task), self._toolbox.tools
        return None if right is None or any(call_in(action, tools) is None for action in taken) else (right,)

    @property
    def _toolbox(self) -> Toolbox:
        return Toolbox(_NO_TOOLS.tools) if self.tools is None else load_tools(self.tools)

    def _right(self, task: Task) -> str | None:
        if task.info.get("structured"):
            return None
        return task.reference if self.wanted.tests is None else solution_of(task.reference)

    def fingerprint(self) -> str:
        """SHA-256 of each file that is read, and the hub's of a data set, for the record of a run."""
        told: list[str] = []
        if self.hub is not None:
            found = hub_splits(self.hub, self.hub_config, self.max_rows).values()
            told = [f"{self.hub} {one.split} {one._fingerprint}" for one in found]
        return ", ".join(told + [f"{path.name} sha256:{_digest(path, marks)[:16]}" for path, marks in self._state()])

    @property
    def wanted(self) -> Wanted:
        """Columns that are named here or by the preset."""
        preset = PRESETS.get(self.preset or "", {})
        own = {key.name: getattr(self, key.name) for key in fields(Wanted)}
        return Wanted(**{name: preset.get(name) if value is None else value for name, value in own.items()})

    def _state(self) -> _State:
        """Time and size of each file, so that a changed one is read again."""
        code = None if self.tools is None else file_of(self.tools)[0]
        files = (self.path, self.train, self.dev, self.test, code)
        given = (path for path in files if path is not None and path.exists())
        return tuple((path, _marks(path)) for path in given)


def _misfit(where: str, what: str, got: str, expected: str, do: str) -> RecipeError:
    return RecipeError(what, where=where, got=got, expected=expected, hint=do)


class DatasetEpisode:
    """Reply to a question, which is compared with a right one where there is one; calls of tools may come first.

    A class of tools with a method `reward` judges the reply instead.
    """

    def __init__(self, task: Task, right: str | None, tools: AttemptTools = _NO_TOOLS) -> None:
        self._task, self._right, self._own, self._is_over = task, right, tools, False
        self._called = ""
        self.opening = StepResult("\n".join(filter(None, [str(task.info["prompt"]), tools.said])), state_key=task.id)

    async def step(self, action: str) -> StepResult:
        """Carry out a call, or take the reply."""
        if self._is_over:
            raise after_end(self._task.id, action)
        if (call := call_in(action, self._own.tools)) is not None:
            said, valid = await result_of(self._own.tools[call[0]], call[1])
            self._called = digest(f"{self._called}/{action}/{said}", 8)
            return StepResult(said, state_key=f"{self._task.id}/{self._called}", valid=valid)
        self._is_over = True
        if self._own.is_judge:
            reward = await self._own.call("reward", action)
        else:
            reward = float(self._right is not None and _EXACT.normal(action) == _EXACT.normal(self._right))
        solved = (number(reward) or 0.0) >= 1
        return StepResult("", reward, True, state_key=f"{self._task.id}/over", success=solved, valid=bool(action))

    async def close(self) -> None:
        """Let a class of tools free what it holds."""
        await self._own.call("close")


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


@lru_cache(maxsize=4)
def hub_splits(name: str, config: str | None, n_rows: int | None) -> Mapping[str, Any]:
    """Splits of a data set of the hub under the names of this environment; one that is alone has none.

    With `n_rows` only the first rows of each are read, from a stream.

    Raises:
        EnvError: it cannot be had, or no split of it has a known name.
    """
    found = load_hub(name, config, "environment.hub", (*SPLITS, *NAMED), n_rows)
    named = {NAMED.get(split, split): rows for split, rows in found.items()}
    if set(named) == {"train"}:
        return {"": named["train"]}
    if not (known := {split: named[split] for split in SPLITS if split in named}):
        expected = f"one of {', '.join((*SPLITS, *NAMED))}"
        hint = (
            "save those you want: datasets.load_dataset(...)[SPLIT].save_to_disk(FOLDER), and environment.train: FOLDER"
        )
        raise EnvError(
            "no split of this data set is known",
            where="environment.hub",
            got=", ".join(found),
            expected=expected,
            hint=hint,
        )
    return known


@plain_dataclass(frozen=True)
class _Opened:
    """Rows of a source and, once they have been read, the reader of each."""

    named: str
    where: str
    name: str
    rows: Iterable[tuple[int, Row]]
    reader: Callable[[int, Sequence[str]], RowReader]


def _of_hub(found: Any, n_lines: int, heads: Sequence[str]) -> RowReader:
    return OfDatasets(found)


def _opened(settings: Dataset) -> Iterator[_Opened]:
    if settings.hub is not None:
        splits = hub_splits(settings.hub, settings.hub_config, settings.max_rows)
        key = "split_column" if settings.split_column else "split_ratios"
        if "" not in splits and (settings.split_column or dict(settings.split_ratios) != _RATIOS):
            what, got = "the data set of the hub is divided already", f"{key} beside splits {', '.join(splits)}"
            raise _misfit(
                f"environment.{key}", what, got, "one of the two", f"remove {key}, or save one split as a file"
            )
        for split, found in splits.items():
            name = f"{settings.hub} {found.split}"
            yield _Opened(split, "environment.hub", name, enumerate(found, 1), partial(_of_hub, found))
    for split in ("", *SPLITS):
        path: Path | None = getattr(settings, split or "path")
        if path is not None:
            where = f"environment.{split or 'path'}"
            if path.suffix.lower() == ".json" and settings.max_rows is None:
                refuse_too_large(path, where)
            yield _Opened(split, where, path.name, read(path, where), partial(reader_of, path))


@lru_cache(maxsize=8)
def _tasks(settings: Dataset, state: _State) -> tuple[Mapping[str, Sequence[Task]], Mapping[str, int]]:
    """Tasks of each split, all of them where the files are small, else read on demand; and its merged rows."""
    tools = settings.tools
    paths = [path for path, _ in state if tools is None or path != file_of(tools)[0]]
    info = {} if tools is None else task_info(load_tools(tools).tools)
    is_held = any(path.suffix.lower() == ".json" or has_old_ends(path) for path in paths)
    is_held = is_held or (settings.hub is None and sum(map(size_of, paths)) <= settings.max_held_mb * 2**20)
    index, sources, held = Index(), list[Source](), list[Task]()
    for opened in _opened(settings):
        columns: Columns | None = None
        heads: tuple[str, ...] = ()
        before = number = 0
        for number, row in islice(opened.rows, settings.max_rows):
            if columns is None:
                columns, heads = Columns.of(settings.wanted, opened.name, row, info), tuple(row)
            one = columns.question(number, row)
            split = opened.named or columns.split(number, row) or _drawn(settings, one.content)
            index.add(len(sources), split, before + 1, one)
            held += [one.task] if is_held else []
            before = number
        if columns is None:
            raise EnvError("this file has no rows", where=opened.where, got=opened.name, expected="rows")
        sources.append(Source(opened.name, columns, None if is_held else opened.reader(number, heads)))
    distinct = index.distinct()
    rows = _kept_apart(settings, index, distinct, [source.name for source in sources])
    merged = np.bincount(index.splits, minlength=len(SPLITS)) - np.bincount(
        index.splits[distinct], minlength=len(SPLITS)
    )
    n_merged = dict(zip(SPLITS, merged.tolist(), strict=True))
    by_split = {split: rows[index.splits[rows] == i] for i, split in enumerate(SPLITS)}
    if is_held:
        return {split: tuple(held[i] for i in own) for split, own in by_split.items()}, n_merged
    return {split: ReadTasks(sources, index, own) for split, own in by_split.items()}, n_merged


def _drawn(settings: Dataset, content: str) -> str:
    """Split by a hash of the content, in the given shares."""
    at, total = int(digest(f"dataset/{content}", 8), 16) / 2**64, 0.0
    for split in settings.splits:
        total += settings.split_ratios[split]
        if at < total:
            return split
    return settings.splits[-1]


def _kept_apart(
    settings: Dataset, index: Index, rows: npt.NDArray[np.int64], names: Sequence[str]
) -> npt.NDArray[np.int64]:
    """Those of `rows` none of which has its prompt in two splits; with `overlap: drop` those of `train` go."""
    pairs = index.shared(rows)
    if settings.overlap == "drop":
        dropped = [row for row, _ in pairs if SPLITS[index.split[row]] == "train"]
        gone = set(dropped)
        rows, pairs = np.setdiff1d(rows, dropped), [pair for pair in pairs if pair[0] not in gone]
    if pairs:
        told = [[f"{names[index.source[i]]}:{index.number[i]}" for i in pair] for pair in pairs[:3]]
        raise EnvError(
            "splits share prompts: evaluation would use training data",
            where="environment",
            got=f"{len(pairs)} of them: {'; '.join(' is '.join(pair) for pair in told)}",
            expected="each prompt in one split",
            hint="remove them from one split; overlap: drop removes them from train",
        )
    return rows
