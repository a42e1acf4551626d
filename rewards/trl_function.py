"""Reward functions of TRL's signature as group rewards: prompts and completions to numbers.

    def right(completions, answer, **kwargs):
        return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]

It is recognised by its parameter `completions`, and called with the attempts at one task at a time. A completion is a
text where the prompt is one, and a list of messages where the prompt is, or where an episode has several turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rewards.base import name_of
from rewards.validation import checked_verdict
from rewards.verified import REFERENCES, Verified, as_given, is_verifier, takes_completions
from rlhf.data import Task, Trajectory, Verdict
from rlhf.data.untrusted import shown
from rlhf.errors import RewardError, nearest

#: Parameters under which a function may ask for the task's reference, where no column has that name.
_REFERENCES = ("answer", *REFERENCES, "final_answer")
#: Parameters under which a function may ask for the prompt, where no column has that name.
_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
#: Parameters of TRL that tell of its trainer, and are not given here.
_OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")


def as_reward(part: Any) -> Any:
    """Callable reward for scoring: a verifier or TRL function wrapped, a reward unchanged."""
    if takes_completions(part):
        return TrlFunction(part)
    return Verified(part) if is_verifier(part) else part


class TrlFunction:
    """A reward function of TRL's signature, asked about all attempts at a task in one call.

    It is given `prompts`, `completions`, `completion_ids` and the columns of the data set, each as a list with an entry
    for each attempt; the prompt and the reference under the names of their columns and under usual names (`question`,
    `problem`, ...; `answer`, `solution`, `ground_truth`, ...), as text, but for a mapping or list of numbers in verl's
    data. Of these a function without `**kwargs` is given
    those that it names. None in place of a number counts as 0, as in TRL's sum. Where nobody sampled an attempt, as in
    the trial before training, its `completion_ids` are the bytes of its text in UTF-8.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def over_group(self) -> Callable[[Task, Sequence[Trajectory]], Any]:
        """Judge all attempts at a task; a coroutine function where the function is one."""
        return self._asked if self._is_async else self._called

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict | Awaitable[Verdict]:
        """Judge one attempt, as a group of one."""
        if self._is_async:
            return self._first(task, trajectory)
        return self._called(task, [trajectory])[0]

    async def _first(self, task: Task, trajectory: Trajectory) -> Verdict:
        return (await self._asked(task, [trajectory]))[0]

    def _called(self, task: Task, trajectories: Sequence[Trajectory]) -> Sequence[Verdict]:
        return self._read(self.function(**self._arguments(task, trajectories)), len(trajectories))

    async def _asked(self, task: Task, trajectories: Sequence[Trajectory]) -> Sequence[Verdict]:
        return self._read(await self.function(**self._arguments(task, trajectories)), len(trajectories))

    def _arguments(self, task: Task, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        n, is_chat = len(trajectories), _is_chat(task)
        is_row = isinstance(task.info.get("columns"), Mapping)
        columns = task.info["columns"] if is_row else task.info
        references = dict.fromkeys(_REFERENCES, as_given(task)) if task.reference is not None else {}
        prompts = [_prompt(task, t, is_chat) for t in trajectories]
        named = {
            name: prompts if what == "prompt" else [as_given(task)] * n
            for name, what in (task.info.get("named", {}) if is_row else {}).items()
        }
        given = (
            dict.fromkeys(_PROMPTS, prompts)
            | {name: [value] * n for name, value in {**references, **columns}.items()}
            | named
            | {
                "prompts": prompts,
                "completions": [_completion(t, is_chat) for t in trajectories],
                "completion_ids": [_ids(t) for t in trajectories],
            }
        )
        parameters = inspect.signature(self.function).parameters.values()
        for parameter in parameters:
            is_rest = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            needed = parameter.default is parameter.empty and not is_rest
            if needed and parameter.name not in given:
                raise self._lacking(parameter.name, task, columns)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return given
        return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}

    def _lacking(self, name: str, task: Task, columns: Mapping[str, Any]) -> RewardError:
        if name in _OF_TRAINER:
            hint = f"give it a default: {name}=None"
        else:
            absent = f"name a column, or give it a default for rows without one: {name}=None"
            hint = nearest(name, [*columns, "answer"]) or f"{absent}; the reference is given as `answer`"
        return RewardError(
            "this row has no column for this parameter",
            where=f"{name_of(self.function)}, task {task.id}",
            got=name,
            expected=", ".join(
                ["prompts", "completions", *columns, *(["answer"] if task.reference is not None else [])]
            ),
            hint=hint,
        )

    def _read(self, said: Any, n: int) -> Sequence[Verdict]:
        where = name_of(self.function)
        if hasattr(said, "tolist"):  # an array or a tensor
            said = said.tolist()
        if not isinstance(said, list | tuple) or len(said) != n:
            got = f"{len(said)} numbers" if isinstance(said, list | tuple) else shown(said)
            raise RewardError(
                "did not return one number per completion",
                where=where,
                got=got,
                expected=f"a list of {n} numbers",
                hint="return one number for each completion",
            )
        return [Verdict(0.0, why="None") if one is None else checked_verdict(one, where) for one in said]


def _is_chat(task: Task) -> bool:
    """True if prompts and completions are message lists; else they are texts."""
    return "columns" not in task.info or bool(task.info.get("chat"))


def _prompt(task: Task, trajectory: Trajectory, is_chat: bool) -> Any:
    if not is_chat:
        return str(task.info.get("prompt", trajectory.opening))
    before = [{"role": m.role.value, "content": m.content} for m in task.messages]
    return [*before, {"role": "user", "content": trajectory.opening}]


def _ids(trajectory: Trajectory) -> list[int]:
    """Sampled ids; bytes of the text, or of a blank, where there are none: a function may fail at an empty list."""
    said = "".join(turn.action.reply_text or turn.action.text for turn in trajectory.turns) or " "
    sampled = [i for g in trajectory.generations for i in g.token_ids]
    return sampled or list(said.encode("utf-8", "surrogatepass"))


def _completion(trajectory: Trajectory, is_chat: bool) -> Any:
    said = [turn.action.reply_text or turn.action.text for turn in trajectory.turns]
    if not is_chat and len(said) <= 1:
        return said[0] if said else ""
    messages = []
    for text, turn in zip(said, trajectory.turns, strict=True):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn.reply}]
    return messages[:-1]  # what the environment said last, nobody answered
