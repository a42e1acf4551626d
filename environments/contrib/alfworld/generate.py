"""Generated games in ALFWorld's form from the package's assets; they are not ALFWorld's games.

The package carries the domain, the grammar of its texts, the goals, tables of what fits where, and the receptacles of
120 scenes; the games themselves are a download. A game made here puts things into the receptacles of a scene at random,
and asks for one of the six types of task. It has the two files that the package reads: `game.tw-pddl` with domain,
grammar and problem, and `traj_data.json` with the type of the task and its objects.

`train` and `dev` are games in the scenes that the package's constants name for training, `test` in the others.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from environments.contrib.alfworld.oracle import Goal, State, plan
from environments.packages import content_hash, version_of
from rlhf.errors import EnvError, MissingPackageError

EXTRA = "alfworld"

TaskType = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
#: The six types of task, in the package's order.
TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)
#: What has to be done to the object first: its table in the package's constants, and the receptacle for it.
TREATMENTS: Mapping[str, tuple[str, str]] = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
_LAMPS = ("DeskLamp", "FloorLamp")
_MOST_COPIES = 3
_PARTS = ("alfworld/data/", "alfworld/gen/layouts/", "alfworld/gen/constants.py", "alfworld/gen/goal_library.py")


@dataclass(frozen=True)
class Made:
    """A game.

    Attributes:
        game: contents of `game.tw-pddl`.
        trajectory: contents of `traj_data.json`.
    """

    game: Mapping[str, Any]
    trajectory: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write both files, as the package looks for them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "game.tw-pddl").write_text(json.dumps(self.game))
        (folder / "traj_data.json").write_text(json.dumps(self.trajectory))


@dataclass(frozen=True)
class _Draw:
    """Random draw of a scene: ids in the package's form, before they are named."""

    task_type: str
    scene: int
    receptacles: Mapping[str, tuple[int, ...]]  # id to location
    objects: Mapping[str, str]  # id to the receptacle that it is in
    target: str
    parent: str
    lamp: str


def release() -> str:
    """Name of the assets: version and hash of their files. Raises MissingPackageError, EnvError."""
    return f"{version_of('alfworld', EXTRA)}-{content_hash('alfworld', EXTRA, *_PARTS)}"


def type_of(seed: int) -> TaskType:
    """The type of task that a seed asks for: each type comes once in six."""
    return TASK_TYPES[seed % len(TASK_TYPES)]


def make(split: str, seed: int) -> Made:
    """Make the game of a seed; the same in every process.

    Raises:
        MissingPackageError: alfworld is not installed.
        EnvError: no scene of the split allows the type of task.
    """
    constants, rng = _module("constants"), random.Random(f"{split}/{seed}")
    task_type = type_of(seed)
    rooms = constants.GOALS_VALID[task_type]
    scenes = [
        number
        for number in (constants.TEST_SCENE_NUMBERS if split == "test" else constants.TRAIN_SCENE_NUMBERS)
        if any(number in constants.SCENE_TYPE[room] for room in rooms)
    ]
    rng.shuffle(scenes)
    for scene in scenes:
        drawn = _drawn(task_type, scene, rng)
        if drawn is not None:
            return _made(drawn, seed, rng)
    raise EnvError("no scene allows this type of task", where="ALFWorld", got=f"{task_type} in {split}")


