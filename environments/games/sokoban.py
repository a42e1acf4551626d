"""Sokoban in characters: push every box onto a goal.

    ######
    #_P__#
    #_X_##
    #__O_#
    #____#
    ######

A room is carved into rock, goals are laid out in it, and boxes are pulled off the goals: whatever was pulled away can
be pushed back, so each task can be solved. A push cannot always be taken back: an agent may get stuck.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.normalise import plain_words
from environments.core.procedural import Attempt, Drawn, digest
from rlhf.data import Task
from rlhf.settings import STRICT

#: A row and a column; row 0 is the uppermost.
Cell = tuple[int, int]
Boxes = frozenset[Cell]

#: The moves, by what they add to row and column.
MOVES: Mapping[str, Cell] = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}

_OTHER_WORDS: Mapping[str, str] = {"down": "d,south", "left": "l,west", "right": "r,east", "up": "u,north"}
_MEANT: Mapping[str, str] = {
    f"{verb}{word}": move
    for move, others in _OTHER_WORDS.items()
    for word in (move, *others.split(","))
    for verb in ("", "go ", "move ", "push ", "walk ")
}

#: Share of the inside that is carved out, walks of pulls for one task, and states after which the solver gives up.
_OPEN, _WALKS, _MOST_STATES = 0.75, 6, 300_000

_RULES = (
    "Push every box onto a goal. A move to where a box is pushes it, if nothing is behind it; boxes cannot be pulled.\n"
    "# wall, _ floor, O goal, X box, P you, B box on a goal, S you on a goal.\n"
    f"Moves: {', '.join(MOVES)}."
)


@plain_dataclass(frozen=True)
class Room:
    """Floor and goals of a room; sorted."""

    floor: tuple[Cell, ...]
    goals: tuple[Cell, ...]


class Position(NamedTuple):
    """Cells of the player and of the boxes."""

    player: Cell
    boxes: Boxes


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sokoban(Drawn):
    """Push boxes onto goals in rooms carved by seed, each of which can be solved; pure Python."""

    rows: Annotated[int, Field(ge=5, le=12)] = 6
    """Rows of the grid, with the walls around it."""
    columns: Annotated[int, Field(ge=5, le=12)] = 6
    """Columns of the grid, with the walls around it."""
    boxes: Annotated[int, Field(ge=1, le=4)] = 1
    """Boxes, and as many goals."""
    pulls: Annotated[int, Field(ge=1)] = 6
    """Maximal number of pulls from the goals at a task's start: the pushes that it takes."""
    max_steps: Annotated[int, Field(ge=1)] = 30
    """Maximum moves per episode; longer ones are truncated."""
    reward: Literal["success", "boxes"] = "success"
    """1 for the last box alone; or for each box its share as it reaches a goal, and minus that as it leaves one."""

    name: ClassVar[str] = "sokoban"

    @property
    def level(self) -> str:
        """Size, boxes and pulls."""
        return f"{self.rows}x{self.columns}-{self.boxes}-{self.pulls}"

    def draw(self, rng: random.Random) -> Room:
        """Carve a room from one cell, and lay out goals with at least one box that can be pulled."""
        inside = [(r, c) for r in range(1, self.rows - 1) for c in range(1, self.columns - 1)]
        while True:
            floor, edge = set[Cell](), [rng.choice(inside)]
            while len(floor) < _OPEN * len(inside):
                cell = edge.pop(rng.randrange(len(edge)))
                floor.add(cell)
                beside = (_next(cell, move) for move in MOVES)
                edge += [c for c in beside if c in inside and c not in floor and c not in edge]
            goals = rng.sample(sorted(floor), self.boxes)
            free = floor.difference(goals)
            if any(_next(box, m) in free and _next(box, m, 2) in free for box in goals for m in MOVES):
                return Room(tuple(sorted(floor)), tuple(sorted(goals)))

    def start(self, task: Task) -> SokobanEpisode:
        """Begin one attempt."""
        room = self.instance(task)
        return SokobanEpisode(self, room, pulled(room, self.pulls, task.seed))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Fewest moves that solve `task` after `taken`; None where it is stuck, or too few steps are left."""
        episode = self.start(task)
        episode.after(taken)
        if episode.solved:
            return ()
        path = None if episode.over else solve(episode.room, episode.position)
        return path if path is not None and len(path) <= episode.steps_left else None


class SokobanEpisode(Attempt):
    """Attempt at a room; the score counts the boxes on goals.

    The key of a state tells the room, where the player stands and where boxes are.
    """

    def __init__(self, settings: Sokoban, room: Room, position: Position) -> None:
        super().__init__(settings.max_steps)
        self.room, self._settings, self._floor = room, settings, frozenset(room.floor)
        self._name = digest(repr(room))
        self._put(position)
        self.opening = self.opened(f"{_RULES}\n{self.picture()}")

    def _put(self, position: Position) -> None:
        goals = frozenset(self.room.goals)
        self.position, self.score = position, len(position.boxes & goals)
        self.done = self.solved = position.boxes == goals

    def do(self, action: str) -> tuple[str, bool]:
        """Do one move. Whatever is impossible or not understood costs a step and changes nothing else."""
        move = read_move(action)
        if move is None:
            return f"Unknown move. Moves: {', '.join(MOVES)}.\n{self.picture()}", False
        after = moved(self._floor, self.position, move)
        if after is None:
            return f"Nothing moves.\n{self.picture()}", True
        self._put(after)
        return "Every box is on a goal." if self.solved else self.picture(), True

    def earned(self, before: float) -> float:
        """Return the share of boxes that came onto goals, or 1 for the last of them."""
        return (self.score - before) / len(self.room.goals) if self._settings.reward == "boxes" else float(self.solved)

    def picture(self) -> str:
        """The grid in characters."""
        goals, at = set(self.room.goals), self.position
        marks = {cell: "O" if cell in goals else "_" for cell in self.room.floor}
        marks |= {box: "B" if box in goals else "X" for box in at.boxes}
        marks[at.player] = "S" if at.player in goals else "P"
        rows, columns = range(self._settings.rows), range(self._settings.columns)
        return "\n".join("".join(marks.get((r, c), "#") for c in columns) for r in rows)

    def possible(self) -> tuple[str, ...]:
        """Return the moves that change something, sorted."""
        return tuple(m for m in MOVES if moved(self._floor, self.position, m) is not None)

    def state(self) -> str:
        """Return the room, and where player and boxes are."""
        return f"{self._name}/{self.position.player}/{sorted(self.position.boxes)}"


def read_move(text: str) -> str | None:
    """Return the move that `text` names, or None. Case, white space, quotes and full stops are ignored."""
    return _MEANT.get(plain_words(text))


def _next(cell: Cell, move: str, n: int = 1) -> Cell:
    return cell[0] + n * MOVES[move][0], cell[1] + n * MOVES[move][1]


def moved(floor: frozenset[Cell], at: Position, move: str) -> Position | None:
    """Position after a move; None where a wall, or a box that cannot be pushed, blocks it."""
    target = _next(at.player, move)
    if target not in floor:
        return None
    if target not in at.boxes:
        return Position(target, at.boxes)
    beyond = _next(target, move)
    if beyond not in floor or beyond in at.boxes:
        return None
    return Position(target, at.boxes - {target} | {beyond})


@lru_cache(maxsize=4096)
def pulled(room: Room, most: int, seed: int) -> Position:
    """Return where a task begins: after up to `most` pulls that take boxes off the goals.

    Of several random walks of pulls, none of which meets a position twice, that one is taken which leaves the fewest
    boxes at home and, among those, the most pushes to bring them back.
    """
    rng = random.Random(f"sokoban/pull/{seed}")
    floor, goals, far = frozenset(room.floor), frozenset(room.goals), _pushes_home(room)
    parts = [part for part in _parts(floor - goals) if next(_pulls(floor, part, goals), None)]
    found: list[tuple[int, int, int, frozenset[Cell], Boxes]] = []
    for i in range(_WALKS):
        part, boxes = rng.choice(parts), goals
        seen = {(part, boxes)}
        for _ in range(most):
            options = [(_reach(floor - after, cell), after) for cell, after in _pulls(floor, part, boxes)]
            options = [option for option in options if option not in seen and option[1] != goals]
            if not options:
                break
            part, boxes = rng.choice(options)
            seen.add((part, boxes))
        found.append((len(boxes & goals), -sum(far[box] for box in boxes), i, part, boxes))
    *_, part, boxes = min(found, key=lambda walk: walk[:3])
    return Position(rng.choice(sorted(part)), boxes)


def _pulls(floor: frozenset[Cell], part: frozenset[Cell], boxes: Boxes) -> Iterator[tuple[Cell, Boxes]]:
    """Player and boxes after each possible pull by a player within `part`."""
    for box in sorted(boxes):
        for move in MOVES:
            stand, back = _next(box, move), _next(box, move, 2)
            if stand in part and back in floor and back not in boxes:
                yield back, boxes - {box} | {stand}


def _reach(free: frozenset[Cell], origin: Cell) -> frozenset[Cell]:
    reached, edge = {origin}, [origin]
    while edge:
        cell = edge.pop()
        for move in MOVES:
            target = _next(cell, move)
            if target in free and target not in reached:
                reached.add(target)
                edge.append(target)
    return frozenset(reached)


def _parts(free: frozenset[Cell]) -> list[frozenset[Cell]]:
    found: list[frozenset[Cell]] = []
    while free:
        found.append(_reach(free, min(free)))
        free -= found[-1]
    return found


@lru_cache(maxsize=4096)
def _pushes_home(room: Room) -> Mapping[Cell, int]:
    """Pushes from each cell to the nearest goal without other boxes; dead cells are left out."""
    floor = set(room.floor)
    far = dict.fromkeys(room.goals, 0)
    queue = deque(room.goals)
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            before, stand = _next(cell, move), _next(cell, move, 2)
            if before in floor and stand in floor and before not in far:
                far[before] = far[cell] + 1
                queue.append(before)
    return far


@lru_cache(maxsize=1024)
def solve(room: Room, start: Position) -> tuple[str, ...] | None:
    """Fewest moves that bring all boxes home; None where there are none, or the search gave up.

    A* over positions. The estimate is each box's pushes to its nearest goal, which never exceeds the moves needed; a
    position with a box on a cell from which no goal can be reached is not looked into.
    """
    floor, goals, far = frozenset(room.floor), frozenset(room.goals), _pushes_home(room)
    if any(box not in far for box in start.boxes):
        return None
    came: dict[Position, tuple[Position, str] | None] = {start: None}
    cost = {start: 0}
    heap = [(sum(far[box] for box in start.boxes), 0, start)]
    order, done = 0, set[Position]()
    while heap and len(cost) < _MOST_STATES:
        _, _, at = heappop(heap)
        if at.boxes == goals:
            return _back(came, at)
        if at in done:
            continue
        done.add(at)
        for move in MOVES:
            after = moved(floor, at, move)
            if after is None or cost.get(after, cost[at] + 2) <= cost[at] + 1:
                continue
            if after.boxes is not at.boxes and any(box not in far for box in after.boxes):
                continue
            cost[after], came[after], order = cost[at] + 1, (at, move), order + 1
            heappush(heap, (cost[after] + sum(far[box] for box in after.boxes), order, after))
    return None


def _back(came: Mapping[Position, tuple[Position, str] | None], at: Position) -> tuple[str, ...]:
    moves: list[str] = []
    while (step := came[at]) is not None:
        at = step[0]
        moves.append(step[1])
    return tuple(reversed(moves))
