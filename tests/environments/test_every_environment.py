"""Every environment of the catalogue, held to the contract; a new kind is picked up by itself.

A kind whose package is not installed is skipped and says so. The long version of each test is marked `extended`. The
short ones keep to the same first tasks: some packages take seconds to make one.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.base import StepResult, can_demonstrate, properties_of
from environments.check import check_environment
from environments.transcript import Transcript, awaited, difference, first_ids, replay_elsewhere
from environments.workers.pool import Processes
from rlhf.catalog import CATALOG
from rlhf.data import Task
from rlhf.errors import MissingPackageError
from rlhf.recipe.builder import build_environment
from rlhf.rollout.env_session import checked
from tests.test_catalog import NEEDED, SERVERS
from tests.tiers import tiered

ROOT = Path(__file__).resolve().parents[2]
KINDS = sorted(kind for kind in CATALOG["environment"] if kind not in SERVERS)
#: Keys beside those that a kind needs, where its defaults take minutes to demonstrate.
QUICK = {"scienceworld": {"task": "find-plant"}}
#: Kinds whose tasks can be listed without a module that takes minutes to compile, and that CI does without.
TO_PLAY = {"alfworld": "fast_downward"}
#: Kinds that play with a program which CI does without.
PROGRAM = {"miniwob": "chromedriver"}
#: Kinds that play also in a worker process in the short version: one of a package, one of our own.
IN_WORKER = {"babyai", "keyhole"}
#: Kinds that take seconds for whatever they do, and have short tests of their own.
SLOW = {"scienceworld"}
#: Kinds whose check takes half a minute or more.
LONG_CHECK = {"minihack", "textworld"}
#: Strings of all kinds together, in the long version.
N_STRINGS = 100_000
#: Of the first split, tasks that are looked at.
MOST_TASKS = 20_000


@pytest.fixture(scope="module", params=tiered(KINDS, *(kind for kind in KINDS if kind not in SLOW)))
def environment(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One kind, as a recipe builds it; those that ask for worker processes have them."""
    needed = NEEDED.get(("environment", request.param), {})
    settings = {"kind": request.param, **needed, **QUICK.get(request.param, {})}
    try:
        made = build_environment(settings, "environment", base=ROOT)
        first_ids(made)
    except MissingPackageError as error:
        pytest.skip(f"{request.param}: {error.got}; {error.hint}")
    if (program := PROGRAM.get(request.param)) is not None and shutil.which(program) is None:
        pytest.skip(f"{request.param}: no {program}; see docs/environments/{request.param}.md")
    if request.param in TO_PLAY:
        pytest.importorskip(TO_PLAY[request.param], reason=f"see docs/environments/{request.param}.md")
    yield made
    if isinstance(made, Processes):
        made.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Name of the kind of `environment`."""
    found: str = request.node.callspec.params["environment"]
    return found


def tasks(environment: Any, n: int, split: int = 0) -> list[Task]:
    return list(islice(environment.tasks(properties_of(environment).splits[split]), n))


async def played(
    environment: Any, task: Task, n_steps: int, rng: random.Random, actions: Sequence[str] | None = None
) -> Transcript:
    """Play `actions`, or at random."""
    episode = await awaited(environment.start(task))
    try:
        done = Transcript(task, (), (episode.opening,))
        while not done.over and len(done.actions) < (n_steps if actions is None else len(actions)):
            listed = done.results[-1].admissible_actions or ("look", "yes", "1")
            action = rng.choice(listed) if actions is None else actions[len(done.actions)]
            result = checked(await awaited(episode.step(action)), "step")
            done = Transcript(task, (*done.actions, action), (*done.results, result))
        return done
    finally:
        await awaited(episode.close())


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        return await work()

    return asyncio.run(body())


# --- replays ---------------------------------------------------------------------------------------------------------


def replays(environment: Any, n_tasks: int, n_steps: int, other: Any) -> None:
    """Transcripts of random play are the same here again, and in `other`."""
    if not properties_of(environment).deterministic:
        pytest.skip("it does not promise to be deterministic")

    async def twice() -> list[str]:
        changes = []
        for i, task in enumerate(tasks(environment, n_tasks)):
            first = await played(environment, task, n_steps, random.Random(i))
            for again in (environment, other):
                changes.append(difference(first, await played(again, task, 0, random.Random(i), first.actions)))
        return list(filter(None, changes))

    assert run(twice) == []


def test_a_replay_gives_the_same_transcript(environment: Any, kind: str) -> None:
    # Workers have a fixed hash seed, these tests have one at random. What is served already is compared with itself.
    other = Processes(environment=environment, n_workers=1) if kind in IN_WORKER else environment
    try:
        replays(environment, 2, 8, other)
        assert first_ids(other) == first_ids(environment)
    finally:
        if other is not environment:
            other.close()


@pytest.mark.extended
def test_long_replays_give_the_same_transcripts_also_in_processes_of_other_hash_seeds(environment: Any) -> None:
    replays(environment, 20, 60, environment)
    for i, task in enumerate(tasks(environment, 3)):
        first = run(lambda task=task, i=i: played(environment, task, 60, random.Random(i)))
        again, ids = replay_elsewhere(environment, first, 600)
        assert difference(first, again) == "" and ids == first_ids(environment)


# --- tasks and the oracle --------------------------------------------------------------------------------------------


def test_no_task_is_in_two_splits_or_twice_in_one(environment: Any) -> None:
    splits = properties_of(environment).splits
    ids = {split: [task.id for task in islice(environment.tasks(split), MOST_TASKS)] for split in splits}
    assert all(ids.values()) and all(len(set(found)) == len(found) for found in ids.values())
    for one, other in combinations(splits, 2):
        assert not set(ids[one]) & set(ids[other]), f"{one} and {other}"


def solves(environment: Any, n_tasks: int) -> None:
    """What the oracle plans solves the task, and it knows a way in half of the first tasks."""
    if not properties_of(environment).oracle:
        pytest.skip("it has no oracle")
    assert can_demonstrate(environment)

    async def solved() -> list[bool]:
        found = []
        for task in tasks(environment, n_tasks):
            if plan := await awaited(environment.plan(task, ())):
                done = await played(environment, task, 0, random.Random(), plan)
                assert done.solved, f"{task.id}: {plan}"
            found.append(bool(plan))
        return found

    found = run(solved)
    assert sum(found) >= len(found) / 2


def test_the_oracle_solves_a_few(environment: Any) -> None:
    solves(environment, 2)


@pytest.mark.extended
def test_the_oracle_solves_many(environment: Any) -> None:
    solves(environment, 50)


# --- what an agent may say -------------------------------------------------------------------------------------------

_ODD = (
    "",
    " ",
    "\n",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "\ufeff",
    "🙂",
    "%s%n",
    "{0}",
    "'; --",
    "../",
    "$(id)",
    "[[1",
    "{",
    "A" * 999,
)


def hostile(rng: random.Random, known: Sequence[str]) -> str:
    """A text of odd pieces, any characters, and of what would be understood, cut and doubled."""
    pieces = []
    for _ in range(rng.randint(0, 4)):
        match rng.randrange(4):
            case 0:
                pieces.append(rng.choice(_ODD))
            case 1 if known:
                action = rng.choice(known)
                pieces.append(action[: rng.randint(0, len(action))] * rng.randint(1, 3))
            case 2:
                pieces.append(" ".join(rng.choices(("go", "take", "the", "1", "-1", "1e99", "all", "{}", "()"), k=3)))
            case _:
                ranges = ((0, 0x80), (0x80, 0xD800), (0xE000, 0x110000))
                pieces.append("".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 9))))
    return rng.choice(("", " ")).join(pieces)


def withstands(environment: Any, n_strings: int, seed: int, most_s: float = float("inf")) -> None:
    """Hostile texts are answered in the form of the contract, and never raise; as many as fit into the time."""
    until = time.monotonic() + most_s
    rng, start = random.Random(seed), tasks(environment, 2)

    async def bombard() -> None:
        episode: Any = None
        now = StepResult("", truncated=True)
        try:
            for i in range(n_strings):
                if i >= 20 and time.monotonic() > until:
                    break
                if now.terminated or now.truncated:
                    if episode is not None:
                        await awaited(episode.close())
                    episode = await awaited(environment.start(rng.choice(start)))
                    now = checked(episode.opening, "opening")
                text = hostile(rng, now.admissible_actions)
                try:
                    now = checked(await awaited(episode.step(text)), "step")
                except Exception as error:
                    raise AssertionError(f"{text!r} raised {error!r}") from error
                now.reply.encode()  # it can be stored and shown
        finally:
            if episode is not None:
                await awaited(episode.close())

    run(bombard)


def test_hostile_texts_never_crash_it(environment: Any) -> None:
    withstands(environment, 150, seed=0, most_s=2)


@pytest.mark.extended
def test_very_many_hostile_texts_never_crash_it(environment: Any) -> None:
    withstands(environment, N_STRINGS // len(KINDS) + 1, seed=1)


# --- what is left over -----------------------------------------------------------------------------------------------


def held() -> dict[str, int]:
    """What this process holds open."""
    gc.collect()
    process = psutil.Process()
    return {
        "threads": threading.active_count(),
        "processes": len(process.children(recursive=True)),
        "descriptors": process.num_fds(),
    }


def memory_mb() -> tuple[float, float]:
    """Resident memory of this process, and of its children."""
    gc.collect()
    process = psutil.Process()
    children = sum(child.memory_info().rss for child in process.children(recursive=True))
    return process.memory_info().rss / 2**20, children / 2**20


def leaves_nothing(
    environment: Any, n_warm: int, n: int, most_mb: float, most_mb_of_children: float, n_steps: int = 6
) -> None:
    """After the first few episodes, which may open what all share, further ones leave nothing and take no memory.

    Java machines among the children take what their heaps may have before they tidy up.
    """
    several = tasks(environment, 2)

    async def episodes(count: int) -> None:
        for i in range(count):
            await played(environment, several[i % len(several)], n_steps, random.Random(i))

    run(lambda: episodes(n_warm))
    before, (own, children) = held(), memory_mb()
    run(lambda: episodes(n))
    # Other tests of this process may still be tidying up: what leaks, leaks in every fourth episode at least.
    assert all(after < before[what] + n / 4 for what, after in held().items()), (before, held())
    own_after, children_after = memory_mb()
    assert own_after - own < most_mb and children_after - children < most_mb_of_children


def test_episodes_leave_nothing_open_and_no_memory(environment: Any) -> None:
    leaves_nothing(environment, 6, 12, 16, 600, n_steps=2)


@pytest.mark.extended
def test_a_thousand_episodes_leave_nothing_open_and_no_memory(environment: Any) -> None:
    leaves_nothing(environment, 100, 1000, 48, 600)


# --- all of it -------------------------------------------------------------------------------------------------------


def clean(environment: Any, **how: Any) -> None:
    report = check_environment(environment, call_limit_s=600, **how)
    # How long a step takes depends on what else this machine does: `benchmarks/environment_speed.py` measures it.
    assert [(f.promise, f.detail) for f in report.findings if not f.ok and not f.promise.startswith("inline")] == []


def test_the_check_is_clean(environment: Any, kind: str) -> None:
    if kind in LONG_CHECK:
        pytest.skip("the whole check, which is extended, holds it")
    # The other process is left to the replays above, most comparisons of splits to test_splits.py.
    clean(environment, n_tasks=1, n_drawn=20, max_steps=6, other_process=False, enough_s=2)


@pytest.mark.extended
def test_the_whole_check_is_clean(environment: Any) -> None:
    clean(environment, n_tasks=10, max_steps=60, enough_s=600)
