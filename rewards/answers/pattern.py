"""Verifier by a regular expression."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.text import last_action, transcript
from rewards.worker_pool import Pool, TooSlow
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pattern:
    """1 if a regular expression matches, else 0; needs no reference.

    It is matched in a process of its own: some expressions take for ever on some texts, and then the value is 0.
    """

    pattern: str
    """A regular expression of Python's `re`; `.` matches new lines."""
    match: Literal["search", "whole"] = "whole"
    """`search` finds it anywhere; `whole` wants it to match all of the text, but for white space around it."""
    match_in: Literal["last_action", "all_actions"] = "last_action"
    """Text to match; all actions are joined by new lines."""
    limit_s: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Processor seconds for one text."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from error

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Match one trajectory; never raises."""
        text = last_action(trajectory) if self.match_in == "last_action" else transcript(trajectory)
        try:
            matched = _pool().call(self.pattern, text, self.match == "whole", limit_s=self.limit_s)
        except TooSlow:
            return Verdict(0.0, why=f"no match found within {self.limit_s:g} s")
        return Verdict(float(matched), why="matches" if matched else "does not match")


def matches(pattern: str, text: str, whole: bool) -> bool:
    """Match `text`; may take for ever."""
    compiled = re.compile(pattern, re.DOTALL)
    return bool(compiled.fullmatch(text.strip()) if whole else compiled.search(text))


@cache
def _pool() -> Pool:
    return Pool("rewards.answers.pattern:matches", size=2)
