"""Steps per second of each environment of the catalogue: by itself, as a rollout calls it, and through all cores.

    OMP_NUM_THREADS=1 python benchmarks/environment_speed.py [--json] [--seconds 2] [--repeats 3] [--kinds babyai]
                                                             [--at-once 8] [--in-workers]

A rollout calls an environment as it declares: on its event loop, in threads, or in worker processes, here in one and in
one per core. `--in-workers` puts all kinds into workers.

Random admissible actions on the first task of the first split, episodes of at most 30 steps; starts and closes count.
All ways play the very same episodes, as many as take the environment by itself the given seconds, and take turns, so
that a busy neighbour slows all of them. A worker has as many episodes under way as it takes at a time, which is what a
rollout gives it, or as many as are asked for; the environment by itself plays one after another, and once more as many
in turn, which is slower where they do not fit into a cache together. With one worker, what a step costs there on the
processor is compared with what it costs the environment by itself, for a crowded machine gives two processes another
share of its time than one. What a step costs when nothing else is under way to hide the journey is said apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from environments.base import max_concurrent_episodes, properties_of
from environments.transcript import awaited
from environments.workers.pool import Processes
from rlhf.catalog import CATALOG
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.recipe.builder import build_part
from rlhf.rollout.episode import executor_for
from rlhf.rollout.executors import CallExecutor

#: Keys that a kind cannot do without, or that make it the size of a recipe.
KEYS: Mapping[str, Mapping[str, Any]] = {
    "textworld_express": {"game": "twc"},
    "babyai": {"level": "GoToLocal"},
}
#: Kinds that are others in another coat.
WRAPPERS = ("graded", "mixed", "worker_processes")
MAX_STEPS = 30
#: What is written where nothing is listed.
WRITTEN = {"TextToSql": ("SELECT 1", "SELECT name FROM sqlite_master", "VALUES (1, 2), (3, 4)")}
#: Where every step waits for its journey, as few episodes are played as one in so many.
ALONE_OF = 16
#: Episodes under way in threads.
IN_THREADS = 32
#: What a call of a rollout may take.
LIMIT_S = 60.0


@dataclass(frozen=True)
class Pace:
    """Steps of one way, in seconds by the clock and by the processor."""

    n_steps: int
    clock_s: float
    processor_s: float


def cores() -> int:
    return len(os.sched_getaffinity(0))


def processor_s(pids: Iterable[int], without: Iterable[int] = ()) -> float:
    """Processor time of processes and of all that they have started, but for some and what those have started."""
    total = 0.0
    for pid in set(pids) - set(without):
        process = psutil.Process(pid)
        times = process.cpu_times()
        total += times.user + times.system + processor_s((child.pid for child in process.children()), without)
    return total


Call = Callable[..., Awaitable[Any]]


async def by_itself(function: Callable[..., Any], *arguments: Any) -> Any:
    return await awaited(function(*arguments))


async def in_turn(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call, and give way to other episodes."""
    found = await awaited(function(*arguments))
    await asyncio.sleep(0)
    return found


@dataclass(frozen=True)
class Way:
    """A way of playing an environment.

    Attributes:
        environment: by itself, or served by workers.
        at_once: episodes under way.
        call: how it is called, where not as a rollout does.
    """

    environment: Any
    at_once: int = 1
    call: Call | None = None

    async def play(self, task: Any, numbers: Iterable[str]) -> int:
        """Play an episode of each number, so many at once; return the number of steps."""
        left, executor = iter(numbers), executor_for(self.environment)
        done = await asyncio.gather(*(self._player(task, left, executor) for _ in range(self.at_once)))
        await executor.close()
        return sum(done)

    async def _player(self, task: Any, left: Iterable[str], executor: CallExecutor) -> int:
        n = 0
        for number in left:
            lane = executor.open()
            n += await one_episode(self.environment, task, number, self.call or partial(lane.call, timeout_s=LIMIT_S))
            await lane.leave()
        return n


async def one_episode(environment: Any, task: Any, seed: str, call: Call) -> int:
    """Play at random; return the number of steps."""
    rng = random.Random(seed)
    written = WRITTEN.get(type(getattr(environment, "environment", environment)).__name__, ("look", "1", "yes"))
    episode = await call(environment.start, task)
    now, n = episode.opening, 0
    while n < MAX_STEPS and not (now.terminated or now.truncated):
        now = await call(episode.step, rng.choice(now.admissible_actions or written))
        n += 1
    await call(episode.close)
    return n


async def pace(way: Way, task: Any, n_episodes: int, seed: int, workers: list[int]) -> Pace:
    """Play episodes; `workers` do nothing for an environment that they do not serve."""
    is_served = isinstance(way.environment, Processes)
    pids, without = (way.environment._pool().pids(), []) if is_served else ([os.getpid()], workers)
    begin, before = time.perf_counter(), processor_s(pids, without)
    n_steps = await way.play(task, (f"{seed}/{n}" for n in range(n_episodes)))
    return Pace(n_steps, time.perf_counter() - begin, processor_s(pids, without) - before)


