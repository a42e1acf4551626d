"""Reward for intermediate answers (interleaved reasoning)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.qa import exact
from rewards.answers.tags import Format
from rewards.answers.text import everything_said, reference_of
from rewards.contrib.key_steps import steps_of
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def worth(right: Sequence[bool], scheme: str) -> float:
    """Reward of intermediate answers 1 to N, of which `right` are: 0 to 1.

    Right, wrong, right: `all` 0, `partial` 2/3, `discounted` (1 + 1/3) / (1 + 1/2 + 1/3) = 8/11. None: 0.
    """
    if scheme == "all":
        return float(bool(right) and all(right))
    weights = [1 / k if scheme == "discounted" else 1.0 for k in range(1, len(right) + 1)]
    return math.fsum(w for w, is_right in zip(weights, right, strict=True) if is_right) / (math.fsum(weights) or 1.0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IntermediateAnswers:
    """Reward of the answers before the last, paid where the last is right and the form is kept.

    An attempt that thinks and answers in turn (`<think>`, `<answer>`, `<think>`, `<answer>`) says each intermediate
    answer k of the N that its task has as soon as it knows it. `all` pays 1 where all are right, `partial` the share
    that is, `discounted` weighs the k-th with 1/k. What is said beyond N counts for nothing, what is missing is wrong.

    Source: interleaved reasoning, arXiv 2505.19640; there it is paid only in batches that do better than the last, and
    a discounted sum is not divided by its largest value.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    scheme: Literal["all", "partial", "discounted"] = "discounted"
    """Weights of the intermediate answers."""
    steps: Annotated[str, Field(min_length=1)] = "steps"
    """Name of the intermediate answers in `Task.info`, or of a column."""
    form: Format = Field(
        default_factory=lambda: Format(
            transitions={"": ("think", "answer"), "think": ("answer",), "answer": ("think", "answer")}, replies=False
        )
    )
    """The order of thoughts and answers."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no steps, or no reference."""
        reference, steps = (
            reference_of(task, "intermediate_answers"),
            steps_of(task, self.steps, "intermediate_answers"),
        )
        said = everything_said(trajectory)
        answers = [found.strip() for found in _ANSWER.findall(said)]
        if wrong := self.form.wrong(trajectory):
            return Verdict(0.0, why=wrong)
        if not answers or not exact(answers[-1], reference):
            return Verdict(0.0, why="the last answer is wrong")
        given = [*answers[:-1], *[""] * len(steps)][: len(steps)]
        right = [exact(answer, str(step)) for answer, step in zip(given, steps, strict=True)]
        return Verdict(worth(right, self.scheme), why=f"{sum(right)} of {len(steps)} answers on the way are right")
