"""Tasks of any environment as the objectives of one episode; see `environments.contrib.composite_tasks`."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import Any, TypeVar

from environments.base import Environment, Episode, Oracle, StepResult, after_end, can_demonstrate
from environments.transcript import awaited
from rlhf.data import Message, Role, Task
from rlhf.errors import EnvError

T = TypeVar("T")
#: Name in `Task.info` of the tasks of a chain.
TASKS = "objectives"
_NUMBERED = re.compile(
    r"^\W*(?:objective\s*)?(\d{1,3})\b(?:\s*[.:)\]](?!\d))*(?:\s*-+\s*(?![\d.]))?\s*(.*)$", re.DOTALL | re.IGNORECASE
)


def chained(tasks: Iterable[Task], k: int, n: int | None, *, is_together: bool) -> list[Task]:
    """Chains of k tasks each, in order; left-over tasks are dropped.

    One after another, tasks that say which tools they have make a chain that has the tools of all.

    Args:
        tasks: of one split.
        k: of a chain.
        n: chains at most; None is as many as there are tasks for.
        is_together: whether all tasks of a chain are begun at once, so that a call cannot tell which it is for.

    Raises:
        EnvError: there are fewer than k tasks.
    """
    listed = list(islice(tasks, None if n is None else n * k))
    chains = [listed[i : i + k] for i in range(0, len(listed) - k + 1, k)]
    if not chains:
        raise EnvError(
            "the split has too few tasks for one chain",
            where="Objectives.tasks",
            got=f"{len(listed)} tasks",
            expected=f"at least {k}",
            hint="lower k",
        )
    return [
        Task(
            id=f"objectives/{k}/{chain[0].id}",
            seed=chain[0].seed,
            info={TASKS: [_written(task) for task in chain], **({} if is_together else _offered(chain))},
        )
        for chain in chains
    ]


def _offered(chain: Sequence[Task]) -> dict[str, Any]:
    """Entries of `Task.info` for the agent `tools`: the tools of all tasks, and `plain_answer` where each has it."""
    tools: list[Any] = []
    for task in chain:
        tools += [tool for tool in task.info.get("tools", ()) if tool not in tools]
    is_answer = all(task.info.get("plain_answer") for task in chain)
    return ({"tools": tools} if tools else {}) | ({"plain_answer": True} if is_answer else {})


def _written(task: Task) -> dict[str, Any]:
    """Write a task as plain JSON values."""
    messages = [[message.role.value, message.content] for message in task.messages]
    return {
        "id": task.id,
        "seed": task.seed,
        "reference": task.reference,
        "messages": messages,
        "info": dict(task.info),
    }


def tasks_of(chain: Task) -> list[Task]:
    """Return the tasks of a chain. Raises EnvError where the task is none."""
    if not isinstance(chain.info.get(TASKS), list):
        raise EnvError("this task is of another environment", where="Objectives", got=chain.id)
    return [
        Task(
            id=own["id"],
            seed=own["seed"],
            reference=own["reference"],
            messages=tuple(Message(Role(role), text) for role, text in own["messages"]),
            info=own["info"],
        )
        for own in chain.info[TASKS]
    ]


class Chain:
    """Attempt at all objectives, sequentially or side by side.

    Each objective is an episode of the environment; its rewards are divided by their number. Success is success in all
    of them. An action that names no objective that is going on costs a step and reaches no environment. The key of a
    state is made of the keys of the episodes begun and of which are over, and None where one of the keys is. The seat
    that acts next is that of the objective that is going on.
    """

    def __init__(self, environment: Environment, task: Task, *, is_together: bool, max_steps: int | None) -> None:
        self._environment, self._tasks = environment, tasks_of(task)
        self._is_together, self.steps_left = is_together, max_steps
        self._closed: set[int] = set()
        self.episodes: list[Episode] = []
        self.last: list[StepResult] = []
        self.taken: list[list[str]] = [[] for _ in self._tasks]
        n = len(self._tasks)
        if is_together:
            try:
                told = [f"{i + 1}: {self._begun(i)}" for i in range(n)]
            except BaseException:  # nobody else knows those that have begun
                with suppress(Exception):
                    _run(self.close())
                raise
            rule = f"Reach all {n} objectives. Begin each action with the number of its objective."
            said = "\n".join([rule, *told])
        else:
            said = self._next()
        self.opening = self._result(said)

    @property
    def over(self) -> bool:
        """True if all objectives are over, or no step is left."""
        return self.steps_left == 0 or not self._going_on()

    async def step(self, action: str) -> StepResult:
        """Do one action in the objective that it is for."""
        if self.over:
            raise after_end("Chain.step", action)
        if self.steps_left is not None:
            self.steps_left -= 1
        i, own = self._meant(action)
        if i is None:
            numbers = ", ".join(str(j + 1) for j in self._going_on())
            return self._result(f"Begin with the number of an objective that goes on: {numbers}.", valid=False)
        self.taken[i].append(own)
        result: StepResult = await awaited(self.episodes[i].step(own))
        self.last[i] = result
        said = f"{i + 1}: {result.reply}" if self._is_together else result.reply
        if result.terminated or result.truncated:
            await self._close(i)
            if self._is_together:
                said = f"{said}\n{i + 1} is over."
            elif i + 1 < len(self._tasks):
                said = f"{said}\n{self._next()}"
        return self._result(said, reward=result.reward / len(self._tasks), valid=result.valid)

    async def close(self) -> None:
        """Close the episodes that are not over yet."""
        async with AsyncExitStack() as stack:  # one that fails keeps no other open
            for i in range(len(self.episodes)):
                stack.push_async_callback(self._close, i)

    async def _close(self, i: int) -> None:
        if i not in self._closed:
            self._closed.add(i)
            await awaited(self.episodes[i].close())

    def _meant(self, action: str) -> tuple[int | None, str]:
        """Return which objective an action is for, and the action there."""
        if not self._is_together:
            return len(self.episodes) - 1, action
        found = _NUMBERED.match(action[:10_000])
        i = int(found[1]) - 1 if found else -1
        return (i, found[2]) if found and i in self._going_on() else (None, "")

    def _begun(self, i: int) -> str:
        task = self._tasks[i]
        episode: Any = self._environment.start(task)
        if inspect.isawaitable(episode):
            episode.close()  # type: ignore[attr-defined]
            raise EnvError(
                "an environment whose start is asynchronous cannot be one of several objectives",
                where="environment.environment",
                got=type(self._environment).__name__,
                expected="one whose `start` is a plain function",
            )
        self.episodes.append(episode)
        self.last.append(episode.opening)
        if self._is_together and episode.opening.seat:
            raise EnvError(
                "a game that is played for several seats cannot be one of several objectives at once",
                where="environment.environment",
                got=type(self._environment).__name__,
                expected="one seat",
                hint="use mode: in_turn",
            )
        return "\n".join([*(message.content for message in task.messages), episode.opening.reply])

    def _next(self) -> str:
        i = len(self.episodes)
        return f"Objective {i + 1} of {len(self._tasks)}. {self._begun(i)}"

    def _going_on(self) -> list[int]:
        return [i for i, result in enumerate(self.last) if not (result.terminated or result.truncated)]

    def _result(self, said: str, *, reward: float = 0.0, valid: bool = True) -> StepResult:
        going_on = self._going_on()
        keys = [result.state_key for result in self.last]
        told = [f"{key}" if i in going_on else f"{key} over" for i, key in enumerate(keys)]
        actions = {
            f"{i + 1} {action}" if self._is_together else action
            for i in going_on
            for action in self.last[i].admissible_actions
        }
        is_whole = len(self.last) == len(self._tasks) and not going_on
        solved = is_whole and all(result.success is True for result in self.last)
        return StepResult(
            said,
            reward=reward,
            terminated=is_whole,
            truncated=self.over and not is_whole,
            state_key=None if None in keys else " | ".join(told),
            success=solved if self.over else None,
            valid=valid,
            admissible_actions=() if self.over else tuple(sorted(actions)),
            seat=self.last[-1].seat,
        )


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine, run in another thread, because this one may have a running event loop."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def plan_of(
    environment: Environment, task: Task, taken: Sequence[str], *, is_together: bool, max_steps: int | None
) -> tuple[str, ...] | None:
    """Give the plans of all objectives after `taken`, one after another.

    None where one of them knows no way, has failed already, or where the steps left are too few. Raises EnvError where
    the environment cannot demonstrate.
    """
    if not isinstance(environment, Oracle) or not can_demonstrate(environment):
        raise EnvError(
            "this environment cannot demonstrate",
            where="Objectives.plan",
            got=type(environment).__name__,
            expected="an environment with a method `plan(task, taken)`",
        )

    async def replayed() -> Chain:
        chain = Chain(environment, task, is_together=is_together, max_steps=max_steps)
        try:
            for action in taken:
                if not chain.over:
                    await chain.step(action)
        finally:
            await chain.close()
        return chain

    chain = _run(replayed())
    actions: list[str] = []
    for i, own in enumerate(tasks_of(task)):
        result = chain.last[i] if i < len(chain.last) else None
        if result is not None and (result.terminated or result.truncated):
            if not result.success:
                return None
            continue
        path = environment.plan(own, chain.taken[i])
        if path is None:
            return None
        actions += [f"{i + 1} {action}" if is_together else action for action in path]
    return None if chain.steps_left is not None and len(actions) > chain.steps_left else tuple(actions)
