"""ALFWorld: household tasks in text (Shridhar et al., arXiv 2010.03768), and new games in its form.

    ALFWorld()                          # official games where ALFWORLD_DATA names their folder, else generated ones
    ALFWorld(games="generated")

Official games are a download of their own. Generated ones come from the assets of the package
(`generate.py`): the same scenes, words and types of task, and not ALFWorld's games. Their task ids begin with
`alfworld-generated`, and no figure of theirs is one of ALFWorld.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.contrib.alfworld import data, generate
from environments.contrib.alfworld.game import POOL, Play, loaded
from environments.contrib.alfworld.generate import EXTRA, TASK_TYPES, TaskType
from environments.contrib.alfworld.oracle import Goal, plan
from environments.core.seed_splits import FIRST_SEED, SplitSize, asked_of
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import DataError
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ALFWorld:
    """Household tasks in text. A game takes about a second to load, a step 20 ms."""

    games: Literal["auto", "official", "generated"] = "auto"
    """Official games, from the folder that `ALFWORLD_DATA` names, or generated ones, which are not ALFWorld's; `auto`
    takes official ones where the variable is set."""
    task_types: Annotated[tuple[TaskType, ...], Field(min_length=1)] | None = None
    """Types of task that are asked for; null is all six."""
    max_steps: Annotated[int, Field(ge=1)] = 50
    """Maximum steps per episode; 50 is the usual limit."""
    n_train: SplitSize | None = None
    """Tasks of the split `train`, the first ones; null is all official ones, or 3000 generated ones."""
    n_dev: SplitSize | None = None
    """The same for `dev`, which is `valid_seen`; null is all official ones, or 140 generated ones."""
    n_test: SplitSize | None = None
    """The same for `test`, which is `valid_unseen`; null is all official ones, or 134 generated ones."""

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when alfworld is not installed."""
        version = version_of("alfworld", EXTRA)
        made = f"games generated from the assets of alfworld {version}, which are not ALFWorld's"
        return Properties(
            deterministic=True,
            replayable=True,
            oracle=True,
            splits=tuple(FIRST_SEED),
            package=f"alfworld {version}" if self._is_official else made,
            isolated=True,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`; generated ones are made when they are first played.

        Official games are those of `train`, `valid_seen` and `valid_unseen`, in the order of their paths. Generated
        ones are one per seed, and of each six that follow one another each is of another type.

        Raises:
            EnvError: no such split, or no official games where they are asked for.
            MissingPackageError: alfworld is not installed.
        """
        most: int | None = asked_of(self, split)
        return self._official(split)[:most] if self._is_official else self._generated(split, most)

    def start(self, task: Task) -> ALFWorldEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another environment or package version, or an official game has changed.
            EnvError: the engine cannot load the game.
            MissingPackageError: alfworld, textworld or fast-downward-textworld is not installed.
        """
        play = loaded(self._files(task)[0])
        try:
            return ALFWorldEpisode(play, self.max_steps)
        except BaseException:
            POOL.give_back(play)
            raise

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that reach the goal after `taken` within the step limit, tried out first; or None.

        See `environments.contrib.alfworld.oracle`: a script that reads the facts, and looks for nothing.
        """
        game, trajectory = self._files(task)
        play = loaded(game)
        try:
            view = play.begin()
            for action in taken:
                if not view.won:
                    view = play.step(action)
            found = None if view.won else plan(play.state(), Goal.of(trajectory))
            for action in found or ():
                view = play.step(action) if not view.won else view
        finally:
            POOL.give_back(play)
        is_way = found is not None and view.won and len(taken) + len(found) <= self.max_steps
        return found if is_way else None

    @property
    def _is_official(self) -> bool:
        return self.games == "official" or (self.games == "auto" and data.is_there())

    @property
    def _asked(self) -> tuple[TaskType, ...]:
        return self.task_types or TASK_TYPES

    def _official(self, split: str) -> Sequence[Task]:
        prefix = f"alfworld-{version_of('alfworld', EXTRA)}/{data.OFFICIAL[split]}"
        return [
            Task(
                id=f"{prefix}/{game.task_type}/{game.path.replace('/', '.')}-{game.digest}",
                seed=i,
                info={"path": game.path, "task_type": game.task_type, "digest": game.digest},
            )
            for i, game in enumerate(data.games(split))
            if game.task_type in self._asked
        ]

    def _generated(self, split: str, most: int | None) -> Sequence[Task]:
        n, first = most or {"train": 3000, "dev": 140, "test": 134}[split], FIRST_SEED[split]
        asked = set(self._asked)
        seeds = [seed for seed in range(first, first + 6 * (n // len(asked) + 1)) if generate.type_of(seed) in asked]
        return [self._made_task(split, seed) for seed in seeds[:n]]

    def _made_task(self, split: str, seed: int) -> Task:
        task_type = generate.type_of(seed)
        prefix = f"alfworld-generated-{generate.release()}/{split}"
        return Task(id=f"{prefix}/{task_type}/{seed}", seed=seed, info={"task_type": task_type})

    def _files(self, task: Task) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The two files of a task's game."""
        for split in FIRST_SEED:
            if not self._is_official and task.id == self._made_task(split, task.seed).id:
                made = _made(split, task.seed)
                return made.game, made.trajectory
            prefix = f"alfworld-{version_of('alfworld', EXTRA)}/{data.OFFICIAL[split]}/"
            path, digest = str(task.info.get("path")), str(task.info.get("digest"))
            if self._is_official and task.id.startswith(prefix) and task.id.endswith(f"-{digest}"):
                return data.read(split, path, digest)
        raise DataError(
            "the task is of another environment, of other games, or of another version of the package",
            where="ALFWorld",
            got=task.id,
            expected=f"a task of {'official' if self._is_official else 'generated'} games",
        )


class ALFWorldEpisode:
    """Attempt at a game.

    The key of a state covers all that changes in the game, in every receptacle, and leaves out what was looked at.
    """

    def __init__(self, play: Play, max_steps: int) -> None:
        self._play: Play | None = play
        self._max_steps, self._n_steps, self._over = max_steps, 0, False
        view = play.begin()
        self.opening = StepResult(view.text, state_key=view.key, admissible_actions=view.actions)

    async def step(self, action: str) -> StepResult:
        """Do one action; blanks around it do not count. What is not among the possible ones costs a step.

        Raises:
            EnvError: the episode is over or closed.
        """
        if self._play is None or self._over:
            raise after_end("ALFWorld step", action)
        view = self._play.step(action)
        self._n_steps += 1
        truncated = not view.won and self._n_steps >= self._max_steps
        self._over = view.won or truncated
        return StepResult(
            view.text,
            reward=float(view.won),
            terminated=view.won,
            truncated=truncated,
            state_key=view.key,
            success=view.won if self._over else None,
            valid=view.understood,
            admissible_actions=() if self._over else view.actions,
        )

    async def close(self) -> None:
        """Give the loaded engine back for another attempt."""
        play, self._play = self._play, None
        if play is not None:
            POOL.give_back(play)


@lru_cache(maxsize=64)
def _made(split: str, seed: int) -> generate.Made:
    return generate.make(split, seed)
