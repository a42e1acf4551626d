"""MiniHack oracle: explores, and takes a shortest way to the staircase down.

It knows no more than an agent does. Where the staircase is not in sight it walks to the nearest cell that has not been
entered and borders on the unknown; closed doors are walked into, which opens them, and kicked where they are locked and
the level lets it; monsters in the way are fought. It pushes boulders and enters traps only where nothing else is left.
It applies no keys, fills no water and remembers no clues, so it solves nothing of the levels that are about these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import takewhile

from environments.contrib.minihack.game import WAYS, View, World, place

Cell = tuple[int, int]
#: Cells where the agent has been, with what was seen there before: the map shows the agent in its place.
Entered = dict[Cell, str]

_BLOCKED = frozenset({"wall", "stone", "molten lava", "water", "iron bars", "tree", "solid rock"})
_DOORS = frozenset({"open door", "closed door"})
_MOST_TRIES, _MOST_KICKS, _MOST_SEARCHES = 4, 12, 15


def solve(world: World, view: View, most: int) -> list[str] | None:
    """At most `most` actions that solve the level from `view`, carried out in `world`; or None."""
    explorer = _Explorer(world, view)
    while not explorer.view.over and len(explorer.actions) < most:
        if not explorer.advance():
            return None
    return explorer.actions if explorer.view.won and len(explorer.actions) <= most else None


class _Explorer:
    def __init__(self, world: World, view: View) -> None:
        self._world, self.view = world, view
        self.actions: list[str] = []
        self._entered: Entered = {view.at: ""}
        self._tries: Counter[tuple[Cell, str]] = Counter()
        self._n_searches = 0

    def advance(self) -> bool:
        """Do the next action, or the next two; False where there is nothing left to try."""
        if self.view.asks:
            self._do(next(iter(self._world.numbers(self.view))))
            return True
        for is_bold in (False, True):
            path = self._path(is_bold)
            if path:
                n_straight = sum(1 for _ in takewhile(path[0].__eq__, path))
                self._go(f"far {path[0]}" if self._runs(path[0], n_straight) else path[0])
                return True
        if "search" in self._world.keys and self._n_searches < _MOST_SEARCHES:
            self._n_searches += 1
            self._do("search")
            return True
        return False

    def _do(self, name: str) -> None:
        self.actions.append(name)
        before, self.view = self.view, self._world.step(self._world.numbers(self.view)[name])
        enter(self._entered, before, self.view)

    def _go(self, way: str) -> None:
        before = self.view.at
        self._do(way)
        if self.view.over or self.view.at != before:
            return
        self._tries[before, way.removeprefix("far ")] += 1
        if "kick" in self._world.keys and "locked" in self.view.message:
            for _ in range(_MOST_KICKS):
                self._do("kick")
                if not self.view.over:
                    self._do(way)
                if self.view.over or "WHAMM" not in self.view.message:
                    break

    def _path(self, is_bold: bool) -> list[str]:
        """Directions of a shortest path to the staircase, else to the nearest cell to explore; or none."""
        for seeks in (is_staircase, is_frontier):
            path = shortest_path(self.view, self._entered, seeks, is_bold, self._closed)
            if path:
                return path
        return []

    def _closed(self, cell: Cell, way: str) -> bool:
        return self._tries[cell, way] >= _MOST_TRIES

    def _runs(self, way: str, n_steps: int) -> bool:
        """Whether `far way` leads no further than `n_steps` over known cells, and saves something."""
        cell, n_free = self.view.at, 0
        while (onward := step_from(self.view, self._entered, cell, way, is_bold=True)) is not None:
            cell, n_free = onward, n_free + 1
        return f"far {way}" in self._world.keys and n_free == n_steps > 1


def enter(entered: Entered, before: View, after: View) -> None:
    """Note the cell of a step, and what was seen there before the agent stood on it."""
    if after.at != before.at:
        entered[after.at] = before.cells.get(after.at, ("", ""))[1]


def surroundings(view: View, entered: Entered) -> str:
    """Steps that lead somewhere, and the nearest cell to explore, by the length of the path to it."""
    exits = [way for way in WAYS if step_from(view, entered, view.at, way, is_bold=True)]
    told = f"Exits: {', '.join(exits) or 'none'}."
    path = shortest_path(view, entered, is_frontier)
    if not path:
        return told
    right, down = (sum(WAYS[way][axis] for way in path) for axis in (0, 1))
    return f"{told}\nUnexplored: {place(right, down)}."


def is_staircase(view: View, entered: Entered, cell: Cell) -> bool:
    """Whether the staircase down is there."""
    return view.cells[cell][1] == "staircase down"


def is_frontier(view: View, entered: Entered, cell: Cell) -> bool:
    """Whether a cell was not entered and borders on the unknown."""
    if cell in entered:
        return False
    return any((cell[0] + right, cell[1] + down) not in view.cells for right, down in WAYS.values())


def shortest_path(
    view: View,
    entered: Entered,
    seeks: Callable[[View, Entered, Cell], bool],
    is_bold: bool = False,
    closed: Callable[[Cell, str], bool] = lambda cell, way: False,
) -> list[str]:
    """Directions from the agent to the nearest cell that `seeks` accepts, by known cells; empty if there is none.

    Args:
        view: the present observation.
        entered: cells where the agent has been.
        seeks: of view, `entered` and a cell.
        is_bold: also over boulders and traps.
        closed: steps not to take, by cell and direction.
    """
    came: dict[Cell, tuple[Cell, str]] = {}
    queue = deque([view.at])
    while queue:
        cell = queue.popleft()
        if cell in came and seeks(view, entered, cell):
            path: list[str] = []
            while cell != view.at:
                cell, way = came[cell]
                path.append(way)
            return path[::-1]
        for way in WAYS:
            onward = None if closed(cell, way) else step_from(view, entered, cell, way, is_bold)
            if onward is not None and onward not in came and onward != view.at:
                came[onward] = cell, way
                queue.append(onward)
    return []


def step_from(view: View, entered: Entered, cell: Cell, way: str, is_bold: bool) -> Cell | None:
    """Known cell beside `cell` that can be stepped onto; or None."""
    right, down = WAYS[way]
    onward = (cell[0] + right, cell[1] + down)
    if onward not in view.cells:
        return None
    here = entered.get(cell, "") if cell == view.at else view.cells[cell][1]
    there = view.cells[onward][1]
    if there in _BLOCKED or (right and down and (here in _DOORS or there in _DOORS)):
        return None
    if not is_bold and (there == "boulder" or "trap" in there or there in ("hole", "pit", "squeaky board")):
        return None
    return onward
