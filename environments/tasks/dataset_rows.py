"""Data-set rows as questions: columns of prompt, answer and choices, found, named or combined."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from environments.core.procedural import digest
from environments.core.seed_splits import refuse_unknown
from environments.tasks.dataset_code import SOLUTIONS, tests_as_reference
from environments.tasks.dataset_files import Row
from rewards.answers.extract import boxed
from rlhf.data import Message, Role, Task
from rlhf.data.untrusted import MAX_TEXT_BYTES
from rlhf.errors import EnvError, RecipeError, closest, nearest
from rlhf.finite import cell

SPLITS = ("train", "dev", "test")
#: Other names of splits in columns.
NAMED = {"validation": "dev", "valid": "dev", "val": "dev", "eval": "dev", "training": "train", "testing": "test"}
#: Column of the reference in verl's data.
_OF_VERL = "reward_model.ground_truth"
#: Columns that are taken where the recipe names none, the first that is there.
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
REFERENCES = (
    "reference", "answer", "final_answer", "ground_truth", "target", "label", "solution", "output",
    _OF_VERL, "golden_answers",
)  # fmt: skip
#: Keys of programming tasks.
CODE = ("tests", "entry_point", "test_setup", "preamble")
#: Names under which functions get prompt and reference whatever the columns are called.
_USUAL = frozenset({*PROMPTS, *REFERENCES})
_LETTERS = string.ascii_uppercase
#: Characters of the longest prompt.
_LONGEST = MAX_TEXT_BYTES // 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """Columns that a recipe names: keys of `environments.tasks.dataset.Dataset`, None where it says nothing."""

    prompt: str | None
    reference: str | None
    answer_pattern: str | None
    choices: str | None
    split_column: str | None
    tests: str | None
    entry_point: str | None
    test_setup: str | None
    preamble: str | None


@dataclass(frozen=True, slots=True)
class Question:
    """Normalised row: place, messages, prompt and answer, other columns, whether it holds messages, what all have."""

    source: str
    number: int
    messages: tuple[Message, ...]
    prompt: str
    reference: str | None
    columns: Row
    chat: bool = False
    info: Row = field(default_factory=dict)

    @property
    def content(self) -> str:
        """Prompt with the messages before it, whatever its spacing: questions of one content are of one split."""
        return repr([" ".join(text.split()) for text in (*(m.content for m in self.messages), self.prompt)])

    @property
    def task(self) -> Task:
        """Task with the question, its answer and the other columns."""
        name = f"{self.source}/{digest(repr((self.content, self.reference)), 8)}"
        return Task(
            id=f"dataset/{name}",
            messages=self.messages,
            reference=self.reference,
            info={
                "prompt": self.prompt,
                "row": self.number,
                "columns": self.columns,
                **({"chat": True} if self.chat else {}),
                **self.info,
            },
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a source that are used, found at its first row, and `Task.info` of all rows.

    `info["named"]` says of the columns of prompt and reference which they are: rewards may ask for them by name.
    """

    wanted: Wanted
    source: str
    prompt: str
    reference: str | None
    used: frozenset[str] = frozenset()
    info: Row = field(default_factory=dict)

    @classmethod
    def of(cls, wanted: Wanted, source: str, row: Row, info: Row) -> Columns:
        """Find the columns; `info` is of all rows. Raises EnvError where one is absent, or the prompt is not clear."""
        found = [name for name in PROMPTS if name in row]
        prompt = wanted.prompt or (found[0] if found else None)
        if prompt is None:
            raise _absent("prompt", "none of " + ", ".join(PROMPTS), source, row)
        if len(found) > 1 and not wanted.prompt:
            both = " ".join(f"{{{name}}}" for name in found)
            raise EnvError(
                "several columns may be the prompt",
                where=f"environment.prompt, {source}",
                got=", ".join(found),
                expected="one of them, or a text with several",
                hint=f"write prompt: {found[0]}, or prompt: '{both}'",
            )
        named = {key: getattr(wanted, key) for key in ("reference", "choices", "split_column", *CODE)}
        for key, text in {**named, "prompt": prompt}.items():
            for name in _columns_in(text, key):
                if not _has(row, name):
                    raise _absent(key, name, source, row)
        usual = REFERENCES if wanted.tests is None else SOLUTIONS
        found = [name for name in usual if _has(row, name) and name not in (prompt, wanted.tests)]
        reference = wanted.reference or next(iter(found), None)
        # The prompt, where it is one column, and what nobody but verifiers may see.
        hidden = {**named, "reference": reference, "split_column": None}
        used = [prompt, *(name for key, text in hidden.items() for name in _columns_in(text, key))]
        named = {prompt: "prompt"} | ({reference: "reference"} if reference and wanted.tests is None else {})
        named = {name: what for name, what in named.items() if name.isidentifier() and name not in _USUAL}
        outer = frozenset(name.partition(".")[0] for name in used)
        return cls(wanted, source, prompt, reference, outer, {**({"named": named} if named else {}), **info})

    def question(self, number: int, row: Row) -> Question:
        """Read a row. Raises EnvError, with its number, where it cannot be used."""
        where = f"{self.source}:{number}"
        asked = self._filled(row, self.prompt, where, "prompt")
        messages, prompt = _messages(asked, where)
        if len(prompt) > _LONGEST:
            got = f"{len(prompt):,} characters"
            raise EnvError("a prompt is too long", where=where, got=got, expected=f"at most {_LONGEST:,}")
        if self.reference is None:
            self._refuse_late(row, where)
        reference = self._filled(row, self.reference, where, "reference", may_lack=True)
        choices, info = self.wanted.choices, self.info
        if choices is not None:
            listed = self._cell(row, choices, where)
            prompt, reference = _with_choices(prompt, listed, reference, where)
        if self.wanted.tests is not None:
            answer: str | None = self._tests(row, reference, where)
        elif self._is_structure(reference):
            answer, info = json.dumps(cell(reference), ensure_ascii=False), {**info, "structured": True}
        else:
            answer = self._answer(reference, where)
        is_chat = not isinstance(asked, str)
        return Question(self.source, number, messages, prompt, answer, self._others(row), is_chat, info)

    def _is_structure(self, value: Any) -> bool:
        """True for a mapping or list as verl's `ground_truth`, which its functions take as it is; texts are `qa`'s."""
        is_texts = isinstance(value, list) and all(isinstance(x, str) for x in value)
        return self.reference == _OF_VERL and isinstance(value, dict | list) and not is_texts and not _is_empty(value)

    def _others(self, row: Row) -> Row:
        """Columns that are not used; what JSON cannot hold, such as bytes, is left out."""
        others = {}
        for name, value in row.items():
            if name not in self.used:
                with suppress(TypeError):
                    others[str(name)] = cell(value)
        return others

    def _refuse_late(self, row: Row, where: str) -> None:
        """Raise EnvError for a row with an answer where the first row, which says what the columns are, has none."""
        usual, taken = REFERENCES if self.wanted.tests is None else SOLUTIONS, (self.prompt, self.wanted.tests)
        late = next((name for name in usual if name not in taken and not _is_empty(_at(row, name))), None)
        if late is not None:
            raise EnvError(
                "this row has an answer in a column that the first row lacks",
                where=where,
                got=f"a column {late}",
                expected="the column in each row, empty where there is no answer, or its name in the recipe",
                hint=f"write environment.reference: {late}, with {late}: null in rows without one; or rename it",
            )

    def _tests(self, row: Row, solution: Any, where: str) -> str:
        """Reference with the tests of a programming task."""
        tests, entry_point, setup, preamble = (
            self._filled(row, getattr(self.wanted, key), where, key, may_lack=key != "tests") for key in CODE
        )
        return tests_as_reference(
            tests, where, entry_point=entry_point, setup=setup, preamble=preamble, solution=solution
        )

    def _filled(self, row: Row, text: str | None, where: str, key: str, *, may_lack: bool = False) -> Any:
        """Cell of a column, or a text with cells in its braces; None where nothing is wanted, or it may lack."""
        if text is None or "{" not in text:
            return None if text is None else self._cell(row, text, where, may_lack=may_lack)
        cells = {name: self._cell(row, name, where, may_lack=may_lack) for name in _columns_in(text, key)}
        if None in cells.values():
            return None
        try:
            return _FORM.vformat(text, (), cells)
        except (LookupError, ValueError, TypeError) as error:
            got = f"{type(error).__name__}: {error}"
            raise EnvError("a text with columns cannot be filled", where=where, got=got, expected=text[:80]) from error

    def split(self, number: int, row: Row) -> str:
        """Split by the column; empty where there is none."""
        if self.wanted.split_column is None:
            return ""
        said = str(self._cell(row, self.wanted.split_column, f"{self.source}:{number}")).strip().lower()
        split = NAMED.get(said, said)
        refuse_unknown(split, SPLITS, f"{self.source}:{number}, column {self.wanted.split_column}")
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
                hint=self._misspelt(name, row) or "take the row out, or give it this column",
            )
        return value

    @staticmethod
    def _misspelt(name: str, row: Row) -> str:
        found = closest(name, row)
        return "" if found is None else f"rename '{found}' to '{name}' in this row"

    def _answer(self, value: Any, where: str) -> str | None:
        if _is_empty(value):
            return None
        pattern = self.wanted.answer_pattern
        if pattern is None and isinstance(value, list) and all(isinstance(x, str) for x in value):
            return value[0].strip() if len(value) == 1 else json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict | list | bytes):
            expected = "text, or a list of texts" if pattern is None else "text"
            keys = list(value) if isinstance(value, dict) else []
            hint = f"name a key in it: environment.reference={self.reference}.{keys[0]}" if keys else ""
            got = str(value)[:80]
            raise EnvError("a reference is one text or number", where=where, got=got, expected=expected, hint=hint)
        text = str(value).strip()
        if pattern is None:
            return text
        if pattern == "boxed":
            found = boxed(text)
        else:
            match = re.search(pattern, text)
            found = match and (match.group(1) if match.re.groups else match.group(0))
        if not found:
            raise EnvError(
                "the reference does not match answer_pattern",
                where=where,
                got=text[-80:],
                expected=pattern,
                hint="change environment.answer_pattern, or take the row out",
            )
        return found.strip()


