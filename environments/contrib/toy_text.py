"""The toy texts of Gymnasium in words: FrozenLake, Taxi, CliffWalking and Blackjack.

    SFFF
    FHFH
    FPFH
    HFFG
    > right

The first three are small tables: what follows each action in each state, with which probability and reward. They are
read from the package once, and played from there, with chance drawn by the seed of the task; the best play is known
exactly, by induction from the last step. Blackjack is played by the package.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.core.normalise import plain_words
from environments.core.procedural import Attempt, Drawn, digest
from environments.packages import import_from, version_of
from rlhf.data import Task
from rlhf.settings import STRICT

Game = Literal["frozen_lake", "taxi", "cliff_walking", "blackjack"]

#: Actions in the order of the package's numbers.
ACTIONS: Mapping[str, tuple[str, ...]] = {
    "frozen_lake": ("left", "down", "right", "up"),
    "taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "cliff_walking": ("up", "right", "down", "left"),
    "blackjack": ("stick", "hit"),
}
_IDS: Mapping[str, str] = {
    "frozen_lake": "FrozenLake-v1", "taxi": "Taxi-v4", "cliff_walking": "CliffWalking-v1", "blackjack": "Blackjack-v1"
}  # fmt: skip
_RULES: Mapping[str, str] = {
    "frozen_lake": "Cross the frozen lake from S to the goal G. P is you, F is ice; whoever steps on a hole H is lost.",
    "taxi": "Drive the taxi to the passenger, pick up, drive to the goal and drop off. Between cells, | is a wall and "
    ": none. The places R, G, Y and B are red, green, yellow and blue.",
    "cliff_walking": "Walk from S to the goal G. P is you; whoever steps on the cliff C is brought back to S.",
    "blackjack": "Come closer to 21 than the dealer, and not above it. An ace counts 11 while that is not too much.",
}
_SLIPS: Mapping[str, str] = {
    "frozen_lake": " The ice is slippery: a step may go to either side of where it was meant.",
    "cliff_walking": " The ground is slippery: a step may go to either side of where it was meant.",
    "taxi": " The roads are wet: a move may go to either side of where it was meant.",
}
_PLACES = ("at red", "at green", "at yellow", "at blue", "in the taxi")
_MOST_HITS, _HASTE = 12, 1e-9
_EXTRA = "toytext"
_import = partial(import_from, distribution="gymnasium", extra=_EXTRA)

#: state -> action -> (probability, next state, reward, whether it ends).
Table = tuple[tuple[tuple[tuple[float, int, float, bool], ...], ...], ...]


@plain_dataclass(frozen=True)
class Start:
    """Random draw of a task: the lake, the first state, and where its chance starts."""

    rows: tuple[str, ...]
    state: int
    chance: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToyText(Drawn):
    """A toy text of Gymnasium in words, with the best play as oracle."""

    game: Game = "frozen_lake"
    """Game of Gymnasium's toy text."""
    slippery: bool = False
    """Let moves go astray at random; without effect in Blackjack."""
    size: Annotated[int, Field(ge=3, le=10)] = 4
    """Rows and columns of a frozen lake, which the seed draws so that it can be crossed."""
    max_steps: Annotated[int, Field(ge=1)] = 40
    """Maximum steps per episode; longer ones are truncated."""

    name: ClassVar[str] = "toy_text"

    @property
    def level(self) -> str:
        """Version of the package, game and size."""
        size = str(self.size) if self.game == "frozen_lake" else ""
        return f"gymnasium-{version_of('gymnasium', _EXTRA)}/{self.game}{size}{'-slippery' if self.slippery else ''}"

    @property
    def properties(self) -> Properties:
        """Properties of the environment."""
        repeats = self.slippery or self.game in ("blackjack", "cliff_walking")  # tasks may differ in their dice alone
        return replace(super().properties, package=f"gymnasium {version_of('gymnasium', _EXTRA)}", repeats=repeats)

    def draw(self, rng: random.Random) -> Start:
        """Draw a lake, or a first state, and the seed of chance. Raises MissingPackageError."""
        rows: tuple[str, ...] = ()
        state, chance = 0, rng.getrandbits(31)
        if self.game == "frozen_lake":
            module = _import("gymnasium.envs.toy_text.frozen_lake")
            rows = tuple(map(str, module.generate_random_map(size=self.size, seed=rng.getrandbits(31))))
        elif self.game != "blackjack":
            weights = first_states(self.game)
            [state] = rng.choices(range(len(weights)), weights)
        return Start(rows, state, chance)

    def content(self, instance: Start) -> str:
        """Lake or first taxi state, and the random seed where it matters or nothing else is drawn."""
        chance = instance.chance if self.slippery or self.game in ("blackjack", "cliff_walking") else 0
        return repr((instance.rows, instance.state, chance))

    def start(self, task: Task) -> ToyTextEpisode | BlackjackEpisode:
        """Begin one attempt. Raises MissingPackageError when `gymnasium` is not installed."""
        if self.game == "blackjack":
            return BlackjackEpisode(self, self.instance(task))
        return ToyTextEpisode(self, self.instance(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Optimal actions after `taken`; None where they fail, by bad luck or a bad past.

        The best play of a table knows the probabilities, not the luck of the task. That of Blackjack knows the cards:
        it tries out when to stick.
        """
        episode = self.start(task)
        episode.after(taken)
        if isinstance(episode, BlackjackEpisode):
            return self._plan_blackjack(task, list(taken))
        best = best_actions(self.table(self.instance(task)), self.max_steps)
        path: list[str] = []
        while not episode.over:
            path.append(ACTIONS[self.game][best[episode.n_steps][episode.at]])
            episode.act(path[-1])
        return tuple(path) if episode.solved else None

    def table(self, instance: Start) -> Table:
        """The table of an instance."""
        return table_of(self.game, instance.rows, self.slippery)

    def _plan_blackjack(self, task: Task, taken: list[str]) -> Sequence[str] | None:
        for n in range(_MOST_HITS):
            path = [*["hit"] * n, "stick"]
            episode = self.start(task)
            episode.after([*taken, *path])
            if episode.solved:
                return () if len(taken) == episode.n_steps else tuple(path[: episode.n_steps - len(taken)])
        return None


class _Played(Attempt):
    """Base of both kinds of episodes: reads actions, and gives the package's rewards."""

    def __init__(self, settings: ToyText) -> None:
        super().__init__(settings.max_steps)
        self._settings, self._reward = settings, 0.0
        self._actions = tuple(sorted(ACTIONS[settings.game]))
        rules = _RULES[settings.game] + (_SLIPS.get(settings.game, "") if settings.slippery else "")
        self.opening = self.opened(f"{rules}\nActions: {', '.join(self._actions)}.\n{self.sees()}")

    @property
    def n_steps(self) -> int:
        """Actions so far."""
        return self._settings.max_steps - self.steps_left

    def do(self, action: str) -> tuple[str, bool]:
        """Do one action. What is not understood costs a step and changes nothing else."""
        words = plain_words(action).removeprefix("go ").removeprefix("move ").replace("pickup", "pick up")
        words = words.replace("dropoff", "drop off").replace("stand", "stick")
        is_known = words in self._actions
        self._reward = self.play(ACTIONS[self._settings.game].index(words)) if is_known else 0.0
        unknown = "" if is_known else f"Unknown action. Actions: {', '.join(self._actions)}.\n"
        return f"{unknown}{self.sees()}", is_known

    def earned(self, before: float) -> float:
        """Return the package's reward."""
        return self._reward

    def possible(self) -> tuple[str, ...]:
        """Return all actions of the game."""
        return self._actions

    @abstractmethod
    def play(self, number: int) -> float:
        """Do the action of this number; returns its reward."""

    @abstractmethod
    def sees(self) -> str:
        """Observation of the agent."""


class ToyTextEpisode(_Played):
    """Attempt at a table; the key of a state tells the lake and the number of the state."""

    def __init__(self, settings: ToyText, start: Start) -> None:
        self._start, self.at = start, start.state
        self._table = settings.table(start)
        self._name = f"{settings.game}/{digest(repr(start.rows))}"
        self._game = settings.game
        super().__init__(settings)

    def play(self, number: int) -> float:
        """Draw what follows, from the table."""
        outcomes = self._table[self.at][number]
        rng = random.Random(f"{self._start.chance}/{self.n_steps}")
        [outcome] = rng.choices(outcomes, [probability for probability, *_ in outcomes])
        _, self.at, reward, self.done = outcome
        self.solved = self.done and reward > (-100 if self._game == "cliff_walking" else 0)
        return reward

    def sees(self) -> str:
        """The state in characters, or in words."""
        if self._game == "taxi":
            rest, goal = divmod(self.at, 4)
            rest, passenger = divmod(rest, 5)
            row, column = divmod(rest, 5)
            places = f"Passenger: {_PLACES[passenger]}. Goal: {_PLACES[goal].removeprefix('at ')}."
            return f"{_taxi_map()}\nTaxi at row {row}, column {column} (from 0). {places}"
        rows = self._start.rows or ("F" * 12,) * 3 + ("S" + "C" * 10 + "G",)
        row, column = divmod(self.at, len(rows[0]))
        shown = [list(line) for line in rows]
        shown[row][column] = "P"
        end = "" if not self.done else "\nThe goal!" if self.solved else "\nYou fell into a hole."
        return "\n".join("".join(line) for line in shown) + end

    def state(self) -> str:
        """The lake and the number of the state."""
        return f"{self._name}/{self.at}"


class BlackjackEpisode(_Played):
    """Hand of the package's Blackjack; the state key tells the visible part of both hands."""

    def __init__(self, settings: ToyText, start: Start) -> None:
        self._env = _import("gymnasium").make(_IDS["blackjack"], disable_env_checker=True).unwrapped
        self._seen = tuple(map(int, self._env.reset(seed=start.chance)[0]))
        self._said = ""
        super().__init__(settings)

    def play(self, number: int) -> float:
        """Hit or stick."""
        seen, reward, self.done, _, _ = self._env.step(number)
        self._seen, self.solved = tuple(map(int, seen)), bool(reward > 0)
        if self.done:
            self._said = "You win." if reward > 0 else "A draw." if reward == 0 else "You lose."
        return float(reward)

    def sees(self) -> str:
        """The own sum and the dealer's card."""
        own, dealer, ace = self._seen
        return f"You have {own}{', with an ace as 11' if ace else ''}. The dealer shows {dealer}. {self._said}".rstrip()

    def state(self) -> str:
        """Visible state, and how it ended."""
        return f"blackjack/{self._seen}/{self._said}"


@lru_cache(maxsize=1024)
def table_of(game: str, rows: tuple[str, ...], slippery: bool) -> Table:
    """Read the package's table. Raises MissingPackageError."""
    keys: dict[str, Any] = {"is_rainy" if game == "taxi" else "is_slippery": slippery}
    if rows:
        keys |= {"desc": list(rows), "map_name": None}
    env = _import("gymnasium").make(_IDS[game], disable_env_checker=True, **keys).unwrapped
    return tuple(
        tuple(
            tuple((float(p), int(after), float(reward), bool(ends)) for p, after, reward, ends in env.P[state][action])
            for action in range(len(ACTIONS[game]))
        )
        for state in range(len(env.P))
    )


@cache
def first_states(game: str) -> tuple[float, ...]:
    """Initial state distribution."""
    env = _import("gymnasium").make(_IDS[game], disable_env_checker=True).unwrapped
    return tuple(map(float, env.initial_state_distrib))


@lru_cache(maxsize=256)
def best_actions(table: Table, n_steps: int) -> tuple[tuple[int, ...], ...]:
    """Optimal action for each step and state by backward induction, the first on ties.

    Each step costs next to nothing besides its reward, so that of equally good plays the quickest is taken.
    """
    value = [0.0] * len(table)
    found: list[tuple[int, ...]] = []
    for _ in range(n_steps):
        worth = [
            [
                sum(p * (reward - _HASTE + (0.0 if ends else value[after])) for p, after, reward, ends in outcomes)
                for outcomes in row
            ]
            for row in table
        ]
        found.append(tuple(row.index(max(row)) for row in worth))
        value = [max(row) for row in worth]
    return tuple(reversed(found))


@cache
def _taxi_map() -> str:
    rows = _import("gymnasium.envs.toy_text.taxi").MAP
    return "\n".join(rows[1:-1])
