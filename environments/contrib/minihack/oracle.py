"""MiniHack oracle: explores, and takes a shortest way to the staircase down.

It knows no more than an agent does. Where the staircase is not in sight it walks to the nearest cell that has not been
entered and borders on the unknown; closed doors are walked into, which opens them, and kicked where they are locked and
the level lets it; monsters in the way are fought. It pushes boulders and enters traps only where nothing else is left.
It applies no keys, fills no water and remembers no clues, so it solves nothing of the levels that are about these.
"""

from __future__ import annotations

from collections import Counter, deque

from environments.contrib.minihack.game import WAYS, View, World

Cell = tuple[int, int]

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
        self._entered = {view.at}
        self._tries: Counter[tuple[Cell, str]] = Counter()
        self._n_searches = 0

    def advance(self) -> bool:
        """Do the next action, or the next two; False where there is nothing left to try."""
        if self.view.asks:
            self._do(next(iter(self._world.numbers(self.view))))
            return True
        for is_bold in (False, True):
            way = self._way(is_bold)
            if way is not None:
                self._go(way)
                return True
        if "search" in self._world.keys and self._n_searches < _MOST_SEARCHES:
            self._n_searches += 1
            self._do("search")
            return True
        return False

    def _do(self, name: str) -> None:
        self.actions.append(name)
        self.view = self._world.step(self._world.numbers(self.view)[name])
        self._entered.add(self.view.at)

    def _go(self, way: str) -> None:
        before = self.view.at
        self._do(way)
        if self.view.over or self.view.at != before:
            return
        self._tries[before, way] += 1
        if "kick" in self._world.keys and "locked" in self.view.message:
            for _ in range(_MOST_KICKS):
                self._do("kick")
                if not self.view.over:
                    self._do(way)
                if self.view.over or "WHAMM" not in self.view.message:
                    break

    def _way(self, is_bold: bool) -> str | None:
        """First direction of a shortest way to the staircase, else to the nearest place to explore."""
        first: dict[Cell, str] = {self.view.at: ""}
        queue, explored = deque([self.view.at]), None
        while queue:
            cell = queue.popleft()
            what = self.view.cells.get(cell, ("", ""))[1]
            if first[cell] and what == "staircase down":
                return first[cell]
            if first[cell] and explored is None and self._is_frontier(cell):
                explored = first[cell]
            for way in WAYS:
                onward = self._onward(cell, way, is_bold)
                if onward is not None and onward not in first:
                    first[onward] = first[cell] or way
                    queue.append(onward)
        return explored

    def _onward(self, cell: Cell, way: str, is_bold: bool) -> Cell | None:
        """The cell beside `cell`, where one can step onto it."""
        right, down = WAYS[way]
        onward = (cell[0] + right, cell[1] + down)
        if onward not in self.view.cells or self._tries[cell, way] >= _MOST_TRIES:
            return None
        here, there = self.view.cells.get(cell, ("", ""))[1], self.view.cells[onward][1]
        if there in _BLOCKED or (right and down and (here in _DOORS or there in _DOORS)):
            return None
        if not is_bold and (there == "boulder" or "trap" in there or there in ("hole", "pit", "squeaky board")):
            return None
        return onward

    def _is_frontier(self, cell: Cell) -> bool:
        if cell in self._entered:
            return False
        return any((cell[0] + right, cell[1] + down) not in self.view.cells for right, down in WAYS.values())
