"""Saturation of controller, store and delivery as GPUs are added: measured costs and a simulation.

    python benchmarks/scale.py                 # needs Ray; a minute

First it measures, on this machine, what a group costs the controller on Ray: workers answer at once with attempts that
are made up, and the processor seconds of the controller's process are divided by their number. Then it simulates steps
on 8, 64 and 512 GPUs with the real state machine and a clock that is counted. What a GPU does is given: `--train-rate`
is that of docs/gpu.md for 1.7 billion parameters on an H100; the other rates are assumptions that can be changed.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import pickle
import random
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf.asynchrony.pipeline import Pipeline, Rules
from rlhf.asynchrony.remote import ControllerActor, Delivered, Played, RemoteWorker
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.rollout.counted_engine import tokens_by_version

GPUS = (8, 64, 512)
#: Steps whose cost is measured.
N_STEPS = 12


@dataclass(frozen=True)
class Given:
    """Parameters of a simulated run. Rates are for each GPU.

    Attributes:
        train_rate: tokens a second of a learner.
        stream_rate: tokens a second of one attempt.
        n_streams: attempts that a server samples at a time.
        wait_s: median seconds that an attempt waits for its environment; the logarithm spreads by `spread`.
        n_tokens: sampled in an attempt.
        n_row_tokens: of an attempt, prompts and observations included, which are trained through.
        group_size: attempts at a task.
        n_attempts: of a step, for each learner.
        share: of the GPUs that learn.
        staleness: S, and the depth.
        weight_bytes: of a delivery.
        link: bytes a second that the sender puts on its way, to all servers together.
        controller_s: processor seconds of the controller for a group.
        group_bytes: of a finished group.
    """

    train_rate: float = 30_000.0
    stream_rate: float = 60.0
    n_streams: int = 256
    wait_s: float = 20.0
    spread: float = 0.4
    n_tokens: int = 2_000
    n_row_tokens: int = 6_000
    group_size: int = 8
    n_attempts: int = 512
    share: float = 0.25
    staleness: int = 1
    weight_bytes: float = 3.4e9
    link: float = 1.2e9
    controller_s: float = 0.0
    group_bytes: float = 0.0


def made_up_group(given: Given, version: int, n_turns: int = 10) -> ScoredGroup:
    """A group as a worker returns it."""
    rng, n = random.Random(version), given.n_tokens // n_turns

    def turn() -> Turn:
        ids = tuple(rng.randrange(50_000) for _ in range(n))
        generation = Generation(Prompt(range(1, 201)), ids, tuple(-rng.random() for _ in ids), Finish.STOP, version)
        return Turn(Action("y" * 4 * n, (generation,)), "x" * 800)

    def attempt(number: int) -> Trajectory:
        return Trajectory("made/up", number, "x" * 800, tuple(turn() for _ in range(n_turns)), Outcome.SOLVED)

    attempts = tuple(map(attempt, range(given.group_size)))
    return ScoredGroup("made/up", attempts, tuple(Score({}, (0.0,) * n_turns, 0.0) for _ in attempts))


class Echo:
    """A rollout worker that has played already."""

    def __init__(self, given: Given) -> None:
        self._answers = {version: made_up_group(given, version) for version in range(N_STEPS)}

    async def ready(self) -> None:
        """Return at once."""

    async def alive(self) -> None:
        """Return at once."""

    async def play(self, job: Any, weights: Delivered) -> Any:
        """Return a group of the version that is asked for, and its tokens."""
        group = self._answers[weights.version]
        return Played(group, dict(tokens_by_version(group)))


def measured(given: Given, n: int = 32, n_workers: int = 2) -> dict[str, float]:
    """Processor seconds of the controller's process for a group of `n` in each step, and bytes of one."""
    import psutil
    import ray

    how = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 400 * 2**20}
    ray.init(address="local", num_cpus=n_workers, **how)

    class Measured(ControllerActor):
        async def used(self) -> float:
            times = psutil.Process().cpu_times()
            return float(times.user + times.system)

    async def run() -> float:
        workers = [ray.remote(num_cpus=1, max_concurrency=10)(Echo).remote(given) for _ in range(n_workers)]
        workers = [RemoteWorker(f"worker {i}", worker, 8, 60.0) for i, worker in enumerate(workers)]
        actor = ray.remote(num_cpus=0, max_concurrency=100)(Measured).remote(Rules(n, N_STEPS), workers, n, ())
        await actor.ready.remote()
        await actor.tell.remote(Delivered("sender", 0, ""))
        await actor.call.remote("open", 0)
        tasks, begin = [Task("made/up", seed=0)] * n, await actor.used.remote()
        for step in range(N_STEPS):
            await actor.call.remote("offer", {step: tasks, step + 1: tasks})
            while isinstance(due := await actor.call.remote("due", 5.0), str):
                continue
            await actor.call.remote("train", due.ordinals)
            await actor.tell.remote(Delivered("sender", step + 1, ""))
            await actor.call.remote("install", step + 1)
        return float(await actor.used.remote()) - begin

    try:
        cpu_s = asyncio.run(run())
    finally:
        ray.shutdown()
    return {"controller_s": cpu_s / (N_STEPS * n), "group_bytes": float(len(pickle.dumps(made_up_group(given, 0))))}


