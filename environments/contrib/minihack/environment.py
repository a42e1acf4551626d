"""MiniHack's navigation levels and NetHack's own tasks told in words, played by NetHack itself.

    MiniHack(level="Room-Monster-5x5")

An observation is what the game says, the map in NetHack's characters, the things on it by name and distance, and the
hit points. The words are our own, so scores are not those of other wrappers in words.

Sources: MiniHack, arXiv 2109.13202; the NetHack Learning Environment, arXiv 2006.13760, for the tasks `NetHack-...`.

The package has no splits. Here a split is a range of seeds (`environments.core.seed_splits`). Small levels draw the
same map for
many seeds; `Room-5x5`, `Room-15x15` and the labyrinths have only one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.contrib.minihack import oracle
from environments.contrib.minihack.game import EXTRA, POOL, View, World
from environments.core.normalise import plain_words
from environments.core.procedural import Attempt
from environments.core.seed_splits import FIRST_SEED, Seeded, SplitSize, split_in
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import nearest
from rlhf.settings import STRICT

_ON_MAP = ", which the map shows as >"
_STAIRS = f"Go to the staircase down{_ON_MAP}."
_WHOLE = "This is the first level of the whole game."
_MEMENTO = (
    "Kill the grid bug at the end of the right path; the wrong one ends at a board that squeaks. The monster that "
    "sleeps at the start tells which is right."
)
#: Of each family of levels: what is wanted, and the levels with the number of steps that the package allows.
FAMILIES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "Room": (
        _STAIRS,
        {
            f"Room-{kind}{size}x{size}": 20 * size
            for kind in ("", "Dark-", "Monster-", "Random-", "Trap-", "Ultimate-")
            for size in (5, 15)
        },
    ),
    "Corridor": (_STAIRS, dict.fromkeys(("Corridor-R2", "Corridor-R3", "Corridor-R5"), 1000)),
    "CorridorBattle": (_STAIRS, dict.fromkeys(("CorridorBattle", "CorridorBattle-Dark"), 350)),
    "ExploreMaze": (
        f"Eat apples, and then: {_STAIRS[0].lower()}{_STAIRS[1:]}",
        {f"ExploreMaze-{how}{known}": 500 for how in ("Easy", "Hard") for known in ("", "-Mapped")},
    ),
    "HideNSeek": (
        _STAIRS,
        {"HideNSeek": 200, "HideNSeek-Big": 400, "HideNSeek-Lava": 200, "HideNSeek-Mapped": 200},
    ),
    "KeyRoom": (
        f"Pick up the key, and apply it beside the locked door. {_STAIRS}",
        {"KeyRoom-Fixed-S5": 200}
        | {f"KeyRoom-{dark}S{size}": limit for dark in ("", "Dark-") for size, limit in ((5, 200), (15, 400))},
    ),
    "Labyrinth": (_STAIRS, {"Labyrinth-Big": 1000, "Labyrinth-Small": 400}),
    "MazeWalk": (
        _STAIRS,
        {
            f"MazeWalk-{known}{size}": 200 if size == "9x9" else 1000
            for known in ("", "Mapped-")
            for size in ("9x9", "15x15", "45x19")
        },
    ),
    "Memento": (_MEMENTO, dict.fromkeys(("Memento-F2", "Memento-F4", "Memento-Short-F2"), 5000)),
    "MultiRoom": (
        _STAIRS,
        {
            f"MultiRoom-N{n}{kind}": limit
            for n, limit in ((2, 40), (4, 120), (6, 240))
            for kind in ("", "-Extreme", "-Lava", "-LavaMonsters", "-Locked", "-Monster")
        }
        | {f"MultiRoom-N{n}{kind}-OpenDoor": limit for n, limit in ((6, 240), (10, 360)) for kind in ("", "-Lava")}
        | dict.fromkeys(("MultiRoom-N10", "MultiRoom-N10-Lava"), 360),
    ),
    "NetHack": (f"{_WHOLE} {_STAIRS}", {"NetHack-Staircase": 5000}),
    "NetHackPet": (f"{_WHOLE} {_STAIRS} Your pet has to stand beside you then.", {"NetHack-StaircasePet": 5000}),
    "River": (
        f"Push boulders into the water to cross it. {_STAIRS}",
        dict.fromkeys(("River", "River-Lava", "River-Monster", "River-MonsterLava", "River-Narrow"), 350),
    ),
}
#: All levels and the number of steps that the package allows.
LEVELS: Mapping[str, int] = {name: limit for _, levels in FAMILIES.values() for name, limit in levels.items()}
#: Families of which the oracle solves most levels.
EXPLORED = frozenset({"Room", "Corridor", "ExploreMaze", "Labyrinth", "MazeWalk", "MultiRoom", "NetHack"})
# Families in which an action may take for ever, so that a game has a worker process to itself.
_HANGS = frozenset({"KeyRoom"})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MiniHack(Seeded):
    """MiniHack level as a text environment. A step takes a fraction of a millisecond."""

    level: str = "Room-Random-5x5"
    """Name of the level, with or without `MiniHack-` before and `-v0` after it."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Maximum steps per episode; null is the level's own limit (100 in Room-Random-5x5)."""
    n_train: SplitSize = 10_000
    """Tasks of the split `train`: one per seed, from the first on."""
    reward: Literal["success", "package"] = "success"
    """1 for the step that solves the level, or what the package pays: 1 then, and -0.01 for an action in which no time
    passes, such as to walk into a wall."""

    shown: Literal["map", "words"] = "map"
    """`map`, or `words`: the directions in which one can move, doors, boulders and traps included, and the offset of
    the nearest frontier cell, which is known, was not visited and borders on an unseen one."""

    @field_validator("level")
    @classmethod
    def _short_name(cls, level: str) -> str:
        name = level.removeprefix("MiniHack-").removesuffix("-v0")
        if name not in LEVELS:
            raise ValueError(
                f"no text level of MiniHack is called '{level}'; {nearest(name, LEVELS) or ', '.join(LEVELS)}"
            )
        return name

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when minihack is not installed."""
        return Properties(
            deterministic=True,
            replayable=True,
            oracle=self.demonstrates,
            splits=tuple(FIRST_SEED),
            package=f"minihack {version_of('minihack', EXTRA)}, nle {version_of('nle', EXTRA)}",
            isolated=True,
            interleaves=self._family not in _HANGS,
            repeats=True,
        )

    @property
    def demonstrates(self) -> bool:
        """True if the oracle solves most levels of the family."""
        return self._family in EXPLORED

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`: one per seed.

        Raises:
            EnvError: no such split.
            MissingPackageError: minihack is not installed.
        """
        return self.listed(split, self._prefix)

    def start(self, task: Task) -> MiniHackEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another level or package version.
            MissingPackageError: minihack, nle, or minigrid for the MultiRoom levels, is not installed.
        """
        split_in(task, self._prefix, "MiniHack")
        goal = FAMILIES[self._family][0]
        if self.shown == "words":
            goal = goal.replace(_ON_MAP, "")
        with POOL.kept(self.level) as world:
            return MiniHackEpisode(world, world.begin(task.seed), goal, self._limit, self.reward, self.shown)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that solve `task` after `taken` within the step limit, tried out first; or None.

        See `environments.contrib.minihack.oracle` for what it cannot do.
        """
        split_in(task, self._prefix, "MiniHack")
        with POOL.lent(self.level) as world:
            explorer = oracle.Explorer(world, world.begin(task.seed))
            for text in taken:
                known = {} if explorer.view.over else world.numbers(explorer.view)
                number = read_action(text, known)
                if number is not None:
                    explorer.do(next(name for name, one in known.items() if one == number))
            return explorer.solve(self._limit - len(taken))

    @property
    def _family(self) -> str:
        return next(name for name, (_, levels) in FAMILIES.items() if self.level in levels)

    @property
    def _limit(self) -> int:
        return self.max_steps or LEVELS[self.level]

    @property
    def _prefix(self) -> str:
        return f"minihack-{version_of('minihack', EXTRA)}-nle-{version_of('nle', EXTRA)}/{self.level}"


