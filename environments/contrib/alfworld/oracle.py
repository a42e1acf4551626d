"""The oracle of ALFWorld: a game's facts, and a script that knows the way to its goal.

The script reads where everything is, so it never searches: fetch the object, treat it if the goal says so, put it down;
or take it to the lamp. A plan from the start of a game has about six actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Facts that actions change, and that nobody has to have looked for.
CHANGING = frozenset(
    {
        "atlocation", "holds", "holdsany", "inreceptacle", "isclean", "iscool", "ishot", "ison", "issliced",
        "istoggled", "objectatlocation", "opened",
    }
)  # fmt: skip
_MOST_ACTIONS = 60
_TREATED = {
    "pick_clean_then_place_in_recep": ("clean", "isclean", "sinkbasintype"),
    "pick_heat_then_place_in_recep": ("heat", "ishot", "microwavetype"),
    "pick_cool_then_place_in_recep": ("cool", "iscool", "fridgetype"),
}


def names_of(ids: Iterable[str]) -> dict[str, str]:
    """Names of things as the package gives them: numbered kinds, the highest to the first id in order.

    `drawer_bar__plus_00_dot_95_bar_...` is `drawer 3`; what is in a sink is its basin.
    """
    kinds = {one: _kind(one) for one in sorted(ids)}
    left: defaultdict[str, int] = defaultdict(int)
    for kind in kinds.values():
        left[kind] += 1
    names = {}
    for one, kind in kinds.items():
        names[one] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


def _kind(one: str) -> str:
    return one.split("_bar_", 1)[0].lower() + ("basin" if "basin" in one.lower() else "")


@dataclass(frozen=True)
class Goal:
    """Goal of a task.

    Attributes:
        task_type: one of the six types.
        object_type: of what is fetched, as the facts name it: `mugtype`.
        parent_type: of where it belongs; empty for looking at it.
        lamp_type: of the lamp to look under; else empty.
    """

    task_type: str
    object_type: str
    parent_type: str
    lamp_type: str

    @classmethod
    def of(cls, trajectory: Mapping[str, Any]) -> Goal:
        """Read `traj_data.json`."""
        told = trajectory["pddl_params"]
        types = (f"{told[key].lower()}type" for key in ("object_target", "parent_target", "toggle_target"))
        return cls(trajectory["task_type"], *(kind if kind != "type" else "" for kind in types))


@dataclass
class State:
    """Facts that hold; ids in small letters.

    Attributes:
        at: where the agent is.
        held: what it holds; empty if nothing.
        types: of receptacles and objects.
        locations: of receptacles.
        inside: the receptacle of each object.
        closed: receptacles that are closed.
        marks: facts of one object: (`isclean`, id).
        fits: pairs of a type of receptacle and a type of object that it holds.
        names: what receptacles and objects are called.
    """

    at: str = ""
    held: str = ""
    types: dict[str, str] = field(default_factory=dict)
    locations: dict[str, str] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    marks: set[tuple[str, str]] = field(default_factory=set)
    fits: set[tuple[str, str]] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Iterable[Sequence[str]]) -> State:
        """Read facts: a predicate and its arguments each."""
        state, opened = cls(), set()
        for predicate, *rest in ([word.lower() for word in fact] for fact in facts):
            match predicate:
                case "atlocation":
                    state.at = rest[1]
                case "holds":
                    state.held = rest[1]
                case "receptacletype" | "objecttype":
                    state.types[rest[0]] = rest[1]
                case "receptacleatlocation":
                    state.locations[rest[0]] = rest[1]
                case "inreceptacle":
                    state.inside[rest[0]] = rest[1]
                case "openable":
                    state.closed.add(rest[0])
                case "opened":
                    opened.add(rest[0])
                case "cancontain":
                    state.fits.add((rest[0], rest[1]))
                case "isclean" | "ishot" | "iscool" | "istoggled":
                    state.marks.add((predicate, rest[0]))
        state.closed -= opened
        state.names = names_of(state.types)
        return state

    def of_type(self, kind: str) -> list[str]:
        """Receptacles and objects of a type, in the order of their ids."""
        return sorted(one for one, found in self.types.items() if found == kind)


def plan(state: State, goal: Goal) -> list[str] | None:
    """Actions that reach `goal` from `state`, which is changed; None where the script knows no way."""
    script = _Script(state, goal)
    while not script.done():
        if len(script.actions) >= _MOST_ACTIONS or not script.go_on():
            return None
    return script.actions


class _Script:
    """Goes on towards the goal, and keeps track of what its actions change."""

    def __init__(self, state: State, goal: Goal) -> None:
        self.state, self.goal = state, goal
        self.actions: list[str] = []
        self.verb, self.mark, self.tool = _TREATED.get(goal.task_type, ("", "", ""))
        self.n_wanted = 2 if goal.task_type == "pick_two_obj_and_place" else 1
        self.parent = self._parent()

    def done(self) -> bool:
        if self.goal.lamp_type:
            lit = [one for one in self._lamps() if ("istoggled", one) in self.state.marks]
            return self._right(self.state.held) and any(self._at(self.state.inside[one]) for one in lit)
        return len(self._placed(self.parent)) >= self.n_wanted

    def go_on(self) -> bool:
        """Do one thing; False where nothing is known to do."""
        held = self.state.held
        if held and not self._right(held):
            return self._put_away(held)
        if not held:
            return self._fetch()
        if self.goal.lamp_type:
            return self._light()
        if self.mark and (self.mark, held) not in self.state.marks:
            return self._treat(held)
        return self._put(held, self.parent)

    def _right(self, one: str) -> bool:
        return self.state.types.get(one) == self.goal.object_type

    def _parent(self) -> str:
        """Destination: the receptacle with most of the wanted objects already, the first on ties."""
        where = self.state.of_type(self.goal.parent_type)
        return max(where, key=lambda one: (len(self._placed(one)), -where.index(one)), default="")

    def _placed(self, where: str) -> list[str]:
        inside = [one for one, found in self.state.inside.items() if found == where and self._right(one)]
        return [one for one in inside if not self.mark or (self.mark, one) in self.state.marks]

    def _lamps(self) -> list[str]:
        return [one for one in self.state.of_type(self.goal.lamp_type) if one in self.state.inside]

    def _fetch(self) -> bool:
        there = self._placed(self.parent)
        free = [one for one in self.state.of_type(self.goal.object_type) if one in self.state.inside]
        for one in free:
            if one not in there:
                where = self.state.inside[one]
                self._reach(where)
                self._do(f"take {self._name(one)} from {self._name(where)}")
                del self.state.inside[one]
                self.state.held = one
                return True
        return False

    def _treat(self, one: str) -> bool:
        tools = self.state.of_type(self.tool)
        if not tools:
            return False
        self._reach(tools[0], is_opened=False)
        self._do(f"{self.verb} {self._name(one)} with {self._name(tools[0])}")
        self.state.marks.add((self.mark, one))
        self.state.marks.discard(({"ishot": "iscool", "iscool": "ishot"}.get(self.mark, ""), one))
        return True

    def _put(self, one: str, where: str) -> bool:
        if not where:
            return False
        self._reach(where)
        self._do(f"move {self._name(one)} to {self._name(where)}")
        self.state.inside[one], self.state.held = where, ""
        return True

    def _put_away(self, one: str) -> bool:
        kind = self.state.types.get(one, "")
        fitting = [w for w in sorted(self.state.locations) if (self.state.types.get(w, ""), kind) in self.state.fits]
        return self._put(one, min(fitting, key=lambda where: (not self._at(where), where), default=""))

    def _light(self) -> bool:
        for lamp in self._lamps():
            self._reach(self.state.inside[lamp], is_opened=False)
            if ("istoggled", lamp) not in self.state.marks:
                self._do(f"use {self._name(lamp)}")
                self.state.marks.add(("istoggled", lamp))
            return True
        return False

    def _reach(self, where: str, *, is_opened: bool = True) -> None:
        if not self._at(where):
            self._do(f"go to {self._name(where)}")
            self.state.at = self.state.locations[where]
        if is_opened and where in self.state.closed:
            self._do(f"open {self._name(where)}")
            self.state.closed.discard(where)

    def _at(self, where: str) -> bool:
        return self.state.locations.get(where) == self.state.at

    def _name(self, one: str) -> str:
        return self.state.names[one]

    def _do(self, action: str) -> None:
        self.actions.append(action)
