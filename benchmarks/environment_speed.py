"""Steps per second of each environment of the catalogue: by itself, through one worker process, through all cores.

    OMP_NUM_THREADS=1 python benchmarks/environment_speed.py [--json] [--seconds 2] [--repeats 3] [--kinds babyai]
                                                             [--at-once 8]

Random admissible actions on the first task of the first split, episodes of at most 30 steps; starts and closes count.
All ways play the very same episodes, as many as take the environment by itself the given seconds, and take turns, so
that a busy neighbour slows all of them. A worker has as many episodes under way as it takes at a time, which is what a
rollout gives it, or as many as are asked for; the environment by itself plays one after another, and once more as many
in turn, which is slower where they do not fit into a cache together. With one worker, what a step costs there on the
processor is compared with what it costs the environment by itself, for a crowded machine gives two processes another
share of its time than one. What a step costs when nothing else is under way to hide the journey is said apart. Kinds
that run on the event loop need no workers, and the table says so.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from environments.base import most_at_once, properties_of
from environments.pool import Processes
from environments.transcript import awaited
from rlhf.catalog import CATALOG
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.recipe.builder import build_part

#: Keys that a kind cannot do without, or that make it the size of a recipe.
KEYS: Mapping[str, Mapping[str, Any]] = {
    "textworld_express": {"game": "twc"},
    "babyai": {"level": "GoToLocal"},
}
#: Kinds that are others in another coat.
WRAPPERS = ("graded", "mixed", "processes")
MAX_STEPS = 30
#: Where every step waits for its journey, as few episodes are played as one in so many.
ALONE_OF = 16


@dataclass(frozen=True)
class Pace:
    """What one way made of its time: steps, seconds on the clock, and on the processor of those who do the steps."""

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


async def one_episode(environment: Any, task: Any, seed: str, in_turn: bool = False) -> int:
    """Play at random, if asked giving way to other episodes after each step; return the number of steps."""
    rng = random.Random(seed)
    episode = await awaited(environment.start(task))
    now, n = episode.opening, 0
    while n < MAX_STEPS and not (now.terminated or now.truncated):
        now = await awaited(episode.step(rng.choice(now.admissible_actions or ("look", "1", "yes"))))
        n += 1
        if in_turn:
            await asyncio.sleep(0)
    await awaited(episode.close())
    return n


async def pace(environment: Any, task: Any, n_episodes: int, at_once: int, seed: int, workers: list[int]) -> Pace:
    """Play episodes, so many at once; `workers` do nothing for an environment by itself."""
    is_served = isinstance(environment, Processes)
    pids, without = (environment._pool().pids(), []) if is_served else ([os.getpid()], workers)
    in_turn = not is_served and at_once > 1
    begin, before = time.perf_counter(), processor_s(pids, without)
    numbers = iter(range(n_episodes))

    async def player() -> int:
        return sum([await one_episode(environment, task, f"{seed}/{n}", in_turn) for n in numbers])

    n_steps = sum(await asyncio.gather(*(player() for _ in range(at_once))))
    return Pace(n_steps, time.perf_counter() - begin, processor_s(pids, without) - before)


async def measured(raw: Any, seconds: float, repeats: int, at_once: int | None) -> dict[str, Any]:
    """The ways, in turns."""
    task = next(iter(raw.tasks(properties_of(raw).splits[0])))
    lasting = 1_000_000  # a worker that is replaced would take its account with it
    one = Processes(environment=raw, n_workers=1, episodes_at_once=at_once, episodes_per_worker=lasting)
    many = Processes(environment=raw, episodes_at_once=at_once, episodes_per_worker=lasting)
    in_one, in_many = most_at_once(one) or 1, most_at_once(many) or 1
    ways = {"raw": (raw, 1), "turns": (raw, in_one), "alone": (one, 1), "one": (one, in_one), "many": (many, in_many)}
    found: dict[str, list[Pace]] = {way: [] for way in ways}
    try:
        for environment, room in ways.values():  # games are made, processes are up
            await asyncio.gather(*(one_episode(environment, task, "warm") for _ in range(room)))
        n_episodes = await fitting(raw, task, seconds, in_many)
        for i in range(repeats):
            for way, (environment, room) in ways.items():
                workers = [*one._pool().pids(), *many._pool().pids()]
                n = max(1, n_episodes // ALONE_OF) if way == "alone" else n_episodes
                found[way].append(await pace(environment, task, n, room, i, workers))
            steps = {p[-1].n_steps for way, p in found.items() if way != "alone"}
            assert len(steps) == 1 or not properties_of(raw).deterministic, f"the ways made {steps} steps"
    finally:
        one.close()
        many.close()
    return summary(found) | {"inline": properties_of(raw).inline, "at_once": in_one}


async def fitting(raw: Any, task: Any, seconds: float, in_a_round: int) -> int:
    """How many episodes take so long, in whole rounds of all that may be under way."""
    until, n = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        await one_episode(raw, task, f"fit/{n}")
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

    return {
        "raw_per_s": round(rate("raw")),
        "one_per_s": round(rate("one")),
        "many_per_s": round(rate("many")),
        "one_of_raw": round(ratio("one", "clock_s"), 2),
        "one_of_raw_processor": round(ratio("one", "processor_s"), 2),
        "one_of_turns_processor": round(ratio("one", "processor_s", "turns"), 2),
        "many_of_raw": round(ratio("many", "clock_s"), 2),
        "raw_step_us": round(step_us("raw", "processor_s")),
        "overhead_us": round(step_us("one", "processor_s") - step_us("raw", "processor_s")),
        "overhead_alone_us": round(step_us("alone", "clock_s") - step_us("raw", "clock_s")),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--kinds", nargs="*", default=[k for k in CATALOG["environment"] if k not in WRAPPERS])
    asked = parser.parse_args()
    # The names of these scripts are not to be taken for those of packages, here or in the workers.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    rows: dict[str, Any] = {}
    for kind in asked.kinds:
        try:
            raw = build_part("environment", {"kind": kind, **KEYS.get(kind, {})}, "environment", base=Path.cwd())
            rows[kind] = asyncio.run(measured(raw, asked.seconds, asked.repeats, asked.at_once))
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
        "| | raw, steps/s | one worker | of raw | on the processor | of raw in turn | all cores | of raw | more | alone"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind, row in rows.items():
        if "skipped" not in row:
            print(
                f"| `{kind}`{', inline' * row['inline']} | {row['raw_per_s']:,} | {row['one_per_s']:,} "
                f"| {row['one_of_raw']:.2f} | {row['one_of_raw_processor']:.2f} "
                f"| {row['one_of_turns_processor']:.2f} | {row['many_per_s']:,} | {row['many_of_raw']:.2f} "
                f"| {row['overhead_us']} of {row['raw_step_us']} us | {row['overhead_alone_us']} us |"
            )


if __name__ == "__main__":
    main()
