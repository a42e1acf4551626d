"""Contamination check of an environment's splits: tasks told the same at first and solved by the same."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any

from environments.base import properties_of
from rlhf.data import Task
from rlhf.data.report import ContractChecker

_PROMISE = "tasks(): what is told first and what solves it are of one split"


async def kept_apart(
    checker: ContractChecker,
    environment: Any,
    start: Callable[[Task], Awaitable[Any]],
    drawn: Mapping[str, Sequence[Task]],
    enough_s: float,
) -> None:
    """Compare opening, reference and plan of the tasks of different splits, and note what is found.

    Nothing is noted where nothing says what solves a task: it has no reference, and the environment no oracle.

    Args:
        checker: takes the findings.
        environment: may plan.
        start: begins an episode; gives None where that failed.
        drawn: tasks of each split, of which as many of one as of another are looked at.
        enough_s: after so long, the rest is left out.
    """
    begin, told = time.monotonic(), {split: dict[str, str]() for split in drawn}
    for tasks in zip_longest(*([(split, task) for task in tasks] for split, tasks in drawn.items())):
        for split, task in filter(None, tasks):
            key = await _told(checker, environment, start, task)
            if key:
                told[split].setdefault(key, task.id)
        if time.monotonic() - begin > enough_s:
            break
    if not any(told.values()):
        return
    for (one, a), (other, b) in combinations(told.items(), 2):
        shared = sorted(a.keys() & b.keys())
        pair = next(((a[key], b[key]) for key in shared), None)
        got = (
            f"{len(shared)} of {len(a)} different tasks of '{one}' are among {len(b)} of '{other}', such as {pair}: "
            "same opening, reference and plan; let a hash of these choose the split, or declare Properties.repeats"
        )
        checker.note(not shared or properties_of(environment).repeats, _PROMISE, got)


async def _told(checker: ContractChecker, environment: Any, start: Callable[[Task], Awaitable[Any]], task: Task) -> str:
    """Opening observation and solution of a task; empty where no solution is declared."""
    plan = None
    if properties_of(environment).oracle:
        _, plan = await checker.call("plan(): raises nothing", environment.plan, task, (), during=task.id)
    episode = await start(task) if plan is not None or task.reference is not None else None
    if episode is None:
        return ""
    await checker.call("close(): raises nothing", episode.close)
    return repr((task.messages, episode.opening.reply, task.reference, plan if plan is None else tuple(plan)))
