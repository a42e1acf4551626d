"""Exact match of the last action with the task's reference."""

from __future__ import annotations

import unicodedata
from typing import ClassVar

from pydantic.dataclasses import dataclass

from rewards.answers.text import last_action, last_answer, reference_of
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExactMatch:
    """Exact match: 1 if the last action, or its `answer[x]`, equals the reference, else 0.

    Normalised are: compatible characters (Unicode NFKC), white space, and, unless told otherwise, case and the marks
    `.,;:!?` at the end.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    ignore_case: bool = True
    """Ignore case: `Paris` equals `paris`."""
    ignore_end_marks: bool = True
    """Ignore punctuation at the end: `Paris.` equals `Paris`."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge the last action. Raises RewardError where the task has no reference, or one with parts."""
        reference = reference_of(task, "exact_match")
        if not trajectory.turns:
            return Verdict(0.0, why="no action")
        said, answer = (self.judge(read(trajectory), reference) for read in (last_action, last_answer))
        return max(said, answer, key=lambda verdict: verdict.value)

    def judge(self, answer: str, reference: str) -> Verdict:
        """Compare two texts, an empty one of which equals nothing; never raises."""
        said = self.normal(answer)
        same = bool(said) and said == self.normal(reference)
        return Verdict(float(same), why="equal" if same else f"{answer[:80]!r} is not {reference[:80]!r}")

    def normal(self, text: str) -> str:
        """Return `text` as it is compared."""
        text = " ".join(unicodedata.normalize("NFKC", text).split())
        if self.ignore_end_marks:
            text = text.rstrip(".,;:!?").rstrip() or text
        return text.casefold() if self.ignore_case else text
