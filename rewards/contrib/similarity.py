"""Similarity of two texts, or of two sets of file changes: matching share, in order."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers import extract
from rewards.answers.text import last_reply, reference_of
from rewards.worker_pool import Pool, TooSlow
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RewardError
from rlhf.settings import STRICT

_MAX_TEXT = 20_000
_EDIT = re.compile(
    r"^(?:### +)?([^\n<>`]+)\n(?:```\w*\n)?<<<<<<< SEARCH\n(.*?)^=======\n(.*?)^>>>>>>> REPLACE",
    re.DOTALL | re.MULTILINE,
)


def ratio(a: str, b: str) -> float:
    """Ratio 2 M / (|a| + |b|), M the characters in common blocks (Ratcliff and Obershelp); 1 for two empty texts."""
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def diff_similarity(ours: Mapping[str, str], theirs: Mapping[str, str]) -> float:
    r"""Mean ratio of the diffs of all files that either side changes; 0 for a file changed by one.

    `-a\n+b` against `-a\n+c` has 4 of 5 characters in common: 2·4/10 = .8. With a second file that only one touches:
    .4. No file at all on either side: 1. Source: SWE-RL, arXiv 2502.18449, and its released reward.
    """
    files = sorted({*ours, *theirs})
    if not files:
        return 1.0
    return sum(ratio(ours[f], theirs[f]) if f in ours and f in theirs else 0.0 for f in files) / len(files)


def diffs(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the unified diff of each file that differs, without file names and line numbers."""
    found = {}
    for name in sorted({*before, *after}):
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=3))[2:]
            found[name] = "\n".join("@@" if line.startswith("@@") else line for line in lines)
    return found


def edited(before: Mapping[str, str], text: str) -> dict[str, str] | str:
    """Return the files after the search/replace blocks of `text`, or what is wrong with the blocks."""
    after, n = dict(before), 0
    for match in _EDIT.finditer(text):
        name, old, new = match[1].strip(), match[2], match[3]
        if old not in after.get(name, "") or (not old and after.get(name)):
            return f"{name[:60]}: the text to search for is not there"
        if old == new:
            return f"{name[:60]}: a block that changes nothing"
        after[name] = after.get(name, "").replace(old, new, 1)
        n += 1
    if not n or n != text.count("<<<<<<< SEARCH"):
        return "no search/replace block" if not n else "a block that is not whole"
    return after


def compare(text: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[object]:
    """Return value and reason for the blocks in `text`; quadratic in the length of the diffs."""
    ours = edited(before, text)
    if isinstance(ours, str):
        return [-1.0, ours]
    return [diff_similarity(diffs(before, ours), diffs(before, after)), "compared"]


@cache
def _patches() -> Pool:
    return Pool("rewards.contrib.similarity:compare", size=2)


@cache
def _texts() -> Pool:
    return Pool("rewards.contrib.similarity:ratio", size=2)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PatchSimilarity:
    r"""Patch similarity: −1 for edits that do not apply, else the similarity of diffs, from 0 to 1.

    The last reply holds blocks `### path`, `<<<<<<< SEARCH`, `=======`, `>>>>>>> REPLACE`, each of whose first texts
    is in its file and is changed. The reference is JSON: `{"before": {path: text}, "after": {path: text}}`. The value
    is the mean over all touched files of the ratio of equal characters of their diffs; a comparison that takes more
    than `limit_s` is worth 0.

    Source: SWE-RL, arXiv 2502.18449.
    """

    needs_reference: ClassVar[bool] = True
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "### a.py\n<<<<<<< SEARCH\nx = 1\n=======\nx = 2\n>>>>>>> REPLACE",
            json.dumps({"before": {"a.py": "x = 1\n"}, "after": {"a.py": "x = 2\n"}}),
        ),
    )

    limit_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Processor seconds of a comparison."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge the last reply. Raises RewardError where the reference is missing or not as above."""
        reference = reference_of(task, "patch_similarity", with_parts=True)
        try:
            files = json.loads(reference)
            before, after = dict(files["before"]), dict(files["after"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RewardError(
                "the reference is not a pair of files before and after",
                where=f"patch_similarity, task {task.id}",
                got=reference[:80],
                expected='{"before": {path: text}, "after": {path: text}}',
            ) from error
        text = extract.after_thinking(last_reply(trajectory))
        try:
            value, why = _patches().call(text, before, after, limit_s=self.limit_s)
        except TooSlow:
            return Verdict(0.0, why=f"not compared within {self.limit_s:g} s")
        return Verdict(value, why=why)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Similarity:
    """Text similarity of answer and reference, in order: 2 M / (|a| + |b|)."""

    limit_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Processor seconds of a comparison, which is quadratic in the length of the texts; beyond it the value is 0."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        if len(answer) > _MAX_TEXT or len(reference) > _MAX_TEXT:
            return Verdict(0.0, why=f"longer than {_MAX_TEXT} characters")
        if not answer.strip() or answer == reference:
            return Verdict(
                float(answer == reference and bool(answer.strip())), why="empty" if not answer.strip() else "equal"
            )
        try:
            return Verdict(_texts().call(answer, reference, limit_s=self.limit_s), why="compared")
        except TooSlow:
            return Verdict(0.0, why=f"not compared within {self.limit_s:g} s")
