"""League of older policies to play against: versions, matchmaking and results."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

from rlhf.credit.contrib.self_play import seat_of, seats_of_others
from rlhf.data import ScoredGroup, Trajectory
from rlhf.errors import TrainingError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.embedded.swapped_weights import SwappedWeightsEngine
from rlhf.rollout.opponent_engine import OpponentEngine, OpponentSampler, turn_key
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.contrib.judge_refresh import Weights, learnt
from rlhf.training.contrib.opponent_settings import Opponents
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.policy.model import Policy

#: What the policy itself is called where its wins are counted.
CURRENT = "current"


@dataclass(frozen=True)
class Version:
    """The policy as it was.

    Attributes:
        weights: its trained parameters.
        number: under which they were delivered then.
    """

    weights: Weights
    number: int


@dataclass
class League(StageHook):
    """The versions that are kept. `learn` takes in a finished step.

    Attributes:
        settings: the recipe keys.
        policy: the live one.
        seats: of the game, by their names.
        versions: by the number of steps of the stage after which each was the policy, oldest first.
    """

    key: ClassVar[str] = "league"

    settings: Opponents
    policy: Policy
    seats: Sequence[str]
    versions: dict[int, Version] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Opponents | None, policy: Policy, seats: Sequence[str]) -> League | None:
        """League before the first step, with the present policy as first version; None without settings."""
        if settings is None:
            return None
        return cls(settings, policy, seats, {0: Version(learnt(policy), policy.version)})

    @asynccontextmanager
    async def rollout(self, run: RunContext) -> AsyncIterator[OpponentSampler]:
        """Context of the opponents of a step, whose resources are freed at its end.

        Raises:
            TrainingError: the engine does not compute with the trainer's module.
        """
        engine = run.runner.engine
        if not isinstance(engine, TransformersEngine) or not engine.shares_policy:
            raise TrainingError(
                "older versions play on the engine that shares the trainer's module",
                where="opponents",
                got=type(engine).__name__,
                expected="engine: {kind: transformers}",
                hint="change the engine, or remove the key",
            )
        drawn = _Drawn(self, engine, run.runner.limits.max_turns)
        try:
            yield drawn
        finally:
            for held in drawn.engines.values():
                await held.close()

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`."""
        step.metrics |= self.learn(step.all_groups, step.number + 1)

    def learn(self, groups: Sequence[ScoredGroup], n_steps: int) -> dict[str, float]:
        """Update on the stage's `n_steps`-th step, finished; returns what is logged of its games.

        A game is won by who has earned more in it than all others together, by the environment's own rewards; one that
        nobody has won counts ½. Of a game against itself the first seat's wins count. Where turns are drawn nothing is
        won; the share is that of the turns.
        """
        if self.settings.by == "turn":
            turns = [turn for group in groups for t in group.trajectories for turn in t.turns[t.n_given :]]
            n_older = sum(any(g.opponent for g in turn.generations) for turn in turns)
            figures = self._figures(n_older, len(turns))
        else:
            figures = self._won(groups)
        if n_steps % self.settings.every == 0:
            self.versions[n_steps] = Version(learnt(self.policy), self.policy.version)
            for step in sorted(self.versions)[: -self.settings.keep]:
                del self.versions[step]
        return figures

    def _figures(self, n_against: int, n: int) -> dict[str, float]:
        return {"opponents/n_versions": float(len(self.versions)), "opponents/share": n_against / max(n, 1)}

    def _won(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        won: dict[str, list[float]] = {}
        for trajectory in (t for group in groups for t in group.trajectories):
            other = next((g.opponent for g in trajectory.generations if g.opponent), "")
            others = seats_of_others(trajectory)
            own = [s for s in self.seats if s not in others] if other else self.seats[:1]
            won.setdefault(other or CURRENT, []).append(_won(trajectory, own))
        n_against = sum(len(games) for name, games in won.items() if name != CURRENT)
        rates = {f"win_rate/{name.replace(' ', '_')}": fmean(games) for name, games in won.items()}
        return self._figures(n_against, sum(map(len, won.values()))) | rates

    def state_dict(self) -> dict[str, Any]:
        """Every version that is kept."""
        return {"versions": {step: [v.number, dict(v.weights)] for step, v in self.versions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises KeyError for what is no state of such."""
        self.versions = {step: Version(weights, number) for step, (number, weights) in state["versions"].items()}


class _Drawn:
    """Seats or turns of each attempt, and the engines of those who were drawn."""

    def __init__(self, league: League, engine: TransformersEngine, max_turns: int = 0) -> None:
        self._league, self._options, self.engines = league, engine.options, dict[int, SwappedWeightsEngine]()
        self._max_turns = max_turns

    def __call__(self, seed: int, attempt: int) -> Mapping[str, OpponentEngine]:
        """See `OpponentSampler`. Replays the draws of the group's earlier attempts, so that seats alternate."""
        if self._league.settings.by == "turn":
            return self._of_turns(random.Random(f"{seed}/opponents/{attempt}"))
        league, rng = self._league, random.Random(f"{seed}/opponents")
        steps, n_before = sorted(league.versions), rng.randrange(len(league.seats))
        for i in range(attempt + 1):
            is_older, step = rng.random() < league.settings.share, rng.choice(steps)
            if i < attempt:
                n_before += is_older
        if not is_older:
            return {}
        return {league.seats[n_before % len(league.seats)]: self._older(step)}

    def _of_turns(self, rng: random.Random) -> Mapping[str, OpponentEngine]:
        share, steps = self._league.settings.share, sorted(self._league.versions)
        drawn = [(rng.random() < share, rng.choice(steps)) for _ in range(self._max_turns)]
        return {turn_key(turn): self._older(step) for turn, (is_older, step) in enumerate(drawn) if is_older}

    def _older(self, step: int) -> OpponentEngine:
        return OpponentEngine(f"step {step}", self._engine(step))

    def _engine(self, step: int) -> SwappedWeightsEngine:
        if step not in self.engines:
            version = self._league.versions[step]
            model = self._league.policy.model
            self.engines[step] = SwappedWeightsEngine(model, version.weights, version=version.number, **self._options)
        return self.engines[step]


def _won(trajectory: Trajectory, own: Sequence[str]) -> float:
    """1 where the seats `own` have earned more than the others, ½ where as much, else 0."""
    earned = sum(turn.reward if seat_of(turn) in own else -turn.reward for turn in trajectory.turns)
    return 0.5 if earned == 0 else float(earned > 0)
