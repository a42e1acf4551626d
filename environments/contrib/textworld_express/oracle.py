"""The oracle of TextWorldExpress: plans from any state of its games.

The package's gold path solves a game from its start, but on the way it wanders at random, another way each time. What
it does, and where, is always the same: its deeds. So the oracle keeps the deeds, explores the rooms once, and goes
from deed to deed the shortest way. Every plan is carried out in a game before it is given.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.contrib.textworld_express.sessions import Session, Split, State, borrowed

_BACK: Mapping[str, str] = {"east": "west", "north": "south", "south": "north", "west": "east"}
_NO_DEED = re.compile(r"look around$|inventory$|task$|move |close ")
#: How actions begin that only bring the agent nearer to a deed.
_ON_THE_WAY = ("move ", "open ", "close ", "look", "inventory")
#: Here the gold path takes things in the order in which it happens to find them; the oracle takes the nearest first.
_ANY_ORDER = frozenset({"twc"})
_N_GOLD_PATHS = 4
#: Of a kitchen: what every recipe ends with, and a tool, which is no ingredient.
_AT_TABLE, _KNIFE = ("prepare meal", "eat meal"), "take knife"


@dataclass(frozen=True, slots=True)
class Deed:
    """An action that brings the task forward.

    Attributes:
        action: as the game reads it.
        rooms: where it can be done; the empty name in a game without rooms.
        container: what may have to be opened first; empty if nothing.
    """

    action: str
    rooms: tuple[str, ...]
    container: str = ""


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """Solution steps in order, and the map: `exits[room][direction]` is the next room."""

    deeds: tuple[Deed, ...]
    exits: Mapping[str, Mapping[str, str]]


def plan(
    game: str, parameters: str, seed: int, split: Split, taken: Sequence[str], *, reads: bool, limit: int
) -> tuple[str, ...] | None:
    """Return actions that solve a game after `taken`, or None.

    The same for the same arguments, in any process; only in `twc`, where a few things have two usual places, chance may
    hide one of them (none of 480 tasks). It copes with detours, with things taken needlessly and with most things put
    in a wrong place. It gives up where a mistake cannot be undone, where the way is longer than `limit` actions in all,
    and in `peckingorder` where two things have one name and the game takes the wrong one.

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


def purpose(game: str, parameters: str, seed: int, split: Split, rest: Sequence[str]) -> str:
    """Purpose of the first of the actions `rest`, which solve a game; constant until it is achieved.

    Args:
        game: name of the game.
        parameters: generation parameters, as the package reads them.
        seed: of the game.
        split: of the game.
        rest: what `plan` gives.
    """
    deed = next((action for action in rest if not action.startswith(_ON_THE_WAY)), "")
    if game != "cookingworld" or not deed or deed.startswith("read "):
        return deed
    if deed in _AT_TABLE:
        return " and ".join(_AT_TABLE)
    actions = [known.action for known in walkthrough(game, parameters, seed, split).deeds]
    things = [action.removeprefix("take ") for action in actions if action.startswith("take ") and action != _KNIFE]
    return "; ".join(f"{thing}: {', '.join(_made_of(thing, actions)) or 'take'}" for thing in things)


def _made_of(thing: str, actions: Sequence[str]) -> Iterator[str]:
    """Yield the operations on an ingredient after it is taken, without its name."""
    for verb, _, rest in (action.partition(" ") for action in actions):
        if verb != "take" and f"{rest} ".startswith(f"{thing} "):
            yield f"{verb}{rest.removeprefix(thing)}"


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
    """Walk through all rooms, then follow the gold path for its deeds."""
    with borrowed(game, parameters) as session:
        player = _Player(session, session.begin(seed, split), {})
        player.explore()
        if game not in _ANY_ORDER:
            return Walkthrough(tuple(_follow(session, player, seed, split)), player.exits)
        # Some things have two usual places, and each gold path takes one by chance: the oracle, the first by name.
        found: dict[str, Deed] = {}
        for _ in range(_N_GOLD_PATHS):
            for deed in _follow(session, player, seed, split):
                name = deed.action.removesuffix(f" in {deed.container}")
                found[name] = min(deed, found.get(name, deed), key=lambda d: d.action)
        return Walkthrough(tuple(found.values()), player.exits)


