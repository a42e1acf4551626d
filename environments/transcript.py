"""The transcript of a played episode: compare two, and replay one in another process."""

from __future__ import annotations

import inspect
import pickle
import tempfile
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from environments.base import StepResult, properties_of
from environments.workers.protocol import packed, unpacked
from rlhf.child_process import complaint, run_python
from rlhf.data import Task
from rlhf.data.report import shorten

_N_IDS = 200


@dataclass(frozen=True, slots=True)
class Transcript:
    """Actions and answers of one episode.

    Attributes:
        task: what was attempted.
        actions: `[K]` in order.
        results: `[K + 1]` the opening, then the answer to each action.
    """

    task: Task
    actions: tuple[str, ...]
    results: tuple[StepResult, ...]

    @property
    def over(self) -> bool:
        """True if the environment has ended the episode."""
        return self.results[-1].terminated or self.results[-1].truncated

    @property
    def solved(self) -> bool:
        """True if the environment calls it solved."""
        return self.results[-1].success is True


def difference(one: Transcript, other: Transcript | None, n_actions: int | None = None) -> str:
    """Describe the first difference within `n_actions` (by default all of `one`), or return an empty string."""
    n = (len(one.actions) if n_actions is None else n_actions) + 1
    n_answered = 0 if other is None else len(other.results) - 1
    for i in range(min(n, n_answered + 1)):
        assert other is not None
        for field in fields(StepResult):
            a, b = getattr(one.results[i], field.name), getattr(other.results[i], field.name)
            if a != b:
                return f"{one.task.id} after {shorten(one.actions[:i])}: {field.name} {shorten(a)}, then {shorten(b)}"
    if n_answered + 1 < n:
        return f"{one.task.id}: {n - 1} steps were answered, then {n_answered}"
    return ""


def replay_elsewhere(environment: Any, transcript: Transcript, limit_s: float) -> tuple[Transcript, list[str]]:
    """Play the actions of `transcript` in a new Python process with another hash seed.

    Returns:
        what that process saw, and the first task ids of each split there.

    Raises:
        RuntimeError: the environment cannot be used there; the message is the process's own.
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(packed(environment, transcript.task, transcript.actions))
        code = f"from environments.transcript import answer_job; answer_job({folder!r})"
        done = run_python(code, limit_s, PYTHONHASHSEED="4321")
        if done.returncode != 0:
            raise RuntimeError(complaint(done))
        results, ids = pickle.loads(Path(folder, "answer").read_bytes())
    return Transcript(transcript.task, transcript.actions[: len(results) - 1], results), ids


def first_ids(environment: Any) -> list[str]:
    """Return the first task ids of every split."""
    splits = properties_of(environment).splits
    return [task.id for split in splits for task in islice(environment.tasks(split), _N_IDS)]


def answer_job(folder: str) -> None:
    """Do in this process what `replay_elsewhere` asks, and leave the answer in `folder`."""
    import asyncio

    environment, task, actions = unpacked(Path(folder, "job").read_bytes())
    answer = (asyncio.run(_play(environment, task, actions)), first_ids(environment))
    Path(folder, "answer").write_bytes(pickle.dumps(answer))


async def _play(environment: Any, task: Task, actions: tuple[str, ...]) -> tuple[StepResult, ...]:
    episode = await awaited(environment.start(task))
    results = [episode.opening]
    for action in actions:
        results.append(await awaited(episode.step(action)))
    await awaited(episode.close())
    return tuple(results)


async def awaited(value: Any) -> Any:
    """Await `value` if it can be awaited; episodes of others may be synchronous."""
    return await value if inspect.isawaitable(value) else value