def refuse_pattern(pattern: str) -> None:
    """Raise RecipeError for an `answer_pattern` that is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(
            f"this is no regular expression: {error}",
            where="answer_pattern",
            got=pattern,
            expected="a regular expression of Python's `re`, or boxed",
            hint=r"fix it, or put \ before a literal bracket; for instance '####\s*(.+)'",
        ) from error


class _Form(string.Formatter):
    """Texts with columns in braces: a list is written as lines, and `[0]` takes one of it."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Value of a column, or of an entry of it."""
        name, bracket, rest = field_name.partition("[")
        value = kwargs[name]
        if bracket:
            value, _ = super().get_field(f"0[{rest}", (value,), {})
        return "\n".join(map(str, value)) if isinstance(value, list) else value, name


_FORM = _Form()


def _columns_in(text: str | None, key: str) -> list[str]:
    """Names of the columns in what a recipe says under `key`: one, or several in the braces of a text.

    Raises:
        EnvError: its braces are not closed.
    """
    if text is None or "{" not in text:
        return [] if text is None else [text]
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise EnvError("no template", where=f"environment.{key}", got=text[:80], expected="{column}") from error
    return list(dict.fromkeys(name.partition("[")[0] for name in names))


def _messages(asked: Any, where: str) -> tuple[tuple[Message, ...], str]:
    """Messages before the last one, and the text of that one, which is the user's."""
    said = [{"role": "user", "content": asked}] if isinstance(asked, str) and asked.strip() else asked
    if isinstance(said, list) and said and all(map(_is_message, said)) and said[-1]["role"] == "user":
        return tuple(Message(Role(m["role"]), m["content"]) for m in said[:-1]), said[-1]["content"]
    raise EnvError(
        "no question",
        where=where,
        got=str(asked)[:80],
        expected="a text, or messages of which the user's is the last: [{role: user, content: ...}]",
        hint="see environment.prompt",
    )


