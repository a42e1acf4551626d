"""Random schedules of the state machine: who begins, samples, finishes, dies, trains and installs, in any order."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from rlhf.asynchrony.pipeline import Pipeline, Rules


@dataclass
class Schedule:
    """Plays a pipeline to its end by chance, and looks after each event whether it still holds what it promises.

    Attributes:
        pipeline: under test.
        rng: draws the events.
        n_servers: that weights are installed on, one after the other.
        due: ordinals of the step that is being trained.
        trained: ordinals of each step.
        oldest_age: of all that was trained.
        n_cuts, n_deaths: so far.
    """

    pipeline: Pipeline
    rng: random.Random
    n_servers: int = 2
    drains: bool = False
    due: tuple[int, ...] | None = None
    trained: list[tuple[int, ...]] = field(default_factory=list)
    oldest_age: int = 0
    n_cuts: int = 0
    n_deaths: int = 0
    played_by: dict[int, set[int]] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(self.n_servers):
            self.pipeline.join(f"server {number}", self.pipeline.step)

    def play(self) -> None:
        """Make events until every step is trained."""
        events = [self.begin, self.sample, self.finish, self.die, self.train, self.install, self.cut]
        weights = [self.rng.random() ** 2 + 0.02 for _ in events]
        weights[3], weights[6] = 0.05 * weights[3], 0.05 * weights[6]
        n_events = 0
        while self.pipeline.step < self.pipeline.rules.n_steps:
            self.rng.choices(events, weights)[0]()
            self.pipeline.check()
            n_events += 1
            assert n_events < 200_000, "no end: something waits for something that cannot come"

    def begin(self) -> None:
        worker = self.rng.randrange(3)
        if (ordinal := self.pipeline.begin()) is not None:
            self.workers[ordinal] = worker

    def _running(self) -> int | None:
        return self.rng.choice(sorted(self.pipeline.running)) if self.pipeline.running else None

    def sample(self) -> None:
        if (ordinal := self._running()) is not None:
            version = self.rng.choice(list(self.pipeline.servers.values()))
            self.pipeline.sampled(ordinal, version, self.rng.randrange(5))
            self.played_by.setdefault(ordinal, set()).add(version)

    def finish(self) -> None:
        if (ordinal := self._running()) is not None:
            sampled = self.pipeline.running[ordinal].sampled
            self.pipeline.finish(ordinal, {version: self.rng.randint(0, n) for version, n in sampled.items()})

    def die(self) -> None:
        if self.pipeline.running:
            worker = self.rng.randrange(3)
            lost = [ordinal for ordinal in self.pipeline.running if self.workers[ordinal] == worker]
            for ordinal in lost:
                self.pipeline.give_back(ordinal)
            self._forget(lost)
            self.n_deaths += bool(lost)

    def _forget(self, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            self.played_by.pop(ordinal, None)

    def train(self) -> None:
        """Begin a step, or end the one that has begun: other events happen between."""
        batch, self.due = self.due, None
        if batch is None:
            self.due = self.pipeline.batch()
            return
        self.oldest_age = max(self.oldest_age, *map(self.pipeline.age, batch))
        self.pipeline.train(batch)
        self.trained.append(batch)

    def install(self) -> None:
        if self.pipeline.may_install:
            behind = [s for s, version in self.pipeline.servers.items() if version < self.pipeline.step]
            self.pipeline.install(self.rng.choice(behind), self.pipeline.step)

    def cut(self) -> None:
        """End this process and start another one that goes on from what was saved."""
        if self.drains:
            self.pipeline.is_held = True
            while not self.pipeline.is_drained:
                for event in (self.begin, self.sample, self.finish):
                    event()
            self.pipeline.is_held = False
        if not self.pipeline.may_cut:
            return
        self._forget(list(self.pipeline.running))
        state = json.loads(json.dumps(self.pipeline.state()))
        assert not self.drains or not state["running"]
        self.pipeline = type(self.pipeline).restored(self.pipeline.rules, state)
        self.due = None
        self.__post_init__()
        self.n_cuts += 1


def played(rules: Rules, seed: int, *, drains: bool = False, kind: type[Pipeline] = Pipeline) -> Schedule:
    """A schedule that was played to its end."""
    rng = random.Random(seed)
    made = Schedule(kind(rules), rng, rng.randint(1, 3), drains)
    made.play()
    return made