def _follow(session: Session, explorer: _Player, seed: int, split: Split) -> list[Deed]:
    """Follow one gold path for its deeds."""
    deeds: list[Deed] = []
    state, inside = session.begin(seed, split, gold=True), dict[str, str]()
    for action in session.gold_path():
        room, before = room_of(state), state
        state = session.step(action)
        if not room:  # without rooms, each action counts
            deeds.append(Deed(action, (room,)))
        elif action.startswith("open "):
            inside[action[5:]] = state.text
        elif not _NO_DEED.match(action) and not _only_to_read(action, before):
            container = _container(action, inside)
            # Two rooms may have a trash can each: which one the gold path uses is chance.
            rooms = explorer.rooms_with(container) if action.startswith("put ") else frozenset[str]()
            deeds.append(Deed(action, tuple(sorted(rooms | {room})), container))
    return deeds


def _only_to_read(action: str, state: State) -> bool:
    """True if `action` takes what can be read where it lies."""
    return action.startswith("take ") and f"read {action[5:]}" in state.actions


def _container(action: str, inside: Mapping[str, str]) -> str:
    """Container to open for `action`, by what was seen in each when it was opened."""
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
    """Update the remaining deeds, by their order, after `action` was done in `room`."""
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
            todo[take] = Deed(f"take {thing}", (room,), container)
        elif used is not None:  # something made on the way, such as a meal
            todo[used - 0.5] = Deed(f"take {thing}", (room,), container)
    elif verb == "take":  # out of its place again: put it back
        todo.update((i, deed) for i, deed in deeds.items() if deed.action.startswith(f"put {thing} in "))


class _Player:
    """Moves through a game and notes what it does."""

    def __init__(self, session: Session, state: State, exits: dict[str, dict[str, str]]) -> None:
        self._session, self.state, self.exits = session, state, exits
        self.actions: list[str] = []
        self.looks: dict[str, str] = {}

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
        """Walk through every room that can be reached from here, and back; fills `exits` and `looks`."""
        here = room_of(self.state)
        self.looks[here] = self.state.look
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

    def rooms_with(self, thing: str) -> frozenset[str]:
        """Name the rooms where `thing` was seen."""
        seen = re.compile(rf"\ban? {re.escape(thing)}(,|\.| that )")
        return frozenset(room for room, look in self.looks.items() if seen.search(look))

    def route(self, deed: Deed) -> tuple[str, ...] | None:
        """Return the shortest way to where `deed` can be done; among equals, the first in the alphabet."""
        start = room_of(self.state)
        ways: dict[str, tuple[str, ...]] = {start: ()}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            if here in deed.rooms:
                return ways[here]
            for direction, there in sorted(self.exits.get(here, {}).items()):
                if there not in ways:
                    ways[there] = (*ways[here], direction)
                    queue.append(there)
        return None

    def nearest(self, todo: Mapping[float, Deed]) -> float:
        """Deed reachable with the fewest steps; nothing is put away before it is taken."""
        waiting = {deed.action.removeprefix("take ") for deed in todo.values() if deed.action.startswith("take ")}
        ready = [i for i in todo if todo[i].action.removeprefix("put ").rpartition(" in ")[0] not in waiting]
        return min(ready, key=lambda i: (len(self.route(todo[i]) or ()), todo[i].action))

    def accomplish(self, deed: Deed) -> bool:
        """Do `deed` here if possible, else go to its place."""
        if deed.action not in self.state.actions:
            for direction in self.route(deed) or ():
                self.walk(direction)
            if room_of(self.state) not in deed.rooms:
                return False
        if deed.action not in self.state.actions:
            if deed.action.startswith("read "):
                return True  # it was put out of reach; most things need not be read
            if deed.container:
                self.do(f"open {deed.container}")
        return self.do(deed.action)