def _is_message(value: Any) -> bool:
    roles = {role.value for role in Role}
    return isinstance(value, dict) and value.get("role") in roles and isinstance(value.get("content"), str)


def _with_choices(prompt: str, listed: Any, reference: Any, where: str) -> tuple[str, str | None]:
    """Question with lettered choices, and the letter of the right one; also of ARC's {text: [], label: []}."""
    texts, labels = (listed.get("text"), listed.get("label")) if isinstance(listed, dict) else (listed, None)
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(_LETTERS):
        got, expected = str(listed)[:80], "a list of 2 to 26 texts"
        raise EnvError("no choices", where=where, got=got, expected=expected, hint="see environment.choices")
    letters = list(_LETTERS[: len(texts)])
    told = "\n".join([prompt, *(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))])
    if _is_empty(reference) or reference == -1:  # -1: of a test set whose answers are held back
        return told, None
    said = str(reference).strip()
    indices = [str(i) for i in range(len(texts))]
    lower = [letter.lower() for letter in letters]
    ways: tuple[Sequence[Any], ...]
    if isinstance(reference, bool):
        ways = (labels or (), [str(text).strip().capitalize() for text in texts])
    elif isinstance(reference, int):
        ways = (indices,)
    elif isinstance(reference, float):  # an index, in a table with empty cells
        ways = (labels or (), texts, [f"{i}.0" for i in range(len(texts))])
    else:  # a text of digits is the text of a choice rather than an index, which is a number
        is_text = said in (str(text).strip() for text in texts)
        ways = (labels or (), texts, letters, lower, () if is_text else indices)
    fits = [letters[found.index(said)] for names in ways if said in (found := [str(name).strip() for name in names])]
    is_clear = not isinstance(reference, str) or said in map(str, labels or ())
    if fits and (is_clear or len(set(fits)) == 1):
        return told, fits[0]
    if fits:
        raise EnvError(
            "the reference may be read as the text of one choice, and as the letter of another",
            where=where,
            got=f"{said}: {' or '.join(dict.fromkeys(fits))} of {str(texts)[:80]}",
            expected="one that is the same choice, however it is read",
            hint="give the index from 0 as a number, choices as {text: [...], label: [...]}, or take the row out",
        )
    expected = f"{letters[0]} to {letters[-1]}, an index from 0, or the text of one"
    raise EnvError("the reference is none of the choices", where=where, got=said[:80], expected=expected)


def _has(row: Row, name: str) -> bool:
    """True if there is a column, or a key in a column: `reward_model.ground_truth`; or in a key of it, and so on."""
    outer, _, inner = name.partition(".")
    return name in row or (bool(inner) and isinstance(row.get(outer), dict) and _has(row[outer], inner))


def _at(row: Row, name: str) -> Any:
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return _at(row[outer], inner) if inner and isinstance(row.get(outer), dict) else None


def _is_empty(value: Any) -> bool:
    """True for a cell that holds no answer; NaN is what tables have in a cell that is empty."""
    return value is None or value in ([], {}) or value != value or not str(value).strip()


def _absent(key: str, name: str, source: str, row: Row) -> EnvError:
    return EnvError(
        "no such column",
        where=f"environment.{key}, {source}",
        got=name,
        expected=", ".join(map(str, row)),
        hint=nearest(name, map(str, row)) or f"name the column: environment.{key}=...",
    )
