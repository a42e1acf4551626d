"""A reward for the subtasks of mending software: which files, which functions, which lines, and what edit."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.extract import fenced
from rewards.code.edits import edits_in
from rlhf.data import Verdict
from rlhf.errors import RewardError
from rlhf.settings import STRICT

_FUNCTION = re.compile(r"([^\s:]+)\s*::?\s*([A-Za-z_][\w.]*)(?:\(\))?")
_LINES = re.compile(r"([^\s:]+)\s*:\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?")
#: More lines than this, named or named again, are no place.
_MAX_LINES = 10_000
#: Comparing two texts may take as many steps as the product of their lines.
_MAX_EDIT = 2_000
_REAL = "### a.py\n<<<<<<< SEARCH\nx = 1\ny = 2\n=======\nx = 1\ny = 3\n>>>>>>> REPLACE\n"

Items = Counter[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Subtask:
    """F_β of what an answer names against what the reference names; 0 where it cannot be read.

        P = |A ∩ R| / |A|, R = |A ∩ R| / |R|, F_β = (1 + β²) P R / (β² P + R)

    The answer is the last block between lines of three backticks; an answer without one, or with a line in it of
    another form, earns 0. By `subtask` a block names

    - `file`: paths, one on each line;
    - `function`: `path::name` on each line, methods as `path::Class.name`;
    - `line`: `path:12` or `path:12-20` on each line; every line of the file counts;
    - `edit`: changes, each a line `### path` and a block of `<<<<<<< SEARCH`, `=======` and `>>>>>>> REPLACE`. What
      counts are the lines that are removed and the lines that are added, as often as they are. An edit that changes
      nothing cannot be read.

    The reference is written as the answer is, without backticks, or is a JSON object with a text for each subtask.
    Files a, b, c against a, d: P = 1/3, R = 1/2, F₁ = 0.4, F₂ = 0.4545.

    Source: SoRFT, arXiv 2502.20127: a subtask each for files, functions, lines and edits, rewarded by F_β against the
    accepted change. The forms of answers, how edits are taken apart, and β = 1 are definitions of this project.
    """

    reads_reply: ClassVar[bool] = True

    subtask: Literal["file", "function", "line", "edit"]
    """Subtask that the answer names."""
    beta: Annotated[float, Field(gt=0, le=100)] = 1.0
    """F-measure's beta, the weight of recall against precision; 1 weighs both alike."""

    @property
    def examples(self) -> Sequence[tuple[str, str]]:
        """Answers that deserve full marks, with their references."""
        reference = {"file": "a.py\nb.py", "function": "a.py::f", "line": "a.py:3-5", "edit": _REAL}[self.subtask]
        return [(f"It is\n```\n{reference}\n```", reference)]

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge `answer`. Raises RewardError where the reference names nothing."""
        right = _reference(self.subtask, reference)
        blocks = [text for _, text in fenced(answer)]
        named = _READ[self.subtask](blocks[-1]) if blocks else None
        if not named:
            return Verdict(0.0, why=f"{self.subtask}: no block that can be read" if blocks else "no block")
        n_both = (named & right).total()
        precision, recall = n_both / named.total(), n_both / right.total()
        weight = self.beta**2
        value = (1 + weight) * precision * recall / (weight * precision + recall) if n_both else 0.0
        counted = f"{n_both} of {right.total()} found, {named.total()} named"
        return Verdict(value, why=f"{self.subtask}: {counted}")


@lru_cache(maxsize=1024)
def _reference(subtask: str, reference: str) -> Items:
    text = reference
    if reference.lstrip().startswith("{"):
        try:
            text = str(json.loads(reference)[subtask])
        except (ValueError, KeyError, TypeError):
            text = ""
    found = _READ[subtask](text)
    if not found:
        raise RewardError(
            "the reference has nothing to compare an answer with",
            where=f"subtasks, {subtask}",
            got=repr(reference)[:200],
            expected="lines as an answer has them between backticks",
            hint="see docs/sandbox.md for the form of each subtask",
        )
    return found


def _files(text: str) -> Items | None:
    lines = _written(text)
    return None if any(len(line.split()) != 1 for line in lines) else Counter({(_path(line),): 1 for line in lines})


def _functions(text: str) -> Items | None:
    found = [_FUNCTION.fullmatch(line) for line in _written(text)]
    return None if None in found else Counter({(_path(m[1]), m[2]): 1 for m in found if m})


def _lines(text: str) -> Items | None:
    found: set[tuple[str, ...]] = set()
    n = 0
    for line in _written(text):
        match = _LINES.fullmatch(line)
        if match is None:
            return None
        first, last = int(match[2]), int(match[3] or match[2])
        n += last - first + 1
        if first > last or n > _MAX_LINES:
            return None
        found |= {(_path(match[1]), str(number)) for number in range(first, last + 1)}
    return Counter(found)


def _edits(text: str) -> Items | None:
    items: Items = Counter()
    try:
        for edit in edits_in(text):
            changed = list(_changed(*([line.rstrip() for line in side] for side in (edit.before, edit.after))))
            if not changed or len(edit.path.split()) != 1:
                return None
            items += Counter((_path(edit.path), sign, line) for sign, line in changed)
    except ValueError:
        return None
    return items


def _changed(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield removed and added lines; none where too many to compare quickly."""
    if len(before) + len(after) > _MAX_EDIT:
        return
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from (("-", line) for line in before[i:j])
            yield from (("+", line) for line in after[k:m])


def _written(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _path(text: str) -> str:
    return text.removeprefix("./")


_READ: Mapping[str, Callable[[str], Items | None]] = {
    "file": _files,
    "function": _functions,
    "line": _lines,
    "edit": _edits,
}
