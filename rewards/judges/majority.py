"""A reward without labels: what most attempts at a task answer is taken for right."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

from pydantic.dataclasses import dataclass

from rewards.answers.calls import answer_in
from rewards.answers.exact import ExactMatch
from rewards.answers.text import last_action
from rewards.worker_pool import Pool, RaisedError, TooSlow
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_NORMAL = ExactMatch()
#: Processor seconds that an expression may take for one action.
_LIMIT_S = 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Majority:
    """Majority vote: 1 for the group's most frequent answer, else 0 (test-time RL); needs no reference.

    The answer is what the last action answers (`answer[4]` is 4), else its text, or what `pattern` finds in it,
    normalised as `exact_match` does by default. An attempt without a turn, whose last action could not be read, or in
    which nothing is found has no answer: it does not vote and earns 0. Of answers equally common, the one that was
    given first wins. Where no attempt has an answer, all earn 0. Answers 4, 4, 5, 4, 6 earn 1, 1, 0, 1, 0.

    The mean of this reward, `reward/NAME` in the log, is the share of attempts that agree with the majority of their
    group, here .6. Near 1 there is nothing left to learn, and a policy that has learnt to give one answer to everything
    is there too: watch success on tasks with labels.

    The votes are the attempts that are trained on, all `group_size` of them; the paper votes with 64 and trains on 32.

    Source: TTRL, arXiv 2504.16084.
    """

    pattern: str | None = None
    """A regular expression; the last match in the last action is the answer, or its first group where it has one. Null
    takes the whole text. It is matched in a process of its own: one that takes longer than a second finds nothing."""

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"pattern: not a regular expression: {error}") from error

    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Vote; never raises."""
        answers = [self.answer(t) for t in trajectories]
        votes = Counter(a for a in answers if a is not None)
        if not votes:
            return [Verdict(0.0, why="no attempt has an answer")] * len(answers)
        # Counter keeps the order of first occurrence, and max takes the first of equals.
        chosen = max(votes, key=votes.__getitem__)
        said = f"{votes[chosen]} of {votes.total()} answer {chosen[:80]!r}"
        return [Verdict(float(a == chosen), why=said if a is not None else f"no answer; {said}") for a in answers]

    def answer(self, trajectory: Trajectory) -> str | None:
        """Return the answer of an attempt, normalised; None where it has none."""
        if not last_action(trajectory):
            return None
        action = trajectory.turns[-1].action
        text = answer_in(action)
        if self.pattern is not None:  # it looks at all of the action, which may be read as a call
            try:
                text = _pool().call(self.pattern, action.text, text, limit_s=_LIMIT_S)
            except (TooSlow, RaisedError):
                return None
        return _NORMAL.normal(text) or None


def last_match(pattern: str, *texts: str) -> str:
    """Last match in the first text that has one, or its first group; empty without one. It may take for ever."""
    compiled = re.compile(pattern)
    found = next((found for text in texts if (found := list(compiled.finditer(text)))), None)
    return "" if found is None else found[-1][1 if compiled.groups else 0] or ""


@cache
def _pool() -> Pool:
    return Pool("rewards.judges.majority:last_match", size=2)
