"""An environment that does in its process whatever an action says, for tests of worker processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from environments.base import Properties, StepResult
from rlhf.data import Task
from rlhf.errors import MissingPackageError

KEPT: list[bytes] = []  # what "leak" leaves behind


@dataclass(frozen=True)
class Troubled:
    """Answers an action with the number of actions so far, unless the action is trouble."""

    thread_safe: bool = True
    isolated: bool = False
    n_tasks: int = 50
    begins: str = ""
    max_steps: int = 9
    plan_s: float = 0.0

    @property
    def properties(self) -> Properties:
        return Properties(True, True, self.thread_safe, oracle=True, isolated=self.isolated, package="troubled 1")

    def tasks(self, split: str) -> Any:
        if split not in ("train", "test"):
            raise ValueError(f"no split {split}")
        return islice((Task(f"troubled/{split}/{i}", seed=i) for i in count()), self.n_tasks)

    def start(self, task: Task) -> Episode:
        trouble(self.begins)
        return Episode(task.seed)

    def plan(self, task: Task, taken: Sequence[str]) -> list[str]:
        trouble(taken[-1] if taken else "")
        time.sleep(self.plan_s)
        return ["win"]

    def recall(self, task: Task, taken: Sequence[str]) -> str:
        return f"{len(taken)} actions, in process {os.getpid()}"


class Episode:
    def __init__(self, seed: int) -> None:
        self.n, self.opening = 0, StepResult(f"{os.getpid()} {seed} {hash('a text')}")

    async def step(self, action: str) -> Any:
        if action == "wait":
            await asyncio.sleep(0.01)
        elif action == "work":
            self.task = asyncio.get_running_loop().create_task(asyncio.sleep(0.01, "worked"))
        elif action == "worked":
            return StepResult(await self.task)
        found = trouble(action)
        self.n += 1
        over = action == "win"
        return StepResult(str(self.n), float(over), over, success=over or None) if found is None else found

    async def close(self) -> None:
        pass


def trouble(action: str) -> Any:  # noqa: C901  one case per trouble
    """Do it."""
    match action:
        case "raise":
            raise RuntimeError("the lamp fell over")
        case "need":
            raise MissingPackageError("a package is not installed", where="here", hint="pip install lamps")
        case "exit":
            print("the last words", flush=True)
            os._exit(3)
        case "leave":
            sys.exit(4)
        case "crash":
            ctypes.string_at(0)
        case "hang":
            time.sleep(60)
        case "spin":
            while True:
                pass
        case "eat":
            while True:
                KEPT.append(b"x" * (1 << 23))
        case "huge":
            KEPT.append(bytes(1 << 42))
        case "leak":
            KEPT.append(b"x" * (96 << 20))
        case "print":
            print("rlhf garbage " * 10_000)
            os.write(1, os.urandom(100_000))
        case "nonsense":
            os.write(int(sys.argv[1]), b"what a package prints where it should not")  # the channel to the parent
        case "foreign answer":
            return {"reply": "no result"}
        case "unpicklable answer":
            return StepResult("fine", lambda: 0)  # type: ignore[arg-type]
        case "child":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return StepResult(str(child.pid))
    return None
