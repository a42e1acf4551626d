"""MiniHack oracle: frontier exploration, and a shortest path to the staircase down.

It knows no more than an agent does. Where the staircase is not in sight it walks to the nearest frontier cell, which
was not visited and borders on the unknown; closed doors are walked into, which opens them, and kicked where they are
locked and the level lets it; monsters in the way are fought. Where the level has runs it takes them along straight
stretches. It pushes boulders and enters traps only where nothing else is left. It applies no keys, fills no water and
remembers no clues, so it solves nothing of the levels that are about these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate, takewhile

from environments.contrib.minihack.game import WAYS, View, World, place

Cell = tuple[int, int]
#: Visited cells, with the terrain that was seen there before: the map shows the agent in its place.
Visited = dict[Cell, str]

_BLOCKED = frozenset({"wall", "stone", "molten lava", "water", "iron bars", "tree", "solid rock"})
_DOORS = frozenset({"open door", "closed door"})
_MOST_TRIES, _MOST_KICKS, _MOST_SEARCHES = 4, 12, 15


class Explorer:
    """Plays a level, by given actions or by itself.

    Attributes:
        view: the present observation.
        actions: those that were done.
    """

    def __init__(self, world: World, view: View) -> None:
        self._world, self.view = world, view
        self.actions: list[str] = []
        self._visited: Visited = {view.at: ""}
        self._tries: Counter[tuple[Cell, str]] = Counter()
        self._n_searches = 0

    def do(self, name: str) -> None:
        """Do one of the actions that are known now."""
        self.actions.append(name)
        self._n_searches += name == "search"
        before, self.view = self.view, self._world.step(self._world.numbers(self.view)[name])
        if self.view.over:
            return
        way = name.removeprefix("far ")
        if way in WAYS and not before.asks and self.view.at == before.at:
            self._tries[before.at, way] += 1
        if self.view.level != before.level:
            self._tries.clear()
        mark_visited(self._visited, before, self.view)

    def solve(self, most: int) -> list[str] | None:
        """At most `most` more actions that solve the level, done in its world; or None."""
        n = len(self.actions)
        while not self.view.over and len(self.actions) - n < most:
            if not self._advance():
                return None
        return self.actions[n:] if self.view.won and 0 < len(self.actions) - n <= most else None

    def _advance(self) -> bool:
        """Do the next action, or the next few; False where there is nothing left to try."""
        if self.view.asks:
            self.do(next(iter(self._world.numbers(self.view))))
            return True
        for is_bold in (False, True):
            path = self._path(is_bold)
            if path:
                n_straight = sum(1 for _ in takewhile(path[0].__eq__, path))
                self._go(f"far {path[0]}" if self._runs(path[0], n_straight) else path[0])
                return True
        if "search" in self._world.keys and self._n_searches < _MOST_SEARCHES:
            self.do("search")
            return True
        return False

    def _go(self, way: str) -> None:
        before = self.view.at
        self.do(way)
        if not self.view.over and self.view.at == before and "kick" in self._world.keys:
            for _ in range(_MOST_KICKS * ("locked" in self.view.message)):
                self.do("kick")
                if not self.view.over:
                    self.do(way)
                if self.view.over or "WHAMM" not in self.view.message:
                    break

    def _path(self, is_bold: bool) -> list[str]:
        """Directions of a shortest path to the staircase, else to the nearest frontier cell; or none."""
        for is_goal in (is_staircase, is_frontier):
            path = shortest_path(self.view, self._visited, is_goal, is_bold, self._is_tried)
            if path:
                return path
        return []

    def _is_tried(self, cell: Cell, way: str) -> bool:
        return self._tries[cell, way] >= _MOST_TRIES

    def _runs(self, way: str, n_steps: int) -> bool:
        """Whether to run rather than to take `n_steps` in a direction: known cells end with them."""
        cell, n_free = self.view.at, 0
        while (onward := step_from(self.view, self._visited, cell, way, is_bold=True)) is not None:
            cell, n_free = onward, n_free + 1
        return f"far {way}" in self._world.keys and n_free == n_steps > 1


def mark_visited(visited: Visited, before: View, after: View) -> None:
    """Add the cells between two views, with their terrain; on another level of the dungeon, begin anew.

    A run is taken to have followed a shortest path. Where a creature stood on a cell, its terrain was not seen.
    """
    if after.over or after.at == before.at:
        return
    if after.level != before.level:
        visited.clear()
        visited[after.at] = ""
        return
    is_run = max(abs(after.at[0] - before.at[0]), abs(after.at[1] - before.at[1])) > 1
    path = shortest_path(after, visited, lambda view, _, cell: cell == view.at, True, start=before.at) if is_run else []
    for cell in [*accumulate(path, _beside, initial=before.at)][1:] or [after.at]:
        character, terrain = before.cells.get(cell, ("", ""))
        if character == "@" or character.isalpha():
            terrain = ""
        visited[cell] = terrain or visited.get(cell, "")


def surroundings(view: View, visited: Visited) -> str:
    """Directions in which the agent can move, and the offset of the frontier cell with the shortest path to it."""
    exits = [way for way in WAYS if step_from(view, visited, view.at, way, is_bold=True)]
    told = f"Exits: {', '.join(exits) or 'none'}."
    path = shortest_path(view, visited, is_frontier)
    if not path:
        return told
    right, down = (sum(WAYS[way][axis] for way in path) for axis in (0, 1))
    return f"{told}\nUnexplored: {place(right, down)}."


def is_staircase(view: View, visited: Visited, cell: Cell) -> bool:
    """Whether the staircase down is there."""
    return view.cells[cell][1] == "staircase down"


def is_frontier(view: View, visited: Visited, cell: Cell) -> bool:
    """Whether a cell was not visited and borders on the unknown."""
    if cell in visited:
        return False
    return any(_beside(cell, way) not in view.cells for way in WAYS)


def shortest_path(
    view: View,
    visited: Visited,
    is_goal: Callable[[View, Visited, Cell], bool],
    is_bold: bool = False,
    is_blocked: Callable[[Cell, str], bool] = lambda cell, way: False,
    start: Cell | None = None,
) -> list[str]:
    """Directions of a shortest path over known cells to the nearest goal, by breadth-first search; empty if none.

    Args:
        view: the present observation.
        visited: visited cells and their terrain.
        is_goal: goal test, of `view`, `visited` and a cell.
        is_bold: also over boulders and traps.
        is_blocked: steps not to take, by cell and direction.
        start: where the path begins; the agent's cell where nothing is said.
    """
    first = start or view.at
    came: dict[Cell, tuple[Cell, str]] = {}
    queue = deque([first])
    while queue:
        cell = queue.popleft()
        if cell in came and is_goal(view, visited, cell):
            path: list[str] = []
            while cell != first:
                cell, way = came[cell]
                path.append(way)
            return path[::-1]
        for way in WAYS:
            onward = None if is_blocked(cell, way) else step_from(view, visited, cell, way, is_bold)
            if onward is not None and onward not in came and onward != first:
                came[onward] = cell, way
                queue.append(onward)
    return []


def step_from(view: View, visited: Visited, cell: Cell, way: str, is_bold: bool) -> Cell | None:
    """Known cell beside `cell` that can be stepped onto; or None."""
    onward = _beside(cell, way)
    if onward not in view.cells:
        return None
    here = visited.get(cell, "") if cell == view.at else view.cells.get(cell, ("", ""))[1]
    there = view.cells[onward][1]
    is_diagonal = all(WAYS[way])
    if there in _BLOCKED or (is_diagonal and (here in _DOORS or there in _DOORS)):
        return None
    if not is_bold and (there == "boulder" or "trap" in there or there in ("hole", "pit", "squeaky board")):
        return None
    return onward


def _beside(cell: Cell, way: str) -> Cell:
    right, down = WAYS[way]
    return cell[0] + right, cell[1] + down