def _drawn(task_type: str, scene: int, rng: random.Random) -> _Draw | None:
    """Choose what is wanted and put everything somewhere; None where the scene lacks what it takes."""
    fits, receptacles, kinds = _fits(), *_scene(scene)
    places: dict[str, list[str]] = {}
    for name in receptacles:
        places.setdefault(_kind(name), []).append(name)
    portable = [kind for kind in kinds if any(kind in fits[where] for where in places if where in fits)]
    lamps = [kind for kind in _LAMPS if kind in kinds]
    table, tool = TREATMENTS.get(task_type, ("", ""))
    treatable = _module("constants").VAL_ACTION_OBJECTS.get(table, portable)
    if (tool and tool not in places) or (task_type == "look_at_obj_in_light" and not lamps):
        return None
    wanted = [
        (kind, parent)
        for kind in portable
        if kind in treatable
        for parent in sorted(places)
        if kind in fits.get(parent, ()) and parent != tool
        if any(kind in fits[other] for other in places if other in fits and other != parent)
    ]
    if not wanted:
        return None
    target, parent = rng.choice(wanted)
    lamp = rng.choice(lamps) if lamps else ""
    objects: dict[str, str] = {}
    for kind in portable:
        fewest = 2 if kind == target and task_type == "pick_two_obj_and_place" else 1
        for _ in range(rng.randint(fewest, _MOST_COPIES)):
            where = [w for w in sorted(places) if kind in fits.get(w, ()) and not (kind == target and w == parent)]
            objects[_new_id(kind, rng)] = rng.choice(places[rng.choice(where)])
    if lamp:
        closed = _module("constants").OPENABLE_CLASS_SET
        stands = [name for name in receptacles if _kind(name) not in closed]
        objects[_new_id(lamp, rng)] = rng.choice(stands)
    return _Draw(task_type, scene, receptacles, objects, target, parent, lamp)


def _made(drawn: _Draw, seed: int, rng: random.Random) -> Made:
    goals, folder = _module("goal_library").gdict, _folder()
    is_light = drawn.task_type == "look_at_obj_in_light"
    named = {
        "obj": drawn.target,
        "recep": "" if is_light else drawn.parent,
        "toggle": drawn.lamp if is_light else "",
        "mrecep": "",
    }
    goal = goals[drawn.task_type]["pddl"].format(**named).replace("#", "-")
    sentence = rng.choice(goals[drawn.task_type]["templates"]).format(**{k: v.lower() for k, v in named.items()})
    trajectory = {
        "task_id": f"made_{seed}",
        "task_type": drawn.task_type,
        "pddl_params": {
            "object_target": named["obj"],
            "parent_target": named["recep"],
            "toggle_target": named["toggle"],
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"floor_plan": f"FloorPlan{drawn.scene}", "scene_num": drawn.scene},
        "turk_annotations": {"anns": []},
    }
    facts = _facts(drawn)
    game = {
        "pddl_domain": (folder / "data" / "alfred.pddl").read_text(),
        "grammar": (folder / "data" / "alfred.twl2").read_text().replace("UNKNOWN GOAL", sentence),
        "pddl_problem": _problem(seed, facts, goal),
        "solvable": True,
        "walkthrough": plan(State.of(facts), Goal.of(trajectory)),
    }
    return Made(game, trajectory)


def _facts(drawn: _Draw) -> list[tuple[str, ...]]:
    """All that holds at the start, in the words of the domain."""
    constants, fits = _module("constants"), _fits()
    locations = {name: "loc|" + "|".join(map(str, point)) for name, point in drawn.receptacles.items()}
    start = max(point[0] for point in drawn.receptacles.values()) + 4  # nothing is there
    facts: list[tuple[str, ...]] = [("atLocation", "agent1", f"loc|{start}|0|0|30")]
    for name in drawn.receptacles:
        facts += [("receptacleType", name, f"{_kind(name)}Type"), ("receptacleAtLocation", name, locations[name])]
        if _kind(name) in constants.OPENABLE_CLASS_SET:
            facts.append(("openable", name))
    kinds = sorted({_kind(name) for name in drawn.objects})
    for where in sorted({_kind(name) for name in drawn.receptacles}):
        facts += [("canContain", f"{where}Type", f"{kind}Type") for kind in kinds if kind in fits.get(where, ())]
    tables = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable", "Sliceable": "sliceable"}
    for name, where in drawn.objects.items():
        kind = _kind(name)
        facts += [("objectType", name, f"{kind}Type"), ("inReceptacle", name, where)]
        facts.append(("objectAtLocation", name, locations[where]))
        facts.append(("toggleable" if kind in _LAMPS else "pickupable", name))
        if kind in constants.MOVABLE_RECEPTACLES_SET:
            facts.append(("isReceptacleObject", name))
        facts += [(fact, name) for table, fact in tables.items() if kind in constants.VAL_ACTION_OBJECTS[table]]
    return [(fact[0], *map(_symbol, fact[1:])) for fact in facts]


