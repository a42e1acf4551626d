"""How to solve the games of TextWorldExpress, from anywhere.

The package's gold path solves a game from its start, but on the way it wanders at random, another way each time. What
it does, and where, is always the same: its deeds. So the oracle keeps the deeds, explores the rooms once, and goes
from deed to deed the shortest way. Every plan is carried out in a game before it is given.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.textworld_sessions import Session, Split, State, borrowed

_BACK: Mapping[str, str] = {"east": "west", "north": "south", "south": "north", "west": "east"}
_NO_DEED = re.compile(r"look around$|inventory$|task$|move |close ")
#: Here the gold path takes things in the order in which it happens to find them; the oracle takes the nearest first.
_ANY_ORDER = frozenset({"twc"})


@dataclass(frozen=True, slots=True)
class Deed:
    """An action that brings the task forward.

    Attributes:
        action: as the game reads it.
        room: where it is done.
        container: what may have to be opened first; empty if nothing.
    """

    action: str
    room: str
    container: str = ""


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """What there is to do, in order, and the way from room to room: `exits[room][direction]` is the next room."""

    deeds: tuple[Deed, ...]
    exits: Mapping[str, Mapping[str, str]]


def plan(
    game: str, parameters: str, seed: int, split: Split, taken: Sequence[str], *, reads: bool, limit: int
) -> tuple[str, ...] | None:
    """Return actions that solve a game after `taken`, or None.

    The same for the same arguments, in any process. It copes with detours, with things taken needlessly and with most
    things put in a wrong place. It gives up where a mistake cannot be undone, and where the way is longer than `limit`
    actions in all.

    Args:
        game: name of the game.
        parameters: generation parameters, as the package reads them.
        seed: of the game.
        split: of the game.
        taken: what was done already; text that is no action may be among it.
        reads: whether a map, a cookbook or instructions are read although the oracle does not need them.
        limit: most actions, `taken` included.
    """
    done = tuple(taken)
    whole = _from_the_start(game, parameters, seed, split, reads)
    if whole is not None and done == whole[: len(done)]:
        rest: tuple[str, ...] | None = whole[len(done) :]
    else:
        rest = _on_from(game, parameters, seed, split, done, reads)
    return rest if rest is not None and len(done) + len(rest) <= limit else None


@lru_cache(maxsize=4096)
def _from_the_start(game: str, parameters: str, seed: int, split: Split, reads: bool) -> tuple[str, ...] | None:
    return _on_from(game, parameters, seed, split, (), reads)


def _on_from(
    game: str, parameters: str, seed: int, split: Split, taken: tuple[str, ...], reads: bool
) -> tuple[str, ...] | None:
    known = walkthrough(game, parameters, seed, split)
    any_order = game in _ANY_ORDER
    with borrowed(game, parameters) as session:
        if not reads:
            needed = tuple(deed for deed in known.deeds if not deed.action.startswith("read "))
            found = _solve(session, session.begin(seed, split), Walkthrough(needed, known.exits), taken, any_order)
            if found is not None:
                return found  # in `arithmetic` there is none: unread problems do not count as solved
        return _solve(session, session.begin(seed, split), known, taken, any_order)


@lru_cache(maxsize=4096)
def walkthrough(game: str, parameters: str, seed: int, split: Split) -> Walkthrough:
    """Follow the gold path once for its deeds, then walk through all rooms."""
    deeds: list[Deed] = []
    with borrowed(game, parameters) as session:
        state, inside = session.begin(seed, split, gold=True), dict[str, str]()
        for action in session.gold_path():
            room, before = room_of(state), state
            state = session.step(action)
            if not room:  # without rooms, each action counts
                deeds.append(Deed(action, room))
            elif action.startswith("open "):
                inside[action[5:]] = state.text
            elif not _NO_DEED.match(action) and not _only_to_read(action, before):
                deeds.append(Deed(action, room, _container(action, inside)))
        player = _Player(session, session.begin(seed, split), {})
        player.explore()
    return Walkthrough(tuple(deeds), player.exits)


def _only_to_read(action: str, state: State) -> bool:
    """Whether `action` takes what can be read where it lies."""
    return action.startswith("take ") and f"read {action[5:]}" in state.actions


def _container(action: str, inside: Mapping[str, str]) -> str:
    """Name what must be open for `action`, given what was told of each container when it was opened."""
    verb, _, thing = action.partition(" ")
    if verb == "put":
        return thing.rpartition(" in ")[2]
    return next((name for name, told in inside.items() if verb == "take" and thing in told), "")


def room_of(state: State) -> str:
    """Name the room that `state` is in; empty in a game without rooms."""
    match = re.match(r"You are in the (.+?)\.", state.look)
    return match[1] if match else ""


def _solve(
    session: Session, state: State, known: Walkthrough, taken: Sequence[str], any_order: bool
) -> tuple[str, ...] | None:
    """Repeat `taken`, then do what is left to do."""
    numbered = {float(i): deed for i, deed in enumerate(known.deeds)}
    todo = dict(numbered)
    for action in taken:
        if state.over:
            return None
        room, state = room_of(state), session.step(action)
        if state.understood:
            _strike(todo, action.strip(), room, numbered)
    player = _Player(session, state, {room: dict(ways) for room, ways in known.exits.items()})
    while todo and not player.state.over:
        if not player.accomplish(todo.pop(player.nearest(todo) if any_order else min(todo))):
            return None
    return tuple(player.actions) if player.state.success else None


def _strike(todo: dict[float, Deed], action: str, room: str, deeds: Mapping[float, Deed]) -> None:
    """Update what is left to do, by its place in the order, after `action` was done in `room`."""
    done = min((i for i, deed in todo.items() if deed.action == action), default=None)
    if done is not None:
        del todo[done]
        return
    verb, _, thing = action.partition(" ")
    if verb == "put":  # in a wrong place: take it again there
        thing, _, container = thing.rpartition(" in ")
        take = next((i for i, deed in deeds.items() if deed.action == f"take {thing}"), None)
        used = min((i for i, deed in todo.items() if deed.action.endswith(f" {thing}")), default=None)
        if take is not None:
            todo[take] = Deed(f"take {thing}", room, container)
        elif used is not None:  # something made on the way, such as a meal
            todo[used - 0.5] = Deed(f"take {thing}", room, container)
    elif verb == "take":  # out of its place again: put it back
        todo.update((i, deed) for i, deed in deeds.items() if deed.action.startswith(f"put {thing} in "))


class _Player:
    """Moves through a game and notes what it does."""

    def __init__(self, session: Session, state: State, exits: dict[str, dict[str, str]]) -> None:
        self._session, self.state, self.exits = session, state, exits
        self.actions: list[str] = []

    def do(self, action: str) -> bool:
        self.state = self._session.step(action)
        self.actions.append(action)
        return self.state.understood

    def walk(self, direction: str) -> None:
        """Go to the next room, through the door if there is one."""
        if f"To the {direction.title()} you see a closed" in self.state.look:
            self.do(f"open door to {direction}")
        self.do(f"move {direction}")

    def explore(self) -> None:
        """Walk through every room that can be reached from here, and back; fills `exits`."""
        here = room_of(self.state)
        ways = self.exits.setdefault(here, {})
        for direction, back in _BACK.items():
            if f"move {direction}" not in self.state.actions or direction in ways:
                continue
            self.walk(direction)
            there = room_of(self.state)
            if there == here:
                continue
            seen = there in self.exits
            ways[direction] = there
            self.exits.setdefault(there, {})[back] = here
            if not seen:
                self.explore()
            self.walk(back)

    def route(self, room: str) -> tuple[str, ...] | None:
        """Return the shortest way to `room` as directions, the first in the alphabet among equals."""
        start = room_of(self.state)
        ways: dict[str, tuple[str, ...]] = {start: ()}
        queue = deque([start])
        while queue and room not in ways:
            here = queue.popleft()
            for direction, there in sorted(self.exits.get(here, {}).items()):
                if there not in ways:
                    ways[there] = (*ways[here], direction)
                    queue.append(there)
        return ways.get(room)

    def nearest(self, todo: Mapping[float, Deed]) -> float:
        """Choose the deed that can be done with the fewest steps; nothing is put away before it is taken."""
        waiting = {deed.action.removeprefix("take ") for deed in todo.values() if deed.action.startswith("take ")}
        ready = [i for i in todo if todo[i].action.removeprefix("put ").rpartition(" in ")[0] not in waiting]
        return min(ready, key=lambda i: (len(self.route(todo[i].room) or ()), todo[i].action))

    def accomplish(self, deed: Deed) -> bool:
        """Do `deed` here, if that is possible, else go where it is to be done."""
        if deed.action not in self.state.actions:
            for direction in self.route(deed.room) or ():
                self.walk(direction)
            if room_of(self.state) != deed.room:
                return False
        if deed.action not in self.state.actions:
            if deed.action.startswith("read "):
                return True  # it was put out of reach; most things need not be read
            if deed.container:
                self.do(f"open {deed.container}")
        return self.do(deed.action)
