"""Contract checker for environments: reports each violated rule and the call that violated it.

    report = check_environment(MyEnvironment())
    print(report)

Nothing is patched and nothing is simulated: episodes are started, played, replayed and closed as a rollout does it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, islice
from typing import Any

import psutil

from environments.base import Capabilities, EpisodeCapabilities, Properties, StepResult, properties_of
from environments.check_splits import kept_apart
from environments.transcript import Transcript, awaited, difference, first_ids, replay_elsewhere
from environments.validation import check_episode, checked_result
from rlhf.data import Task
from rlhf.data.report import ContractChecker, Report, is_frozen, shorten
from rlhf.data.untrusted import defined_at, is_listing, number, text, truth
from rlhf.errors import EnvError

_MOST_TASKS = 100_000
_INLINE_S = 0.005
_N_CLOSED = 6
#: Actions of the episode that is played where none has ended.
_N_PATIENT = 200
_TRIES = ("look", "wait", "yes", "1")  # where an environment does not list its actions
_GARBAGE = ("", " \t\n", "\x00\x1b[2J\x07", "🙂é漢\u202e" * 20, "'; DROP TABLE --", '{"tool": ', "A" * 20_000)


def check_environment(
    environment: Any,
    *,
    n_tasks: int = 3,
    n_drawn: int = 400,
    max_steps: int = 30,
    seed: int = 0,
    other_process: bool = True,
    call_limit_s: float = 60.0,
    enough_s: float = 10.0,
) -> Report:
    """Hold `environment` to the contract of `environments.base` and to the properties it declares.

    Args:
        environment: the object, as a recipe would build it.
        n_tasks: tasks of the first split that are played; of each other split, one.
        n_drawn: tasks of each split whose openings, references and plans are compared with those of the other splits.
        max_steps: longest random episode.
        seed: of the random actions.
        other_process: whether a deterministic environment is also replayed in a process with another hash seed.
        call_limit_s: a call that takes longer has hung; the walk ends there.
        enough_s: after so long, comparisons and replays leave the tasks out that remain, and so do plans once one has
            solved its task.

    Returns:
        one finding per promise; the environment's own exceptions are findings, never raised.
    """
    checker = ContractChecker(f"environment {type(environment).__name__}", call_limit_s)
    check = _EnvironmentCheck(
        checker, environment, n_tasks, n_drawn, max_steps, random.Random(seed), other_process, enough_s
    )
    return checker.run(check.run)


@dataclass
class _EnvironmentCheck:
    checker: ContractChecker
    environment: Any
    n_tasks: int
    n_drawn: int
    max_steps: int
    rng: random.Random
    other_process: bool
    enough_s: float
    step_times_s: list[float] = field(default_factory=list)
    n_ended: int = 0

    async def run(self) -> None:
        copy = await self.settings_object()
        tasks = await self.tasks()
        played = [record for task in tasks if (record := await self.play(task)) is not None]
        for record in played:
            self.openings_and_keys(record)
        self.same_actions(played)
        if not played:
            return
        for action in played[0].results[0].admissible_actions[:10]:
            await self.play(played[0].task, [action])
        await self.garbage(played[0].task)
        await self.replays(played, copy)
        if self.properties.oracle:
            await self.oracle(played)
        await self.closing(played)
        if self.properties.inline:
            self.speed()
        await self.endings(played[0].task)

    @property
    def properties(self) -> Properties:
        return properties_of(self.environment)

    # --- the object and its tasks ------------------------------------------------------------------------------

    async def settings_object(self) -> Any:
        """Frozen, picklable, with properties of the right type. Gives the unpickled copy, or None."""
        note = self.checker.note
        note(is_frozen(self.environment), "class: is a frozen dataclass", "declare it @dataclass(frozen=True)")
        promise = "class: can be pickled"
        ok, stored = await self.checker.call(promise, pickle.dumps, self.environment)
        ok, copy = await self.checker.call(promise, pickle.loads, stored) if ok else (False, None)
        if ok:
            note(type(copy) is type(self.environment), promise, f"came back as {type(copy).__name__}")
        ok, declared = await self.checker.call("properties: can be read", getattr, self.environment, "properties", None)
        if ok and declared is not None:
            note(isinstance(declared, Properties), "properties: is a Properties object", shorten(declared))
        return copy

    async def tasks(self) -> list[Task]:
        """List every split twice and compare. Gives the tasks to play."""
        chosen: list[Task] = []
        contents: dict[str, Mapping[str, str]] = {}
        drawn: dict[str, list[Task]] = {}
        for split in self.properties.splits:
            listed = await self._listed(split)
            if listed is None:
                continue
            self.checker.note(bool(listed), "tasks(): lists at least one task", f"none in split '{split}'")
            ids = [t.id for t in listed]
            twice = next((i for i in ids if ids.count(i) > 1), None) if len(set(ids)) < len(ids) else None
            self.checker.note(twice is None, "tasks(): ids are unique", f"{twice!r} is more than once in '{split}'")
            contents[split], drawn[split] = await self._contents(listed), listed[: self.n_drawn]
            chosen += listed[: self.n_tasks if not chosen else 1]
        promise = "tasks(): no task is in two splits"
        for (one, a), (other, b) in combinations(contents.items(), 2):
            shared = a.keys() & b.keys()
            pair = next(((a[key], b[key]) for key in sorted(shared)), None)
            got = f"{len(shared)} of '{one}' are in '{other}', such as {pair}: same seed, messages, reference and info"
            self.checker.note(not shared, promise, got)
        await kept_apart(self.checker, self.environment, self.start, drawn, self.enough_s)
        return chosen

    async def _listed(self, split: str) -> list[Task] | None:
        lists = []
        for _ in range(2):
            ok, tasks = await self.checker.call("tasks(): raises nothing", self._list, split, during=f"split '{split}'")
            if not ok:
                return None
            odd = (f"{shorten(t)} ({type(t).__name__})" for t in tasks if not isinstance(t, Task))
            strange = next((f"split '{split}': got {one}, expected Task(id=...)" for one in odd), "")
            if not self.checker.note(not strange, "tasks(): gives Task objects", strange):
                return None
            lists.append(tasks)
        first, again = lists
        pairs = zip(first, again, strict=False)
        # By what is written: `==` of NumPy's arrays, which `Task.info` may not hold, is no truth value.
        change = next((f"{a.id!r}, then {b.id!r}" for a, b in pairs if repr(a) != repr(b)), "")
        got = f"split '{split}': {change or f'{len(first)} tasks, then {len(again)}'}"
        is_same = not change and len(first) == len(again)
        self.checker.note(is_same, "tasks(): same tasks in the same order every time", got)
        return list(first)

    def _list(self, split: str) -> list[Task]:
        listed = self.environment.tasks(split)
        if not is_listing(listed):
            got, expected = shorten(listed), "tasks in a list or from a generator"
            place = f"tasks{defined_at(self.environment.tasks)}"
            raise EnvError("the environment lists no tasks", where=place, got=got, expected=expected)
        return list(islice(listed, _MOST_TASKS))

    async def _contents(self, tasks: Sequence[Task]) -> Mapping[str, str]:
        """Map what makes each task the problem it is, apart from its name, to that name."""
        contents: dict[str, str] = {}
        for task in tasks:
            encode = partial(json.dumps, dict(task.info), sort_keys=True)
            _, info = await self.checker.call("Task.info: holds plain JSON values", encode, during=task.id)
            contents[repr((task.seed, task.messages, task.reference, info))] = task.id
        return contents

    # --- playing -----------------------------------------------------------------------------------------------

    async def start(self, task: Task, environment: Any = None) -> Any:
        """Start an episode and look its opening over; None where either fails."""
        maker = self.environment if environment is None else environment
        ok, episode = await self.checker.call("start(): raises nothing", maker.start, task, during=task.id)
        if not ok:
            return None
        try:
            check_episode(episode, maker.start)
        except EnvError as error:
            self.checker.note(False, "start(): gives an episode with step and close", f"{task.id}: {error}")
            return None
        opening = EpisodeCapabilities(episode).opening
        got = f"{task.id}: `opening` is {shorten(opening)}, expected a StepResult{defined_at(maker.start)}"
        if not self.checker.note(
            issubclass(type(opening), StepResult), "start(): gives an episode with an opening", got
        ):
            return None
        return episode if self.look_over(opening, f"{task.id}, opening") else None

    async def step(self, episode: Any, action: str, during: str) -> StepResult | None:
        """Check one timed step; None if it raised or gave something else."""
        begin = time.perf_counter()
        during = f"{during}, action {shorten(action, 40)}"
        ok, result = await self.checker.call("step(): raises nothing", episode.step, action, during=during)
        self.step_times_s.append(time.perf_counter() - begin)
        if not ok or not self.checker.note(
            issubclass(type(result), StepResult),
            "step(): gives a StepResult",
            f"{during}: got {shorten(result)}, expected StepResult(reply, reward=..., terminated=..., success=...)"
            f"{defined_at(episode.step)}",
        ):
            return None
        return self.look_over(result, during)

    async def close(self, episode: Any) -> None:
        await self.checker.call("close(): raises nothing", episode.close)

    def look_over(self, result: Any, during: str) -> StepResult | None:
        """Types, ranges and sizes of one answer; None where a rollout would not take it."""

        def note(ok: bool, promise: str, value: object) -> None:
            self.checker.note(ok, f"StepResult.{promise}", "" if ok else f"{during}: got {shorten(value)}")

        note(text(result.reply) is not None, "reply: is text", result.reply)
        note(number(result.reward) is not None, "reward: is a finite number", result.reward)
        for name in ("terminated", "truncated", "valid"):
            note(truth(getattr(result, name)) is not None, f"{name}: is a bool", getattr(result, name))
        is_text = result.state_key is None or text(result.state_key) is not None
        note(is_text, "state_key: is text or None", result.state_key)
        actions = result.admissible_actions
        tidy = type(actions) is tuple and all(type(a) is str for a in actions)
        tidy = tidy and list(actions) == sorted(set(actions))
        note(tidy, "admissible_actions: a tuple of texts, sorted, each once", actions)
        try:
            checked = checked_result(result, during)
        except EnvError as error:
            self.checker.note(False, "StepResult: is one that a rollout takes", str(error))
            return None
        if checked.terminated or checked.truncated:
            note(checked.success is not None, "success: True or False at the end", checked.success)
        else:
            note(checked.success is not False, "success: None before the end, or True", checked.success)
        return checked

    async def play(
        self, task: Task, actions: Sequence[str] | None = None, environment: Any = None, until: float = math.inf
    ) -> Transcript | None:
        """Play `actions`, or at random until that time; the transcript ends early where a step fails."""
        episode = await self.start(task, environment)
        if episode is None:
            return None
        done, most = Transcript(task, (), (episode.opening,)), self.max_steps if actions is None else len(actions)
        while not done.over and len(done.actions) < most and time.monotonic() < until:
            i, listed = len(done.actions), done.results[-1].admissible_actions
            action = self.rng.choice(listed or _TRIES) if actions is None else actions[i]
            result = await self.step(episode, action, f"{task.id}, step {i}")
            if result is None:
                break
            if action in listed:
                promise, got = "step(): understands every admissible action", f"{task.id}, step {i}: {action!r}"
                self.checker.note(result.valid, promise, got)
            done = Transcript(task, (*done.actions, action), (*done.results, result))
        self.n_ended += done.over
        await self.close(episode)
        return done

    async def endings(self, task: Task) -> None:
        """Caution for an environment in which no episode has ended, after one more that is played to its limit."""
        if self.n_ended:
            return
        self.max_steps = max(self.max_steps, Capabilities(self.environment).max_steps or _N_PATIENT)
        until = time.monotonic() + self.enough_s
        record = await self.play(task, until=until)
        if record is None or record.over:
            return
        if len(record.actions) == self.max_steps or time.monotonic() >= until:  # and not by a step that failed
            self.checker.caution(
                "step(): no episode ended",
                f"{task.id}: none terminated, the longest after {len(record.actions)} random actions: return "
                "terminated=True, with success, when the task is won or lost; otherwise every attempt runs to "
                "limits.max_turns and counts as unsolved",
            )

    # --- promises about transcripts ----------------------------------------------------------------------------

    def same_actions(self, played: Sequence[Transcript]) -> None:
        """Compare what is possible in states of one task that have the same key."""
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for record in played:
            for result in record.results:
                if result.state_key is None or result.terminated or result.truncated:
                    continue
                here, key = result.admissible_actions, (record.task.id, result.state_key)
                there = found.setdefault(key, here)
                got = f"{record.task.id}: {shorten(result.state_key)} has {shorten(there)}, then {shorten(here)}"
                self.checker.note(here == there, "state_key: equal states have equal actions", got)

    def openings_and_keys(self, record: Transcript) -> None:
        opening = record.results[0]
        self.checker.note(bool(opening.reply), "opening: says something", record.task.id)
        over = opening.terminated or opening.truncated
        self.checker.note(not over, "opening: the episode is not over yet", record.task.id)
        keys = {r.state_key for r in record.results[:-1]}
        replies = {r.reply for r in record.results[:-1]}
        if keys - {None}:
            got = f"{record.task.id}: {len(replies)} different replies, always {shorten(next(iter(keys)))}"
            self.checker.note(len(keys) > 1 or len(replies) <= 2, "state_key: tells states apart", got)

    async def garbage(self, task: Task) -> None:
        """Text that no one meant as an action."""
        episode = await self.start(task)
        for said in _GARBAGE:
            if episode is None:
                return
            result = await self.step(episode, said, f"{task.id}, garbage")
            if result is not None and episode.opening.admissible_actions:
                got = f"{task.id}: {shorten(said)} counts as understood, answered by {shorten(result.reply)}"
                self.checker.note(not result.valid, "step(): garbage is not valid", f"{got}: give it valid=False")
            if result is None or result.terminated or result.truncated:
                await self.close(episode)
                episode = await self.start(task)
        await self.close(episode)

    async def replays(self, played: Sequence[Transcript], copy: Any) -> None:
        """Replay the actions on a pickled copy, half in a new episode, and in another process."""
        deterministic, replayable = self.properties.deterministic, self.properties.replayable
        until = time.monotonic() + self.enough_s
        for i, record in enumerate(played):
            if i and time.monotonic() > until:
                break
            if deterministic:
                change = difference(record, await self.play(record.task, record.actions, copy))
                self.checker.note(not change, "deterministic: same actions, same transcript", change)
            if replayable:
                half = record.actions[: len(record.actions) // 2]
                change = difference(record, await self.play(record.task, half), len(half))
                self.checker.note(not change, "replayable: same actions, same state", change)
        if deterministic and self.other_process and copy is not None:
            promise = "deterministic: same transcript and task ids in another process"
            limit_s = 0.9 * self.checker.call_limit_s
            ok, answer = await self.checker.call(promise, replay_elsewhere, self.environment, played[0], limit_s)
            if ok:
                again, ids = answer
                here = first_ids(self.environment)
                change = difference(played[0], again)
                renamed = next((f"task id {a!r}, then {b!r}" for a, b in zip(here, ids, strict=False) if a != b), "")
                self.checker.note(not change and here == ids, promise, change or renamed)

    # --- the oracle --------------------------------------------------------------------------------------------

    async def oracle(self, played: Sequence[Transcript]) -> None:
        """Check that plans from the opening and after random actions solve the task, where there are any."""
        promise, got = "oracle: has a method plan(task, taken)", "oracle is declared, `plan` is missing"
        if not self.checker.note(Capabilities(self.environment).plan is not None, promise, got):
            return
        n_solved, asked = 0, list[Task]()
        until = time.monotonic() + self.enough_s
        for record in played:
            if n_solved and time.monotonic() > until:
                break
            asked.append(record.task)
            n_solved += await self._plan_solves(record.task, ())
            await self._plan_solves(record.task, record.actions[: min(3, len(record.actions) - record.over)])
        seen = f"{n_solved} of {len(asked)} tasks"
        # Where rewards alone say what is solved, a task without a reference, or with one of several parts, has no plan.
        may_know = any(t.reference is not None and not t.info.get("structured") for t in asked)
        if may_know or not self.properties.judged_by_rewards:
            self.checker.note(n_solved > 0, "plan(): knows a way for some task", seen, seen=seen)

    async def _plan_solves(self, task: Task, taken: Sequence[str]) -> bool:
        during = f"{task.id} after {shorten(taken)}"
        ok, path = await self.checker.call("plan(): raises nothing", self.environment.plan, task, taken, during=during)
        if not ok or path is None:
            return False
        texts = isinstance(path, Sequence) and not isinstance(path, str) and all(isinstance(a, str) for a in path)
        if not self.checker.note(texts, "plan(): gives a sequence of actions", f"{during}: {shorten(path)}"):
            return False
        record = await self.play(task, [*taken, *path])
        solved = record is not None and record.solved
        return self.checker.note(solved, "plan(): solves the task", f"{during}: {shorten(path)} does not")

    # --- closing and speed -------------------------------------------------------------------------------------

    async def closing(self, played: Sequence[Transcript]) -> None:
        """Close twice, close after a step too many, and count what stays open over several episodes."""
        before: dict[str, set[Any]] = {}
        for i in range(_N_CLOSED + 1):
            record = played[i % len(played)]
            episode = await self.start(record.task)
            if episode is None:
                return
            for action in record.actions if record.over else record.actions[:1]:
                await self.step(episode, action, record.task.id)
            if record.over:
                with suppress(Exception):  # a step too many may raise; closing afterwards may not
                    await awaited(episode.step("look"))
            await self.close(episode)
            await self.checker.call("close(): may be called twice", episode.close)
            # What the first episode opened may be shared and stay open; what every further one leaves is a leak.
            before = before or _held_open()
        for what, held in _held_open().items():
            more = len(held - before[what])
            got = f"{more} more {what} after {_N_CLOSED} closed episodes"
            self.checker.note(more < _N_CLOSED, f"close(): frees {what}", got)

    def speed(self) -> None:
        median_s = statistics.median(self.step_times_s)
        seen = f"median {median_s * 1e3:.3g} ms over {len(self.step_times_s)} steps"
        self.checker.note(median_s < _INLINE_S, f"inline: a step takes under {_INLINE_S * 1e3:g} ms", seen, seen=seen)


def _held_open() -> dict[str, set[Any]]:
    """Open threads, child processes and file descriptors of this process; as sets, since others may end meanwhile."""
    gc.collect()
    return {
        "threads": set(threading.enumerate()),
        "child processes": set(psutil.Process().children(recursive=True)),
        "file descriptors": set(os.listdir("/dev/fd")),
    }
