"""A level of MiniHack in play: the package's world, seeded, read and told in words.

NetHack draws from two rows of random numbers, mixes in true randomness now and then, and greets by phase of the moon.
Here both rows begin with the task's seed, nothing is mixed in, and the moon follows the seed, so that a game that is
played again goes as it went. A world stays loaded and is used for one game after another: loading takes 0.1 s and a
shell script that compiles the level, a new game 2 ms. Each has a copy of NetHack's library and a folder of its own, so
that several games may be under way, one thread making their moves in turn.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from environments.contrib.instance_pool import InstancePool
from environments.packages import import_from

EXTRA = "minihack"

#: What the agent may say, and the key of NetHack's keyboard that it stands for. A level offers some of them.
KEYS: Mapping[str, int] = {
    "apply": 97, "east": 108, "eat": 101, "kick": 4, "north": 107, "northeast": 117, "northwest": 121, "open": 111,
    "pick up": 44, "search": 115, "south": 106, "southeast": 110, "southwest": 98, "west": 104,
}  # fmt: skip
#: Columns and rows that each direction leads on.
WAYS: Mapping[str, tuple[int, int]] = {
    "north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0), "northeast": (1, -1), "southeast": (1, 1),
    "southwest": (-1, 1), "northwest": (-1, -1),
}  # fmt: skip
#: Runs (NLE's `CompassDirectionLonger`), which only NetHack's own tasks have: on until something interesting appears;
#: they follow corridors.
RUNS: Mapping[str, int] = {f"far {way}": KEYS[way] - 32 for way in WAYS}
#: Answers to a question of the game; on the keyboard they are the keys of two directions.
ANSWERS: Mapping[str, int] = {"no": 110, "yes": 121}
#: Key that leaves a question for an object, which "yes" and "no" do not answer.
_CANCEL = 13

_OBSERVED = ("glyphs", "chars", "blstats", "message", "inv_strs", "inv_letters", "screen_descriptions")
_SOLVED = 2  # the package's number for it
_NEVER = 10**9
_WHICH = re.compile(r"\[(?:- )?(\S+) or \?\*\]")  # which object: [a-dh or ?*]
_MOST_THINGS = 12
_DIED = "You have died."
# What the map shows well enough by itself.
_NOT_TOLD = frozenset({"", "floor of a room", "dark part of a room", "stone", "wall", "corridor", "lit corridor"})


@dataclass(frozen=True)
class Cells:
    """Cells that are seen or remembered, one after another.

    As four rows, and not as a table of pairs, they take a tenth of the room. Where many games take turns, each finds
    what it left in slower memory, and what it left is freed when it moves.

    Attributes:
        columns: of each cell.
        rows: of each cell.
        characters: of each cell, as the map shows it.
        meanings: what each character means there.
    """

    columns: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    characters: str = ""
    meanings: tuple[str, ...] = ()

    def table(self) -> Mapping[tuple[int, int], tuple[str, str]]:
        """Character and meaning of each cell by column and row."""
        places = zip(self.columns, self.rows, strict=True)
        return dict(zip(places, zip(self.characters, self.meanings, strict=True), strict=True))

    def map(self) -> str:
        """The characters in their places; empty where nothing is seen."""
        if not self.columns:
            return ""
        left, top, width = min(self.columns), min(self.rows), max(self.columns) - min(self.columns) + 1
        lines = [[" "] * width for _ in range(top, max(self.rows) + 1)]
        for x, y, character in zip(self.columns, self.rows, self.characters, strict=True):
            lines[y - top][x - left] = character
        return "\n".join("".join(line).rstrip() for line in lines)

    def things(self, at: tuple[int, int]) -> str:
        """Nearest thing of each kind by distance from `at`, with the count of others."""
        found: dict[str, list[tuple[int, int, int, int]]] = {}
        for x, y, what in zip(self.columns, self.rows, self.meanings, strict=True):
            if what in _NOT_TOLD:
                continue
            right, down = x - at[0], y - at[1]
            if (right, down) != (0, 0):
                found.setdefault(what, []).append((max(abs(right), abs(down)), abs(right) + abs(down), down, right))
        nearest = sorted((min(places), what, len(places)) for what, places in found.items())[:_MOST_THINGS]
        told = [
            f"{what} {place(right, down)}{f' and {n - 1} more' if n > 1 else ''}"
            for (_, _, down, right), what, n in nearest
        ]
        return "; ".join(told) or "nothing"


@dataclass(frozen=True)
class View:
    """Observation after an action, or the end of the game.

    Attributes:
        message: what the game says.
        seen: the cells that are seen or remembered.
        at: column and row of the agent.
        hit_points: those left and those at most.
        carried: what is carried.
        asks: whether the game waits for an answer.
        glyphs: the package's numbers of all cells, as bytes.
        objects: answers to a question for an object, with what they are; empty where the game asks for none.
        reward: of this action, in the package's units.
        over: whether the game has ended.
        won: whether it ended as the level wants it to.
        level: numbers of the dungeon and of the level in it.
    """

    message: str
    seen: Cells
    at: tuple[int, int]
    hit_points: tuple[int, int]
    carried: tuple[str, ...]
    asks: bool
    glyphs: bytes
    objects: tuple[tuple[str, str], ...] = ()
    reward: float = 0.0
    over: bool = False
    won: bool = False
    level: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """Hash of all that is seen, remembered and carried, without messages, points and the number of moves."""
        if self.over:
            return "won" if self.won else "lost"
        seen = (self.glyphs, self.at, self.hit_points, self.carried, self.asks)
        return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()

    @cached_property
    def cells(self) -> Mapping[tuple[int, int], tuple[str, str]]:
        """Of each cell that is seen or remembered, its character and what that means."""
        return self.seen.table()

    @cached_property
    def text(self) -> str:
        """The view in words: message, map, things by distance, hit points."""
        return self.around(self.seen.map())

    def around(self, surroundings: str) -> str:
        """The view in words, with `surroundings` in place of the map."""
        if self.over:
            return "Solved." if self.won else f"{self.message} The game is over.".strip()
        things, points = self.seen.things(self.at), "HP {} of {}.".format(*self.hit_points)
        objects = "; ".join(f"{letter}: {what}" for letter, what in self.objects)
        return "\n".join(filter(None, [self.message, objects, surroundings, f"You see: {things}.", points]))


def name_of(level: str) -> str:
    """Name of a level in the registry: of MiniHack, or of a task in whole NetHack, which NLE has."""
    return f"{level.replace('-', '')}-v0" if level.startswith("NetHack-") else f"MiniHack-{level}-v0"


class World:
    """Package world of a level, replayable from any seed, by one thread at a time."""

    def __init__(self, level: str) -> None:
        """Load a level. Raises MissingPackageError."""
        self.level = level
        self._base = _import("nle.env.base").NLE
        _import("minihack")
        make = _import("gymnasium").make
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the registry finds that levels of minigrid have newer versions
            made = make(name_of(level), disable_env_checker=True, observation_keys=_OBSERVED, fix_moon_phase=True)
        self._env: Any = made.unwrapped
        self._env._max_episode_steps = _NEVER  # the episode counts, and a game that is given up tells nothing more
        self._env.nethack._obs = tuple(
            buffer.view(_Uncopied) if key == "screen_descriptions" else buffer
            for key, buffer in self._env.nethack._obs_buffers.items()
        )
        self._rooms = getattr(self._env, "minigrid_env", None)
        self._numbers = {int(key): i for i, key in enumerate(self._env.actions)}
        self.keys = self._known({**KEYS, **RUNS})
        self._answers = self._known(ANSWERS)

    def begin(self, seed: int) -> View:
        """Start the game of a seed."""
        # Not the level's own method: that of the MultiRoom levels calls one that minigrid has no more.
        self._base.seed(self._env, seed, seed, False)
        if self._rooms is not None:
            self._env.minigrid_env = _Seeded(self._rooms, seed)
        observation, _ = self._env.reset()
        return self._view(observation)

    def step(self, number: int) -> View:
        """Do the action of this number."""
        observation, reward, done, _, told = self._env.step(number)
        if not done:
            return self._view(observation, float(reward))
        # What the package shows now is of the menus through which it has left the game.
        won = int(told["end_status"]) == _SOLVED and reward > 0
        return View("" if won else _DIED, Cells(), (0, 0), (0, 0), (), False, b"", (), float(reward), True, won)

    def numbers(self, view: View) -> Mapping[str, int]:
        """Valid actions with the package's numbers."""
        if not view.asks:
            return self.keys
        if "direction" in view.message:
            return {way: self.keys[way] for way in WAYS}
        if view.objects:
            return self._known({name: _CANCEL if name == "cancel" else ord(name) for name, _ in view.objects})
        return self._answers

    def _objects(self, message: str, letters: str, carried: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Letters, of which the level has the keys, and names of the objects that `message` asks for, and `cancel`."""
        asked = _WHICH.search(message)
        if asked is None:
            return ()
        offered = re.compile(f"[{asked[1]}]")  # the game lists letters as a regular expression does
        things = zip(letters, carried, strict=True)
        return *((x, what) for x, what in things if offered.match(x) and ord(x) in self._numbers), ("cancel", "none")

    def _known(self, keys: Mapping[str, int]) -> Mapping[str, int]:
        """Those of the keys that the level has, with the package's numbers."""
        return {name: self._numbers[key] for name, key in keys.items() if key in self._numbers}

    def close(self) -> None:
        """Free the world and the folder that it plays in."""
        self._env.close()

    def _view(self, observation: Mapping[str, Any], reward: float = 0.0) -> View:
        stats = observation["blstats"]
        rows, columns = (observation["chars"] != 32).nonzero()
        told = np.asarray(observation["screen_descriptions"])[rows, columns]
        seen = Cells(
            tuple(columns.tolist()),
            tuple(rows.tolist()),
            observation["chars"][rows, columns].tobytes().decode("latin-1"),
            # As one word each, most of which are alike.
            tuple(map(_meaning, told.view(f"S{told.shape[1]}")[:, 0].tolist())),
        )
        internal = self._env.last_observation[self._env._internal_index]
        message, letters = _words(observation["message"]), _words(observation["inv_letters"])
        carried = tuple(map(_words, observation["inv_strs"][: len(letters)]))
        return View(
            message=message,
            seen=seen,
            at=(int(stats[0]), int(stats[1])),
            hit_points=(int(stats[10]), int(stats[11])),
            carried=carried,
            asks=bool(internal[1]),
            glyphs=observation["glyphs"].tobytes(),
            objects=self._objects(message, letters, carried),
            reward=reward,
            level=(int(stats[23]), int(stats[24])),
        )


class _Uncopied(np.ndarray[Any, Any]):
    """Screen descriptions of all cells, 130 KB, shared rather than copied.

    Before a step the package copies twice what was seen, this too, and does not read it there; that takes time, and
    room in the processor's caches which other games need.
    """

    def copy(self, order: Any = "C") -> Any:
        return self


class _Seeded:
    """A world of minigrid that begins with one seed; the MultiRoom levels take their rooms from it."""

    def __init__(self, world: Any, seed: int) -> None:
        self._world, self._seed = world, seed

    def reset(self) -> Any:
        return self._world.reset(seed=self._seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


#: Worlds that are loaded and not in play, as many as a worker process has games under way.
POOL: InstancePool[str, World] = InstancePool(World, lambda world: world.level, most=32, close=World.close)


def _import(module: str) -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package asks setuptools where its files are, which warns of that
        return import_from(module, "minihack", EXTRA)


def _words(characters: Any) -> str:
    return _meaning(bytes(characters))


@lru_cache(maxsize=4096)
def _meaning(characters: bytes) -> str:
    return characters.split(b"\0", 1)[0].decode("latin-1").strip()


def place(right: int, down: int) -> str:
    """Place by columns to the east and rows to the south, such as `1 north 3 east`."""
    north = f"{abs(down)} {'south' if down > 0 else 'north'}" if down else ""
    east = f"{abs(right)} {'east' if right > 0 else 'west'}" if right else ""
    return " ".join(filter(None, (north, east)))