def _problem(seed: int, facts: Sequence[tuple[str, ...]], goal: str) -> str:
    """The problem in PDDL; `goal` closes it."""

    def of(predicate: str, i: int) -> list[str]:
        return sorted({fact[i] for fact in facts if fact[0] == predicate})

    objects = {
        "agent": ["agent1"],
        "otype": sorted({*of("objectType", 2), *of("canContain", 2)}),
        "rtype": of("receptacleType", 2),
        "object": of("objectType", 1),
        "receptacle": of("receptacleType", 1),
        "location": sorted({*of("receptacleAtLocation", 2), *of("atLocation", 2)}),
    }
    listed = "\n        ".join(f"{name} - {kind}" for kind, names in objects.items() for name in names)
    holds = "\n        ".join(f"({' '.join(fact)})" for fact in facts)
    return (
        f"(define (problem made_{seed})\n    (:domain alfred)\n    (:objects\n        {listed}\n    )\n"
        f"    (:init\n        (= (total-cost) 0)\n        {holds}\n    )\n{goal.rstrip()}\n"
    )


@cache
def _scene(number: int) -> tuple[Mapping[str, tuple[int, ...]], Sequence[str]]:
    """Receptacles of a scene with the places to use them, and its kinds of objects."""
    folder = _folder() / "gen" / "layouts"
    points = json.loads((folder / f"FloorPlan{number}-openable.json").read_text())
    # Half and quarter metres, as the names of locations count them.
    places = {
        name: (round(x * 4), round(z * 4), turn // 90, tilt) for name, (x, z, turn, tilt) in sorted(points.items())
    }
    return places, sorted(json.loads((folder / f"FloorPlan{number}-objects.json").read_text()))


@cache
def _fits() -> Mapping[str, frozenset[str]]:
    """Kinds of objects that each kind of receptacle may hold, without slices."""
    table: Mapping[str, Iterable[str]] = _module("constants").VAL_RECEPTACLE_OBJECTS
    return {where: frozenset(kind for kind in kinds if not kind.endswith("Sliced")) for where, kinds in table.items()}


@cache
def _folder() -> Path:
    """Folder of the package, found without an import, which would have side effects."""
    version_of("alfworld", EXTRA)
    found = importlib.util.find_spec("alfworld")
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError("the package alfworld is missing", where="alfworld", hint="install it again")
    return Path(found.submodule_search_locations[0])


@cache
def _module(name: str) -> ModuleType:
    """Table module of the package, executed alone."""
    spec = importlib.util.spec_from_file_location(f"_alfworld_{name}", _folder() / "gen" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kind(name: str) -> str:
    """`Sink|-01.90|+00.97|-01.50|SinkBasin` is a SinkBasin, any other id begins with its kind."""
    parts = name.split("|")
    return parts[4] if len(parts) > 4 else parts[0]


def _new_id(kind: str, rng: random.Random) -> str:
    return f"{kind}|" + "|".join(f"{rng.uniform(-4, 4):+06.2f}" for _ in range(3))


def _symbol(name: str) -> str:
    """The name in PDDL, which has no letters for bars and signs."""
    for letter, word in (("|", "bar"), ("-", "minus"), ("+", "plus"), (".", "dot"), (",", "comma")):
        name = name.replace(letter, f"_{word}_")
    return name


def fingerprint(game: Mapping[str, Any]) -> str:
    """Eight digits over what a game is."""
    told = [re.sub(r"\s+", " ", str(game[part])) for part in ("pddl_domain", "grammar", "pddl_problem")]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:8]
