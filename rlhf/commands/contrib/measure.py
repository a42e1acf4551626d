"""Measurements of an environment in a process of its own: chance, oracle, speed, memory.

A fresh process, so that neither packages that are loaded already nor other environments are counted.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.child_process import complaint, run_python
from rlhf.data import Task
from rlhf.errors import EnvError, boundary

#: An episode that the environment does not end is cut after so many steps.
MOST_STEPS = 1000

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes of one kind of player.

    Attributes:
        tasks: `[N]` ids of their tasks.
        solved: `[N]` whether they were solved.
        score: mean of the sums of their rewards.
        n_steps: of all of them.
        speed: steps per second, the median of the episodes: other work on the machine disturbs some of them. 0 where
            none took a step.
    """

    tasks: tuple[str, ...]
    solved: tuple[bool, ...]
    score: float
    n_steps: int
    speed: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one environment.

    Attributes:
        random: uniformly random admissible actions; None where none are listed.
        oracle: its own plans; None where it has none.
        startup_s: until the first opening, from the moment that the process begins to build the environment.
        memory_mb: most that the process took, with the processes it started, in 2^20 bytes.
    """

    random: Played | None
    oracle: Played | None
    startup_s: float
    memory_mb: float


def measured(values: Mapping[str, Any], split: str, n: int, *, limit_s: float = 600.0) -> Measured:
    """Play `n` random episodes on the first tasks of a split, cycling if fewer, and one oracle episode on each.

    Args:
        values: the environment, as a recipe writes it.
        split: of its tasks.
        n: random episodes, and most of the oracle's, at least 1.
        limit_s: for all of it.

    Raises:
        RlhfError: what the environment raised; EnvError where its process ended or took too long.
    """
    where = f"{values['kind']}, measured in a process of its own"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((dict(values), split, n)))
        code = f"from rlhf.commands.contrib.measure import answer_job; answer_job({folder!r})"
        try:
            done = run_python(code, limit_s)
        except subprocess.TimeoutExpired as error:
            hint = "play fewer episodes: --measure 1"
            raise EnvError("this takes too long", where=where, got=f"{limit_s:.0f} s", hint=hint) from error
        if not Path(folder, "answer").is_file():
            raise EnvError("the process ended", where=where, got=complaint(done), hint="run `rlhf check environment`")
        answer = pickle.loads(Path(folder, "answer").read_bytes())
    if isinstance(answer, Exception):
        raise answer
    found: Measured = answer
    return found


def answer_job(folder: str) -> None:
    """Do in this process what `measured` asks, and leave the answer, or the error, in `folder`."""
    from rlhf.errors import RlhfError

    values, split, n = pickle.loads(Path(folder, "job").read_bytes())
    try:
        answer: Any = asyncio.run(_measured(values, split, n))
    except RlhfError as error:
        answer = error
    Path(folder, "answer.part").write_bytes(pickle.dumps(answer))
    Path(folder, "answer.part").rename(Path(folder, "answer"))


async def _measured(values: Mapping[str, Any], split: str, n: int) -> Measured:
    from environments.base import Capabilities, can_demonstrate
    from environments.transcript import awaited
    from rlhf.recipe.builder import build_environment
    from rlhf.rollout.tasks import tasks_of

    begin = time.perf_counter()
    environment = build_environment(dict(values), "environment", base=Path.cwd())
    try:
        tasks = tasks_of(environment, split, n)
        with boundary(EnvError, f"{values['kind']}.start", "run `rlhf check environment`"):
            first = await awaited(environment.start(tasks[0]))
            startup_s, lists = time.perf_counter() - begin, bool(first.opening.admissible_actions)
            await awaited(first.close())
            cycled = [tasks[i % len(tasks)] for i in range(n)]
            chance = await _played(environment, cycled, None) if lists else None
            oracle = None
            if can_demonstrate(environment):
                oracle = await _played(environment, tasks, [tuple(environment.plan(t, []) or ()) for t in tasks])
        return Measured(chance, oracle, startup_s, _memory_mb())
    finally:
        Capabilities(environment).close()


async def _played(environment: Any, tasks: Sequence[Task], plans: Sequence[Sequence[str]] | None) -> Played:
    """Episodes of `plans`, or without them of chance, drawn by the seed of the task and how often it was played."""
    from environments.transcript import awaited

    n_steps, score, solved, speeds = 0, 0.0, list[bool](), list[float]()
    rounds = Counter[str]()
    for i, task in enumerate(tasks):
        again, rounds[task.id] = rounds[task.id], rounds[task.id] + 1
        draw = random.Random(f"{task.seed}/{again}" if again else task.seed)
        episode = await awaited(environment.start(task))
        result, plan = episode.opening, iter(plans[i]) if plans is not None else None
        n, seconds = 0, 0.0
        for _ in range(MOST_STEPS):
            action = next(plan, None) if plan is not None else _drawn(draw, result.admissible_actions)
            if action is None or result.terminated or result.truncated:
                break
            begin = time.perf_counter()
            result = await awaited(episode.step(action))
            seconds += time.perf_counter() - begin
            n, score = n + 1, score + result.reward
        solved.append(result.success is True)
        n_steps += n
        speeds += [n / seconds] if n else []
        await awaited(episode.close())
    names = tuple(task.id for task in tasks)
    return Played(names, tuple(solved), score / len(tasks), n_steps, statistics.median(speeds or [0.0]))


def _drawn(draw: random.Random, actions: Sequence[str]) -> str | None:
    return draw.choice(actions) if actions else None


def _memory_mb() -> float:
    """Peaks of this process and of those it has started."""
    import psutil

    children = sum(_peaks(str(child.pid) for child in psutil.Process().children(recursive=True)))
    # The peak that `getrusage` gives begins with that of the process which started this one.
    own = next(_peaks(["self"]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**20)
    return own + children


def _peaks(processes: Any) -> Iterator[float]:
    for name in processes:
        try:
            lines = Path("/proc", name, "status").read_text().splitlines()
        except OSError:  # it has ended, or the system has no such files
            continue
        yield from (int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