class MiniHackEpisode(Attempt):
    """Attempt at a level.

    The key of a state covers what is seen, remembered and carried, and the exits and the nearest frontier cell where
    these are told; not what is out of sight, nor where the row of random numbers stands, so that monsters may go on in
    other ways from states of equal key.
    """

    def __init__(
        self,
        world: World,
        view: View,
        goal: str,
        max_steps: int,
        reward: Literal["success", "package"],
        shown: Literal["map", "words"],
    ) -> None:
        super().__init__(max_steps)
        self._world: World | None = world
        self._view, self._reward, self._shown, self._paid = view, reward, shown, 0.0
        self._visited: oracle.Visited = {view.at: ""}
        text, self._key = self._told()
        self.opening = self.opened(f"Task: {goal}\n{text}")

    def do(self, action: str) -> tuple[str, bool]:
        """Do one action. Text that is none of them costs a step and changes nothing else."""
        assert self._world is not None
        known, before = self._world.numbers(self._view), self._view
        number = read_action(action, known)
        if number is not None:
            self._view = self._world.step(number)
        view = self._view
        if self._shown == "words":
            oracle.mark_visited(self._visited, before, view)
        text, self._key = self._told()
        self.done, self.solved = view.over, view.won
        if number is None:
            self._paid = 0.0
            return f"Unknown action. Actions: {', '.join(sorted(known))}.\n{text}", False
        self._paid = float(view.won) if self._reward == "success" else view.reward
        return text, True

    def earned(self, before: float) -> float:
        """Return the package's reward, or 1 for a solved level."""
        return self._paid

    def state(self) -> str:
        """Return the key of what is known of the level."""
        return self._key

    def possible(self) -> tuple[str, ...]:
        """Return the actions that the level knows now."""
        return () if self._world is None else tuple(sorted(self._world.numbers(self._view)))

    def _told(self) -> tuple[str, str]:
        """Text and key of the present state."""
        if self._shown == "map" or self._view.over:
            return self._view.text, self._view.key
        told = oracle.surroundings(self._view, self._visited)
        return self._view.around(told), f"{self._view.key} {told}"

    async def close(self) -> None:
        """Give the world back for another attempt."""
        world, self._world, self.done = self._world, None, True
        if world is not None:
            POOL.give_back(world)


def read_action(text: str, known: Mapping[str, int]) -> int | None:
    """Number of the action that `text` names, of those that are known now; or None.

    Case, white space, `_`, `-`, quotes, full stops and a verb of motion before a direction are ignored. `run` is `far`.
    """
    words = re.sub(r"^(go|move|walk|step) ", "", plain_words(text, 40))
    words = re.sub(r"^run (far )?", "far ", {"pickup": "pick up"}.get(words, words))
    words = re.sub(r"^(far )?(north|south) (east|west)$", r"\1\2\3", words)
    return known.get(words)