@dataclass
class Simulated:
    """Steps of a run on so many GPUs, by the state machine and a counted clock.

    Attempts of a group run at a time, each on a stream of a server; a group is over with its longest. The controller is
    one queue. While weights are delivered servers sample nothing new, and what they sample waits.
    """

    given: Given
    n_gpus: int
    n_steps: int = 8

    def __post_init__(self) -> None:
        given = self.given
        self.n_learners = max(1, round(self.n_gpus * given.share))
        self.n_servers = self.n_gpus - self.n_learners
        self.n_groups = max(1, given.n_attempts * self.n_learners // given.group_size)
        self.train_s = given.n_attempts * given.n_row_tokens / given.train_rate
        self.places = self.n_servers * given.n_streams // given.group_size
        self.rng = random.Random(0)

    @property
    def delivery_s(self) -> float:
        """One sender puts the weights on its link once for each server."""
        return self.given.weight_bytes * self.n_servers / self.given.link

    @property
    def moving_s(self) -> float:
        """The groups of a step from the controller to the first learner, on the same link."""
        return self.n_groups * self.given.group_bytes / self.given.link

    def group_s(self) -> float:
        """Seconds of a group: the longest of its attempts."""
        given = self.given
        waits = [math.exp(self.rng.gauss(math.log(given.wait_s), given.spread)) for _ in range(given.group_size)]
        return max(waits) + given.n_tokens / given.stream_rate

    def run(self) -> dict[str, float]:
        """Play it."""
        given, n = self.given, self.n_steps
        pipeline = Pipeline(Rules(self.n_groups, n, given.staleness, given.staleness))
        pipeline.join("servers", 0)
        now = free_at = idle_s = played_s = 0.0
        ends: list[tuple[float, int]] = []  # of groups that run
        trained_at: float | None = None
        batch: tuple[int, ...] | None = None
        while pipeline.step < n:
            while len(ends) < self.places and (ordinal := pipeline.begin()) is not None:
                took = self.group_s()
                played_s += took
                heapq.heappush(ends, (now + took, ordinal))
            if trained_at is None and (batch := pipeline.batch()) is not None:
                trained_at = max(now, free_at) + self.moving_s + self.train_s
            if trained_at is not None and (not ends or trained_at <= ends[0][0]):
                assert batch is not None
                pipeline.train(batch)
                now, trained_at = trained_at + self.delivery_s, None
                ends = [(at + self.delivery_s, ordinal) for at, ordinal in ends]  # what is sampled waits
                pipeline.install("servers", pipeline.step)
                continue
            at, ordinal = heapq.heappop(ends)
            idle_s += at - now if trained_at is None else 0.0
            now, free_at = at, max(free_at, at) + given.controller_s
            pipeline.sampled(ordinal, pipeline.version, 1)
            pipeline.finish(ordinal, {pipeline.version: 1})
        return {
            "n_learners": self.n_learners,
            "n_servers": self.n_servers,
            "groups_of_a_step": self.n_groups,
            "step_s": now / n,
            "trainer_idle": idle_s / now,
            "places_used": played_s / (now * self.places),
            "delivery": n * self.delivery_s / now,
            "moving_groups": n * self.moving_s / now,
            "controller_busy": n * self.n_groups * given.controller_s / now,
            "store_mb": (given.staleness + 1) * self.n_groups * given.group_bytes / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Given()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    given, begin = Given(**vars(args)), time.perf_counter()
    if not given.controller_s:
        given = replace(given, **measured(given))
    found = {n: Simulated(given, n).run() for n in GPUS}
    # A controller is full where the groups of a second take it a second.
    groups_per_gpu_s = found[GPUS[0]]["groups_of_a_step"] / found[GPUS[0]]["step_s"] / GPUS[0]
    limits = {"controller_full_at_gpus": 1 / (given.controller_s * groups_per_gpu_s)}
    print(json.dumps({"given": asdict(given), "of": found, **limits, "took_s": time.perf_counter() - begin}, indent=1))


if __name__ == "__main__":
    main()
