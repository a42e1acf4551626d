"""TextWorld games (Cote et al., arXiv 1806.11532): cooking, coins, treasure, and a small house.

    TextWorld(game="cooking", params={"recipe": 1, "take": 1, "cook": True})

A game is generated and compiled when it is first played, in a process of its own, and kept in the cache folder; see
`generate.py`. The cooking game is the generator of the competition First TextWorld Problems, and its three splits are
the package's: foods and ways to prepare them that no other split has. The other games have no split of their own but
for `simple`, which has one for tests; there a split is a range of seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.contrib.textworld import generate
from environments.contrib.textworld.game import POOL, Play, State
from environments.contrib.textworld.generate import EXTRA
from environments.core.seed_splits import FIRST_SEED, Seeded, SplitSize, split_in
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import RecipeError, nearest
from rlhf.settings import STRICT

Name = Literal["cooking", "coin_collector", "treasure_hunter", "simple"]
Value = StrictBool | StrictInt | StrictStr

#: Of each game, its parameters: all accepted values, the default first.
PARAMETERS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "cooking": {
        "recipe": (1, 2, 3, 4, 5),
        "take": (1, 0, 2, 3, 4, 5),
        "go": (1, 6, 9, 12),
        "open": (False, True),
        "cook": (False, True),
        "cut": (False, True),
        "drop": (False, True),
    },
    "coin_collector": {"level": (1, *range(2, 151), *range(201, 234))},
    "treasure_hunter": {"level": (1, *range(2, 31))},
    "simple": {"rewards": ("dense", "balanced", "sparse"), "goal": ("detailed", "brief", "none")},
}

_OF_THE_PACKAGE: Mapping[str, str] = {"train": "train", "dev": "valid", "test": "test"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextWorld(Seeded):
    """TextWorld game. A step takes 2 to 4 ms; the first attempt at a task generates its game, in 2 to 4 s."""

    game: Name = "cooking"
    """Name of the game."""
    params: Mapping[str, Value] = Field(default_factory=dict)
    """Generation parameters that differ from the defaults; `PARAMETERS` has names, values and defaults."""
    instructions: Literal["steps", "goal"] = "steps"
    """Instructions: step by step, where the game does so, or the last step alone."""
    max_steps: Annotated[int, Field(ge=1)] = 100
    """Maximum steps per episode; longer ones are truncated."""
    n_dev: SplitSize = 200
    """The same for `dev`."""
    n_test: SplitSize = 200
    """The same for `test`."""
    reward: Literal["score", "success"] = "score"
    """The gain in points as a share of all points, or 1 for the step that wins and 0 for all others."""

    def __post_init__(self) -> None:
        known = PARAMETERS[self.game]
        for name, value in self.params.items():
            if name not in known:
                raise RecipeError(
                    f"the game '{self.game}' has no parameter of this name",
                    where=f"params.{name}",
                    got=repr(name),
                    expected=", ".join(known),
                    hint=nearest(name, known),
                )
            if not any(value == one and type(value) is type(one) for one in known[name]):
                raise RecipeError(
                    f"the game '{self.game}' cannot be generated with this value",
                    where=f"params.{name}",
                    got=repr(value),
                    expected=_listed(known[name]),
                    hint=f"the default is {known[name][0]!r}",
                )
        if self.game == "cooking" and self._values["take"] > self._values["recipe"]:
            raise RecipeError(
                "the game cannot have more ingredients to find than the recipe uses",
                where="params.take",
                got=f"take {self._values['take']}, recipe {self._values['recipe']}",
                expected="set take to at most recipe",
            )

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when textworld is not installed."""
        return Properties(
            deterministic=True,
            replayable=True,
            thread_safe=True,
            oracle=True,
            splits=tuple(FIRST_SEED),
            package=f"textworld {version_of('textworld', EXTRA)}",
            isolated=True,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`: one per seed. Nothing is generated.

        Raises:
            EnvError: no such split.
            MissingPackageError: textworld is not installed.
        """
        return self.listed(split, self._prefix, {"split": split})

    def start(self, task: Task) -> TextWorldEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another environment, game or package version.
            EnvError: the game could not be generated or loaded.
            MissingPackageError: textworld is not installed.
        """
        with POOL.kept(self._made(task)) as play:
            return TextWorldEpisode(play, self.max_steps, self.reward)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that win `task` after `taken` within the step limit, tried out first; or None.

        From the start and along it, this is the walkthrough that the generator keeps. From elsewhere it is what the
        package plans, which knows no way where the inventory is limited (`drop`).
        """
        made = self._made(task)
        done = tuple(action.strip() for action in taken)
        whole = _walkthrough(made)
        if whole is not None and done == whole[: len(done)]:
            rest: tuple[str, ...] | None = whole[len(done) :]
        else:
            rest = _plan_from(made, done)
        return rest if rest is not None and len(done) + len(rest) <= self.max_steps else None

    @property
    def _values(self) -> Mapping[str, Any]:
        return {name: values[0] for name, values in PARAMETERS[self.game].items()} | dict(self.params)

    @property
    def _prefix(self) -> str:
        default = PARAMETERS[self.game]
        chosen = [
            f"{name}={int(v) if isinstance(v, bool) else v}"
            for name, v in sorted(self.params.items())
            if v != default[name][0]
        ]
        if self.instructions != "steps":
            chosen.append(f"instructions={self.instructions}")
        return f"textworld-{generate.release()}/{self.game}/{','.join(chosen) or 'default'}"

    def _made(self, task: Task) -> generate.Game:
        split = split_in(task, self._prefix, "TextWorld")
        settings = dict(self._values)
        if self.game == "cooking":
            settings |= {"recipe_seed": 0, "split": _OF_THE_PACKAGE[split]}
        elif self.game == "simple":
            settings["test"] = split == "test"
        grammar = {"only_last_action": True} if self.instructions == "goal" else {}
        return generate.game(self.game, settings, grammar, task.seed)


class TextWorldEpisode:
    """Attempt at a game.

    The key of a state covers every fact that holds, in all rooms, and the points: not what was done to get there.
    """

    def __init__(self, play: Play, max_steps: int, reward: Literal["score", "success"]) -> None:
        self._play: Play | None = play
        self._max_steps, self._n_steps, self._reward = max_steps, 0, reward
        self._over = False
        state = play.begin()
        self._score = state.score
        self.opening = StepResult(state.text, state_key=state.key, admissible_actions=state.actions)

    async def step(self, action: str) -> StepResult:
        """Do one action; blanks around it do not count. Text that cannot be read costs a step.

        Raises:
            EnvError: the episode is over or closed, or the interpreter failed.
        """
        if self._play is None or self._over:
            raise after_end("TextWorld step", action)
        state = self._play.step(action)
        self._n_steps += 1
        truncated = not state.over and self._n_steps >= self._max_steps
        self._over = state.over or truncated
        return StepResult(
            state.text,
            reward=self._reward_of(state),
            terminated=state.over,
            truncated=truncated,
            state_key=state.key,
            success=state.won if self._over else None,
            valid=state.understood,
            admissible_actions=state.actions,
        )

    async def close(self) -> None:
        """Give the loaded game back for another attempt."""
        play, self._play = self._play, None
        if play is not None:
            POOL.give_back(play)

    def _reward_of(self, state: State) -> float:
        if self._reward == "success":
            return float(state.won)
        assert self._play is not None
        gain, self._score = state.score - self._score, state.score
        return gain / max(1, self._play.game.max_score)


@lru_cache(maxsize=1024)
def _walkthrough(game: generate.Game) -> tuple[str, ...] | None:
    """The walkthrough as far as it is needed; None where it does not win."""
    return _tried(game, (), game.walkthrough)


@lru_cache(maxsize=1024)
def _plan_from(game: generate.Game, taken: tuple[str, ...]) -> tuple[str, ...] | None:
    """Let the package plan from the state that `taken` leads to."""
    play = Play(game, plans=True)
    try:
        state = play.begin()
        for action in taken:
            if state.over:
                return None
            state = play.step(action)
        commands = play.winning_commands()
    finally:
        play.close()
    return _tried(game, taken, commands) if commands and not state.over else None


def _tried(game: generate.Game, taken: Sequence[str], commands: Sequence[str]) -> tuple[str, ...] | None:
    play = POOL.take(game)
    try:
        state = play.begin()
        for action in taken:
            state = play.step(action)
        used: list[str] = []
        for action in commands:
            if state.over:
                break
            state = play.step(action)
            used.append(action)
    finally:
        POOL.give_back(play)
    return tuple(used) if state.won else None


def _listed(values: Sequence[Any]) -> str:
    """Name the values, numbers in a row as a range."""
    numbers = [value for value in values if type(value) is int]
    if len(numbers) < len(values) or len(numbers) < 6:
        return ", ".join("true" if v is True else "false" if v is False else repr(v) for v in values)
    numbers.sort()
    ranges, first = [], numbers[0]
    for one, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != one + 1:
            ranges.append(f"{first} to {one}" if one > first else str(one))
            first = following if following is not None else first
    return ", ".join(ranges)
