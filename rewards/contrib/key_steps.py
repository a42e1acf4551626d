"""Rewards that compare the steps of an answer with reference steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.calls import calls_in
from rewards.answers.text import everything_said
from rewards.models.embedding import embedded
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RewardError
from rlhf.settings import STRICT

_Share = Annotated[float, Field(ge=0, le=1)]


def found_of(text: str, steps: Sequence[Sequence[str]]) -> int:
    """Number of `steps` in `text`: those of which a spelling stands there as whole words."""
    said = f" {_plain(text)} "
    return sum(any(f" {_plain(way)} " in said for way in ways if _plain(way)) for ways in steps)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def steps_of(task: Task, name: str, kind: str) -> Sequence[Any]:
    """Value of `name` in `Task.info` or its row's columns. Raises RewardError where absent."""
    found = task.info.get(name, task.info.get("columns", {}).get(name))
    if not isinstance(found, list | tuple) or not found:
        raise RewardError(
            "the task has no expected steps",
            where=kind,
            got=f"{task.id} with {name}: {found!r}",
            expected=f"a list in Task.info[{name!r}], or in a column {name} of the data set",
            hint="name the column with `steps`",
        )
    return found


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KeySteps:
    """Share of a task's key steps that were said: 2 of 4 are worth .5.

    A key step is a text, or a list of spellings of which one is enough. R1-VL adds .1 of it (StepRAR) and the form
    (StepRVR, reward `format`) to the outcome: right, 2 of 4 and well-formed are 1 + .05 + 1 = 2.05.

    Source: R1-VL, arXiv 2503.12937, and its released reward.
    """

    inline: ClassVar[bool] = True

    steps: str = "key_steps"
    """Name of the steps in `Task.info`, or of a column."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no key steps."""
        steps = [[s] if isinstance(s, str) else s for s in steps_of(task, self.steps, "key_steps")]
        n = found_of(everything_said(trajectory), steps)
        return Verdict(n / len(steps), why=f"{n} of {len(steps)} key steps")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepReference:
    """For turn k, (1 − `source`) · cos(query, reference query) + `source` · [the right tool], over the turns.

    The reference of turn k is a mapping of `call`, the name of a tool, and `query`. Texts are compared as hashed
    vectors (`rewards.models.embedding`), at least 0. A cosine of .8 and the right tool: .9. A turn beyond the
    reference, or that calls nothing, earns 0; the value is the sum over the turns, divided by the number of steps. For
    estimators that look at turns, such as `step_grpo`.

    Source: R1-Router, arXiv 2505.22095, and its released reward, which has a sentence encoder.
    """

    inline: ClassVar[bool] = True

    steps: str = "steps"
    """Name of the steps in `Task.info`, or of a column."""
    source: _Share = 0.5
    """Weight of the right tool."""
    dim: Annotated[int, Field(ge=16)] = 1024
    """Length of the vectors."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no steps."""
        steps = steps_of(task, self.steps, "step_reference")
        per_turn = [0.0] * len(trajectory.turns)
        tools = {str(step["call"]) for step in steps}
        for k, (turn, step) in enumerate(zip(trajectory.turns, steps, strict=False)):
            calls = calls_in(turn.action, tools)
            if calls and turn.action.error is None:
                likeness = self.likeness(calls[0].argument, str(step["query"]))
                per_turn[k] = self.value(likeness, calls[0].name == step["call"]) / len(steps)
        return Verdict(sum(per_turn), why=", ".join(f"{x:.3f}" for x in per_turn), per_turn=tuple(per_turn))

    def likeness(self, query: str, reference: str) -> float:
        """Cosine of two texts, at least 0; 1 where they are the same but for spaces and small letters."""
        one, other = (embedded(text, self.dim) for text in (query, reference))
        return max(0.0, float(one @ other))

    def value(self, likeness: float, right: bool) -> float:
        """Reward of one turn."""
        return (1 - self.source) * likeness + self.source * right