def ways_of(raw: Any, at_once: int | None, in_workers: bool) -> dict[str, Way]:
    """By itself; then, as a rollout calls it, `one`, and of workers also one per core and a single episode in one."""
    plain = Way(raw, call=by_itself)
    if not (in_workers or properties_of(raw).isolated):
        room = 1 if executor_for(raw).inline else at_once or IN_THREADS
        return {"raw": plain, "turns": Way(raw, room, in_turn if room > 1 else by_itself), "one": Way(raw, room)}
    lasting = 1_000_000  # a worker that is replaced would take its account with it
    one = Processes(environment=raw, n_workers=1, episodes_at_once=at_once, episodes_per_worker=lasting)
    many = Processes(environment=raw, episodes_at_once=at_once, episodes_per_worker=lasting)
    in_one, in_many = max_concurrent_episodes(one) or 1, max_concurrent_episodes(many) or 1
    return {
        "raw": plain,
        "turns": Way(raw, in_one, in_turn if in_one > 1 else by_itself),
        "alone": Way(one),
        "one": Way(one, in_one),
        "many": Way(many, in_many),
    }


async def measured(raw: Any, seconds: float, repeats: int, at_once: int | None, in_workers: bool) -> dict[str, Any]:
    """The ways, in turns."""
    task = next(iter(raw.tasks(properties_of(raw).splits[0])))
    ways = ways_of(raw, at_once, in_workers)
    pools = [way.environment for name, way in ways.items() if name in ("one", "many") and way.environment is not raw]
    found: dict[str, list[Pace]] = {name: [] for name in ways}
    try:
        for way in ways.values():  # games are made, processes are up
            await way.play(task, ["warm"] * way.at_once)
        n_episodes = await fitting(raw, task, seconds, max(way.at_once for way in ways.values()))
        for i in range(repeats):
            for name, way in ways.items():
                workers = [pid for pool in pools for pid in pool._pool().pids()]
                n = max(1, n_episodes // ALONE_OF) if name == "alone" else n_episodes
                found[name].append(await pace(way, task, n, i, workers))
            steps = {p[-1].n_steps for name, p in found.items() if name != "alone"}
            assert len(steps) == 1 or not properties_of(raw).deterministic, f"the ways made {steps} steps"
    finally:
        for pool in pools:
            pool.close()
    served = "workers" if pools else "event loop" if executor_for(raw).inline else "threads"
    return summary(found) | {"served": served, "at_once": ways["one"].at_once}


async def fitting(raw: Any, task: Any, seconds: float, in_a_round: int) -> int:
    """Number of episodes that take so long, in whole rounds."""
    until, n = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        await one_episode(raw, task, f"fit/{n}", by_itself)
        n += 1
    return max(1, round(n / in_a_round)) * in_a_round


def summary(found: dict[str, list[Pace]]) -> dict[str, Any]:
    """Medians over the repeats, ratios within each."""

    def rate(way: str) -> float:
        return statistics.median(p.n_steps / p.clock_s for p in found[way])

    def ratio(way: str, of: str, to: str = "raw") -> float:
        pairs = zip(found[to], found[way], strict=True)
        return statistics.median((p.n_steps / getattr(p, of)) / (r.n_steps / getattr(r, of)) for r, p in pairs)

    def step_us(way: str, of: str) -> float:
        return 1e6 * statistics.median(getattr(p, of) / max(1, p.n_steps) for p in found[way])

    row = {
        "raw_per_s": round(rate("raw")),
        "one_per_s": round(rate("one")),
        "one_of_raw": round(ratio("one", "clock_s"), 2),
        "one_of_raw_processor": round(ratio("one", "processor_s"), 2),
        "one_of_turns_processor": round(ratio("one", "processor_s", "turns"), 2),
        "raw_step_us": round(step_us("raw", "processor_s"), 1),
        "overhead_us": round(step_us("one", "processor_s") - step_us("raw", "processor_s"), 1),
    }
    if "many" in found:
        row |= {
            "many_per_s": round(rate("many")),
            "many_of_raw": round(ratio("many", "clock_s"), 2),
            "overhead_alone_us": round(step_us("alone", "clock_s") - step_us("raw", "clock_s")),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--in-workers", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=[k for k in CATALOG["environment"] if k not in WRAPPERS])
    asked = parser.parse_args()
    # The names of these scripts are not to be taken for those of packages, here or in the workers.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    rows: dict[str, Any] = {}
    for kind in asked.kinds:
        try:
            raw = build_part("environment", {"kind": kind, **KEYS.get(kind, {})}, "environment", base=Path.cwd())
            rows[kind] = asyncio.run(measured(raw, asked.seconds, asked.repeats, asked.at_once, asked.in_workers))
        except MissingPackageError as error:
            rows[kind] = {"skipped": f"{error.got} is not installed"}
        except RecipeError as error:
            rows[kind] = {"skipped": str(error).partition("\n")[0]}
        if not asked.json:
            print(f"{kind:20} {rows[kind]}", flush=True)
    about = {"cores": cores(), "load": os.getloadavg(), "repeats": asked.repeats}
    if asked.json:
        print(json.dumps({"environments": rows, **about}))
        return
    print(f"\n{about}\n")
    print(
        "| | served by | by itself | served | of it | by processor time | of it in turn "
        "| a step more | all cores | of it |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind, row in rows.items():
        if "skipped" not in row:
            many = f"{row['many_per_s']:,} | {row['many_of_raw']:.2f}" if "many_per_s" in row else "- | -"
            print(
                f"| `{kind}` | {row['served']} | {row['raw_per_s']:,} | {row['one_per_s']:,} | {row['one_of_raw']:.2f} "
                f"| {row['one_of_raw_processor']:.2f} | {row['one_of_turns_processor']:.2f} "
                f"| {row['overhead_us']:g} us of {row['raw_step_us']:g} | {many} |"
            )


if __name__ == "__main__":
    main()
