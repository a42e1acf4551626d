"""A verifier as a reward: the last action of a trajectory gives the answer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from rewards.answers.text import last_action, last_answer, last_reply, reference_of
from rewards.base import Capabilities, Verifier, name_of
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RecipeError

#: Names of parameters by which a verifier is told from a reward of (task, trajectory); the first is ours.
ANSWERS = ("answer", "response", "completion", "solution_str", "prediction", "reply", "output")
REFERENCES = ("reference", "ground_truth", "expected", "target", "label", "gold", "solution")
#: Parameters by which a function of verl's signature is told from others.
_OF_VERL = frozenset({"data_source", "solution_str", "ground_truth"})
#: Names of what a verifier is not given.
_NOT_GIVEN = frozenset(
    {"prompt", "prompts", "question", "query", "problem", "input", "instruction", "context", "history", "state", "info"}
    | {"messages", "metadata", "extra_info", "trajectory"}
)


def takes_completions(part: Any) -> bool:
    """True for a function of TRL's signature, with a parameter `completions`."""
    return "completions" in _parameters(part)


def takes_data_source(part: Any) -> bool:
    """True for a function of verl's signature, with parameters `data_source`, `solution_str` and `ground_truth`."""
    return _parameters(part).keys() >= _OF_VERL


def _parameters(part: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return {} if isinstance(part, type) else inspect.signature(part).parameters
    except (TypeError, ValueError):
        return {}


def of_pair(verifier: Any) -> Any:
    """Verifier to be called with (answer, reference); one of verl's signature is given an empty `data_source`."""
    if not takes_data_source(verifier):
        return verifier
    return lambda answer, reference: _as_verl(verifier, answer, reference, {})


def _as_verl(function: Any, reply: str, reference: Any, columns: Mapping[str, Any]) -> Any:
    """Call a function of verl's signature by those of verl's names that it takes."""
    given = {"data_source": columns.get("data_source", ""), "solution_str": reply, "ground_truth": reference}
    given["extra_info"] = columns.get("extra_info") or {}
    parameters = _parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return function(**{name: value for name, value in given.items() if takes_all or name in parameters})


def is_verifier(part: Any) -> bool:
    """True if the first two parameters are an answer and a reference, by name or as texts, or the signature is verl's.

    Raises:
        RecipeError: they are a reference and an answer, and would be given the wrong way round; one is something
            else, such as the prompt; or a function's two parameters say neither this nor (task, trajectory).
    """
    try:
        parameters = list(inspect.signature(part).parameters.values())[:2]
    except (TypeError, ValueError):
        return False
    first, second = ([p.name for p in parameters] + ["", ""])[:2]
    if takes_completions(part) or takes_data_source(part):
        return takes_data_source(part)
    where, got = name_of(part), f"({', '.join(p.name for p in parameters)})"
    if first in REFERENCES and second in ANSWERS:
        raise RecipeError(
            "a verifier takes the answer first",
            where=where,
            got=got,
            expected="(answer, reference)",
            hint="swap the two parameters",
        )
    annotations = [p.annotation for p in parameters]
    if first in ANSWERS or second in REFERENCES or (second and all(a in (str, "str") for a in annotations)):
        if other := next((name for name in (first, second) if name in _NOT_GIVEN), ""):
            raise RecipeError(
                f"a verifier does not receive the {other}",
                where=where,
                got=got,
                expected="(answer, reference)",
                hint="use a reward of (task, trajectory): task.messages, trajectory.turns[-1].action.text",
            )
        return True
    is_bare = second and all(a is inspect.Parameter.empty for a in annotations) and "task" not in first
    if is_bare and not inspect.isclass(part):
        raise RecipeError(
            "cannot tell whether this is a verifier or a reward",
            where=where,
            got=got,
            expected="(answer, reference) for a verifier, (task, trajectory) for a reward",
            hint="name the parameters so, or annotate them: two of type str are an answer and a reference",
        )
    return False


@dataclass(frozen=True)
class Verified:
    """Reward of `verifier` on the last action's answer and the task's reference; 0 without actions.

    The answer is the argument of a call such as `answer[x]` (see `rewards.answers.calls`), else the text of the
    action; or, for a verifier with an attribute `reads_reply`, the whole reply without its thoughts, which may have
    many lines.

    One of verl's signature is given all that follows the prompt, as in verl: every reply with its thoughts and, between
    them, what the environment answered, each from a new line. Words of a chat template, such as the names of roles,
    which verl leaves in, are not in it. It also gets the task's columns `data_source` and `extra_info`.

    A recipe names the verifier itself: `kind: ./my_verifier.py:judge`.
    """

    verifier: Verifier

    @property
    def inline(self) -> bool:
        """True if the verifier declares that it is quick and cannot hang."""
        return Capabilities(self.verifier).inline

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict | float | Awaitable[Verdict | float]:
        """Judge the last action. Raises RewardError where the task has no reference that the verifier can read."""
        of_verl = takes_data_source(self.verifier)
        reference = reference_of(task, name_of(self.verifier), with_parts=of_verl)
        if not trajectory.turns:
            return Verdict(0.0, why="no action")
        if of_verl:
            columns: Mapping[str, Any] = task.info.get("columns") or {}
            said = _conversation(trajectory)
            verdict: Verdict | float = _as_verl(self.verifier, said, as_given(task), columns)
            return verdict
        action = last_action(trajectory)
        if action.strip() == reference.strip():  # a reference that is a call itself
            return self.verifier(action, reference)
        read = last_reply if Capabilities(self.verifier).reads_reply else last_answer
        return self.verifier(read(trajectory), reference)


def as_given(task: Task) -> Any:
    """Reference as the row of a data set gives it: a mapping or list of numbers where it has parts, else the text."""
    return json.loads(task.reference or "") if task.info.get("structured") else task.reference


def _conversation(trajectory: Trajectory) -> str:
    """All replies with the environment's answers between them, line by line; not its last, which nobody replied to."""
    texts = [text for turn in trajectory.turns for text in (turn.action.reply_text or turn.action.text, turn.reply)]
    return "\n".join(texts[:-1])
