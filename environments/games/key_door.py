"""A house of rooms in words: find the key, carry it to the locked door, open it.

Each task draws a house on a grid of rooms: passages that make it one connected whole, a few more that make loops, and
rooms for the start, the key and the door. One observation is one line:

    Attic. Ways: east, south. A locked door is here. The key is north east.

Nothing is rewarded but the opened door, many moves away. Every move can be taken back, so that an attempt, and the
attempts at one task, meet the same states again and again: a task on which it matters to which turn credit goes.

Splits are ranges of seeds: `environments.core.seed_splits`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.normalise import plain_words
from environments.core.procedural import Attempt, digest, draw_for
from environments.core.seed_splits import Seeded
from rlhf.checking import CheckContext
from rlhf.data import Task
from rlhf.settings import STRICT

#: A row and a column; row 0 is the northernmost, column 0 the westernmost.
Cell = tuple[int, int]

#: The ways, by what a step adds to row and column.
WAYS: Mapping[str, Cell] = {"east": (0, 1), "north": (-1, 0), "south": (1, 0), "west": (0, -1)}

_TAKE, _OPEN = "take key", "open door"
_ACTIONS = (*(f"go {way}" for way in WAYS), _OPEN, _TAKE)

_OTHER_WORDS: Mapping[str, str] = {
    "go east": "e,east,move east,walk east",
    "go north": "move north,n,north,walk north",
    "go south": "move south,s,south,walk south",
    "go west": "move west,w,walk west,west",
    _OPEN: "open,open the door,unlock,unlock door,unlock the door",
    _TAKE: "get key,grab key,pick up key,pick up the key,take,take the key",
}

_MEANT: Mapping[str, str] = {action: action for action in _ACTIONS} | {
    words: action for action, others in _OTHER_WORDS.items() for words in others.split(",")
}

_ROOMS = (
    "attic bedroom cellar chapel closet corridor dairy den foyer gallery garage hall kitchen larder library lobby "
    "lounge nursery office pantry parlour porch study tower workshop"
)


@plain_dataclass(frozen=True, slots=True)
class House:
    """Random draw of one task.

    Attributes:
        rooms: name of each cell.
        exits: cell -> way -> the cell it leads to; ways in alphabetical order.
        start, key, door: three different cells.
    """

    rooms: Mapping[Cell, str]
    exits: Mapping[Cell, Mapping[str, Cell]]
    start: Cell
    key: Cell
    door: Cell

    def path(self, origin: Cell, goal: Cell) -> list[str]:
        """Shortest path from `origin` to `goal`, deterministic on ties."""
        came: dict[Cell, tuple[Cell, str]] = {}
        queue = deque([origin])
        while queue and goal not in came and goal != origin:
            cell = queue.popleft()
            for way, target in self.exits[cell].items():
                if target != origin and target not in came:
                    came[target] = (cell, way)
                    queue.append(target)
        ways: list[str] = []
        cell = goal
        while cell != origin:
            cell, way = came[cell]
            ways.append(way)
        return ways[::-1]


@lru_cache(maxsize=4096)
def draw(seed: int, rows: int, columns: int, n_loops: int) -> House:
    """Draw the house of a task; one seed gives one house, in any process.

    A house belongs to the split of its first room and of the way out, whatever its other rooms are.
    """
    return draw_for("keyhole", seed, lambda rng: drawn(rng, rows, columns, n_loops), told)


def told(house: House) -> tuple[str, tuple[str, ...]]:
    """Opening without compass directions, and the solution of the house."""
    episode = KeyholeEpisode(house, compass=False, max_steps=1)
    return episode.opening.reply, episode.way_out()


def drawn(rng: random.Random, rows: int, columns: int, n_loops: int) -> House:
    """Draw any house.

    The passages are those of a random spanning tree and `n_loops` of the others, or all of them if there are fewer.
    """
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    walls = [(cell, way) for cell in cells for way in ("east", "south") if _beside(cell, way) in cells]
    rng.shuffle(walls)
    part = {cell: i for i, cell in enumerate(cells)}
    passages: list[tuple[Cell, str]] = []
    spare: list[tuple[Cell, str]] = []
    for cell, way in walls:
        here, there = part[cell], part[_beside(cell, way)]
        (spare if here == there else passages).append((cell, way))
        part = {c: here if number == there else number for c, number in part.items()}
    links = [*passages, *spare[:n_loops]]
    exits: dict[Cell, dict[str, Cell]] = {cell: {} for cell in cells}
    for cell, way in links:
        exits[cell][way] = _beside(cell, way)
        exits[_beside(cell, way)][_BACK[way]] = cell
    start, key, door = rng.sample(cells, 3)
    return House(
        rooms=dict(zip(cells, rng.sample(_ROOMS.split(), len(cells)), strict=True)),
        exits={cell: dict(sorted(found.items())) for cell, found in exits.items()},
        start=start,
        key=key,
        door=door,
    )


_BACK: Mapping[str, str] = {"east": "west", "south": "north"}


def _beside(cell: Cell, way: str) -> Cell:
    return cell[0] + WAYS[way][0], cell[1] + WAYS[way][1]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Keyhole(Seeded):
    """Key-and-door houses drawn by seed, with a reward at the very end; pure Python."""

    rows: Annotated[int, Field(ge=2, le=5)] = 4
    """Rooms of a house from north to south."""
    columns: Annotated[int, Field(ge=2, le=5)] = 4
    """Rooms of a house from west to east."""
    loops: Annotated[int, Field(ge=0)] = 6
    """Passages beside those that make a house one whole: 0 is a maze without loops, 9 opens every wall of 4 x 4."""
    compass: bool = True
    """Tell in which direction the key lies, and once it is taken the door, through the walls. Without it the house has
    to be explored and remembered."""
    max_steps: Annotated[int, Field(ge=1)] = 16
    """Maximum steps per episode; longer ones are truncated."""

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Warn of houses that nobody leaves within `max_steps`."""
        lengths = [len(self.start(task).way_out()) for task in self.tasks("train")[:100]]
        n = sum(length > self.max_steps for length in lengths)
        if n:
            yield (
                f"{context.path}.max_steps is {self.max_steps}, and {n} of the first {len(lengths)} houses take more, "
                f"up to {max(lengths)}: nobody can solve them"
            )

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`: one per seed.

        Raises:
            EnvError: no such split.
        """
        return self.listed(split, f"keyhole-2/{self.rows}x{self.columns}+{self.loops}")

    def start(self, task: Task) -> KeyholeEpisode:
        """Begin one attempt."""
        return KeyholeEpisode(self._house(task), compass=self.compass, max_steps=self.max_steps)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give the fewest actions that solve `task` after `taken`; None where too few steps are left."""
        episode = self.start(task)
        episode.after(taken)
        path = episode.way_out()
        return path if episode.solved or (not episode.over and len(path) <= episode.steps_left) else None

    def subgoal(self, task: Task, taken: Sequence[str]) -> str:
        """Name what the oracle is about after `taken`."""
        plan = self.plan(task, taken)
        return "fetch the key" if plan is None or _TAKE in plan else "open the door"

    def _house(self, task: Task) -> House:
        return draw(task.seed, self.rows, self.columns, self.loops)


class KeyholeEpisode(Attempt):
    """Attempt at a house.

    The key of a state tells house, room and whether the key is carried; the number of steps taken is left out.
    """

    def __init__(self, house: House, *, compass: bool, max_steps: int) -> None:
        super().__init__(max_steps)
        self._house, self._compass = house, compass
        self._cell = house.start
        self._has_key = False
        self._name = digest(repr(house))
        self.opening = self.opened(f"Find the key and open the door.\n{self._sees()}")

    def do(self, action: str) -> tuple[str, bool]:
        """Do one action. Whatever is impossible or not understood costs a step and changes nothing else."""
        understood = read_action(action)
        said = self._done(understood)
        return "The door opens." if self.solved else f"{said}{self._sees()}", understood is not None

    def _done(self, action: str | None) -> str:
        """Do an action, or nothing for an invalid one; returns what a failure says."""
        house = self._house
        if action is None:
            return f"Unknown action. Actions: {', '.join(_ACTIONS)}.\n"
        if action == _TAKE:
            if self._has_key or self._cell != house.key:
                return "No key to take. "
            self._has_key = True
        elif action == _OPEN:
            if self._cell != house.door:
                return "No door to open. "
            if not self._has_key:
                return "It is locked. "
            self.done, self.solved, self.score = True, True, 1.0
        elif action.removeprefix("go ") in house.exits[self._cell]:
            self._cell = house.exits[self._cell][action.removeprefix("go ")]
        else:
            return "No way there. "
        return ""

    def way_out(self) -> tuple[str, ...]:
        """Give the fewest actions that solve the task from here."""
        if self.solved:
            return ()
        house = self._house
        if self._has_key:
            return (*(f"go {way}" for way in house.path(self._cell, house.door)), _OPEN)
        ways, on = house.path(self._cell, house.key), house.path(house.key, house.door)
        return (*(f"go {way}" for way in ways), _TAKE, *(f"go {way}" for way in on), _OPEN)

    def _sees(self) -> str:
        house, cell = self._house, self._cell
        said = f"{house.rooms[cell].capitalize()}. Ways: {', '.join(house.exits[cell])}."
        wanted, goal = ("door", house.door) if self._has_key else ("key", house.key)
        if cell == house.door:
            said += " A locked door is here."
        if cell == house.key and not self._has_key:
            said += " The key is here."
        if cell != goal and self._compass:
            said += f" The {wanted} is {direction(cell, goal)}."
        return said

    def possible(self) -> tuple[str, ...]:
        """Return the actions that would change something."""
        house, cell = self._house, self._cell
        deeds = [_OPEN] if self._has_key and cell == house.door else []
        deeds += [_TAKE] if not self._has_key and cell == house.key else []
        return tuple(sorted([*(f"go {way}" for way in house.exits[cell]), *deeds]))

    def state(self) -> str:
        """Return house, room and whether the key is carried."""
        stage = "out" if self.solved else "key" if self._has_key else "no key"
        return f"{self._name}/{self._house.rooms[self._cell]}/{stage}"


def direction(origin: Cell, goal: Cell) -> str:
    """Compass direction from one cell to another, such as north east; empty for the same cell."""
    rows, columns = goal[0] - origin[0], goal[1] - origin[1]
    northerly = "north" if rows < 0 else "south" if rows > 0 else ""
    easterly = "east" if columns > 0 else "west" if columns < 0 else ""
    return " ".join(filter(None, (northerly, easterly)))


def read_action(text: str) -> str | None:
    """Return the action that `text` names, or None.

    Case, white space, `_`, `-`, quotes and full stops are ignored.
    """
    return _MEANT.get(plain_words(text, 40))
