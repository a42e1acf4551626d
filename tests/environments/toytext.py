"""Gymnasium's FrozenLake and Taxi as text environments, and the exact value of any policy in them.

Their transition tables are known, so what an algorithm learns can be compared with the best there is, and what an
estimator says with the truth. All values are expected undiscounted returns within the step limit; in FrozenLake that is
the probability of success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from environments.base import Properties, StepResult
from rlhf.data import Task

Array = NDArray[np.float64]

_ACTIONS = {
    "FrozenLake-v1": ("left", "down", "right", "up"),
    "Taxi-v4": ("south", "north", "east", "west", "pick up", "drop off"),
}
_PLACES = ("red", "green", "yellow", "blue", "in the taxi")
_FIRST_SEED = {"train": 0, "test": 1_000_000}


@dataclass(frozen=True)
class ToyText:
    """`game` with at most `horizon` steps. One task is one seed: of Taxi's start, and of FrozenLake's slips."""

    game: str = "FrozenLake-v1"
    horizon: int = 20
    slippery: bool = False
    rows: tuple[str, ...] = ("SFFF", "FHFH", "FFFH", "HFFG")
    n_tasks: int = 200

    @property
    def properties(self) -> Properties:
        """A state says nothing of the slips to come: they hang on the seed and the number of steps."""
        package = f"gymnasium {gymnasium.__version__}"
        return Properties(True, True, True, inline=True, oracle=True, package=package, repeats=True)

    @property
    def actions(self) -> tuple[str, ...]:
        return _ACTIONS[self.game]

    def tasks(self, split: str) -> list[Task]:
        first = _FIRST_SEED[split]
        return [Task(id=f"{self.game}/{split}/{i}", seed=first + i) for i in range(self.n_tasks)]

    def start(self, task: Task) -> ToyTextEpisode:
        return ToyTextEpisode(self, task.seed)

    def plan(self, task: Task, taken: Sequence[str]) -> list[str] | None:
        """What the best policy does; None where it fails, by bad luck or a bad past."""
        episode, policy = self.start(task), optimal_policy(self)
        for action in taken:
            episode.do(action)
        path = []
        while episode.last.success is None:
            path.append(self.actions[policy[episode.n_steps, episode.state]])
            episode.do(path[-1])
        return path if episode.last.success else None

    def make(self) -> Any:
        """Gymnasium's own environment, without its time limit."""
        lake: dict[str, Any] = {"desc": list(self.rows), "map_name": None, "is_slippery": self.slippery}
        return gymnasium.make(self.game, **(lake if self.game == "FrozenLake-v1" else {})).unwrapped


class ToyTextEpisode:
    """One attempt; the state key is the state's number."""

    def __init__(self, settings: ToyText, seed: int) -> None:
        self._settings, self._env, self.n_steps = settings, settings.make(), 0
        self.state = int(self._env.reset(seed=seed)[0])
        self.last = self.opening = self._told(0.0)

    async def step(self, action: str) -> StepResult:
        return self.do(action)

    async def close(self) -> None:
        self._env.close()

    def do(self, action: str) -> StepResult:
        """Step without waiting; an unknown action costs a step."""
        self.n_steps += 1
        reward, terminated, valid = 0.0, False, action in self._settings.actions
        if valid:
            state, reward, terminated, _, _ = self._env.step(self._settings.actions.index(action))
            self.state = int(state)
        self.last = self._told(float(reward), bool(terminated), valid)
        return self.last

    def _told(self, reward: float, terminated: bool = False, valid: bool = True) -> StepResult:
        truncated = not terminated and self.n_steps >= self._settings.horizon
        return StepResult(
            self._words() if valid else f"Unknown action. Actions: {', '.join(sorted(self._settings.actions))}.",
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            state_key=str(self.state),
            success=reward > 0 if terminated or truncated else None,
            valid=valid,
            admissible_actions=tuple(sorted(self._settings.actions)),
        )

    def _words(self) -> str:
        if self._settings.game == "FrozenLake-v1":
            row, column = divmod(self.state, len(self._settings.rows[0]))
            return f"You are at row {row}, column {column}."
        row, column, passenger, goal = self._env.decode(self.state)
        return f"Taxi at row {row}, column {column}. Passenger: {_PLACES[passenger]}. Goal: {_PLACES[goal]}."


@lru_cache(maxsize=32)
def tables(settings: ToyText) -> tuple[Array, Array, Array]:
    """Return start distribution `[S]`, expected rewards `[S, A]`, probabilities to go on to a state `[S, A, S]`."""
    env = settings.make()
    n_states, n_actions = len(env.P), len(settings.actions)
    rewards, onward = np.zeros((n_states, n_actions)), np.zeros((n_states, n_actions, n_states))
    for state, actions in env.P.items():
        for action, outcomes in actions.items():
            for probability, after, reward, terminated in outcomes:
                rewards[state, action] += probability * reward
                onward[state, action, after] += 0.0 if terminated else probability
    return np.asarray(env.initial_state_distrib), rewards, onward


@lru_cache(maxsize=32)
def _induction(settings: ToyText) -> tuple[Array, NDArray[np.int64]]:
    """Values `[S]` at the start and best actions `[H, S]`, by induction from the last step backwards."""
    _, rewards, onward = tables(settings)
    value, actions = np.zeros(len(rewards)), np.zeros((settings.horizon, len(rewards)), dtype=np.int64)
    for t in reversed(range(settings.horizon)):
        q = rewards + onward @ value
        value, actions[t] = q.max(axis=1), q.argmax(axis=1)
    return value, actions


def optimal_value(settings: ToyText, state: int | None = None) -> float:
    """Return the value of the best policy from `state`, or from the start distribution."""
    value = _induction(settings)[0]
    return float(tables(settings)[0] @ value) if state is None else float(value[state])


def optimal_policy(settings: ToyText) -> NDArray[np.int64]:
    """Return the best action for each step and state, `[H, S]`; near the limit it depends on the step."""
    return _induction(settings)[1]


def policy_value(settings: ToyText, policy_SA: Array) -> float:
    """Return the value of a policy that gives action probabilities `[S, A]`, from the start distribution."""
    start, rewards, onward = tables(settings)
    value = np.zeros(len(rewards))
    for _ in range(settings.horizon):
        value = (policy_SA * (rewards + onward @ value)).sum(axis=1)
    return float(start @ value)
