"""BabyAI grid worlds told in words.

The levels and the bot come from the `minigrid` package (BabyAI: Chevalier-Boisvert et al., arXiv 1810.08272); the
words are our own. One observation is one line:

    You see: a red ball 3 forward 2 right; a wall 4 forward. You carry nothing.

Distances are steps from the agent, in the direction it faces; nearest things come first, then the nearest wall ahead,
to the left and to the right. The agent sees what the package lets it see: 7 x 7 cells ahead of it, not through walls or
closed doors.

The package has no official split. Here a split is a range of generator seeds (`environments.core.seed_splits`), so
no seed is in
two splits. In the smallest levels two seeds may still draw the same room.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from environments.babyai.oracle import bounded, solve
from environments.base import Properties, StepResult, after_end
from environments.core.normalise import plain_words
from environments.core.seed_splits import Seeded, SplitSize
from environments.packages import import_from, version_of
from rlhf.data import Task
from rlhf.errors import EnvError, MissingPackageError, nearest
from rlhf.settings import STRICT

#: What the agent may say, and the package's number for it. The package's seventh action, "done", does nothing.
ACTIONS: Mapping[str, int] = {
    "drop": 4,
    "go forward": 2,
    "pick up": 3,
    "toggle": 5,
    "turn left": 0,
    "turn right": 1,
}

_OTHER_WORDS: Mapping[str, str] = {
    "drop": "drop object,let go,put down,release",
    "go forward": "forward,go ahead,go straight,move,move ahead,move forward,step forward,walk,walk forward",
    "pick up": "grab,pick,pickup,pick up object,take",
    "toggle": "activate,close,close door,open,open box,open door,toggle object,unlock,unlock door,use",
    "turn left": "left,rotate left",
    "turn right": "right,rotate right",
}

_NUMBER_OF_WORDS: Mapping[str, int] = dict(ACTIONS) | {
    words: ACTIONS[action] for action, others in _OTHER_WORDS.items() for words in others.split(",")
}

_NAMES: Mapping[int, str] = {number: action for action, number in ACTIONS.items()}
_UNKNOWN_ACTION = f"Unknown action. Actions: {', '.join(ACTIONS)}."
_DOOR_STATES = ("open", "closed", "locked")
_NOT_TOLD = frozenset({"unseen", "empty", "wall", "floor", "agent"})
_EXTRA = "babyai"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BabyAI(Seeded):
    """BabyAI level as a text environment. All 96 registered levels run; steps are far below a millisecond."""

    level: str = "GoToLocal"
    """Name of the level, with or without `BabyAI-` before and `-v0` after it."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Maximum steps per episode; null is the level's own limit (64 in GoToLocal)."""
    n_train: SplitSize = 10_000
    """Tasks of the split `train`: one per seed, from the first on."""
    reward: Literal["success", "discounted"] = "success"
    """Reward of the solving step: 1, or the package's 1 - 0.9 x steps / limit. All other steps give 0."""

    @field_validator("level")
    @classmethod
    def _short_name(cls, level: str) -> str:
        name = re.sub(r"-v\d+$", "", level.removeprefix("BabyAI-"))
        try:
            known = levels()
        except MissingPackageError:
            return name  # said when it is first used, so that a recipe can be read without the package
        if name not in known or (name != level.removeprefix("BabyAI-") and not known[name].endswith(level[-3:])):
            raise ValueError(f"no BabyAI level is called '{level}'; {nearest(name, known) or ', '.join(known)}")
        return name

    @property
    def properties(self) -> Properties:
        """Properties of the environment."""
        return replace(super().properties, package=f"minigrid {version_of('minigrid', _EXTRA)}", repeats=True)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`: one per seed.

        Raises:
            EnvError: no such split.
            MissingPackageError: `minigrid` is not installed.
        """
        return self.listed(split, f"babyai-{version_of('minigrid', _EXTRA)}/{self.level}")

    def start(self, task: Task) -> BabyAIEpisode:
        """Begin one attempt. Raises MissingPackageError when `minigrid` is not installed."""
        return BabyAIEpisode(self._world(task), self.reward)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions of the package's bot that solve `task` after `taken`, tried out first; None if it finds none.

        See `environments.babyai.oracle` for what the bot cannot do.
        """
        bot = bounded(_import("minigrid.utils.baby_ai_bot").BabyAIBot)
        path = solve(self._world(task), [read_action(text) for text in taken], bot)
        return None if path is None else tuple(_NAMES[number] for number in path)

    def _world(self, task: Task) -> Any:
        """Make the package's own environment, at the start of `task`."""
        world = _import("gymnasium").make(levels()[self.level], disable_env_checker=True).unwrapped
        world.reset(seed=task.seed)
        if self.max_steps is not None:
            world.max_steps = self.max_steps  # after the reset, which sets the level's own limit
        return world


class BabyAIEpisode:
    """Attempt at a level.

    The key of a state covers the whole grid, seen or not, the agent, what it carries, and how far the mission is; the
    number of steps taken is left out.
    """

    def __init__(self, world: Any, reward: Literal["success", "discounted"]) -> None:
        self._world, self._reward = world, reward
        walls = [i for i, cell in enumerate(world.grid.grid) if cell is not None and cell.type == "wall"]
        self._base = hashlib.blake2b(repr((world.mission, world.grid.width, walls)).encode(), digest_size=8)
        # Not the observation of the reset: in some levels the agent is handed its load after that was made.
        self._sees = describe(world, world.gen_obs()["image"])
        self._over = False
        opening = f"Mission: {world.mission}.\n{self._sees}"
        self.opening = StepResult(opening, state_key=self._state_key(), admissible_actions=tuple(ACTIONS))

    async def step(self, action: str) -> StepResult:
        """Do one action. Text that is none of them costs a step and changes nothing else."""
        if self._over:
            raise after_end("BabyAI step", action)
        number = read_action(action)
        if number is None:
            self._world.step_count += 1
            return self._result(0.0, terminated=False, valid=False)
        observation, reward, terminated, _, _ = self._world.step(number)
        self._sees = describe(self._world, observation["image"])
        return self._result(float(reward), terminated=terminated, valid=True)

    async def close(self) -> None:
        """Nothing is held open."""

    def _result(self, reward: float, *, terminated: bool, valid: bool) -> StepResult:
        solved = reward > 0
        truncated = not terminated and self._world.step_count >= self._world.max_steps
        self._over = terminated or truncated
        reply = self._sees if valid else f"{_UNKNOWN_ACTION}\n{self._sees}"
        if terminated:
            reply = "Mission accomplished." if solved else "Mission failed."
        return StepResult(
            reply,
            reward=float(solved) if self._reward == "success" else reward,
            terminated=terminated,
            truncated=truncated,
            state_key=self._state_key(),
            success=solved if self._over else None,
            valid=valid,
            admissible_actions=tuple(ACTIONS),
        )

    def _state_key(self) -> str:
        world, digest = self._world, self._base.copy()
        things = ((i, cell) for i, cell in enumerate(world.grid.grid) if cell is not None and cell.type != "wall")
        cells = [(i, *_code(cell)) for i, cell in things]
        carried = _code(world.carrying) if world.carrying is not None else None
        where = (*map(int, world.agent_pos), int(world.agent_dir))
        digest.update(repr((where, carried, cells, _progress(world.instrs))).encode())
        return digest.hexdigest()


def read_action(text: str) -> int | None:
    """Return the package's number of the action that `text` names, or None.

    Case, white space, `_`, `-`, quotes and full stops are ignored.
    """
    return _NUMBER_OF_WORDS.get(plain_words(text, 40))


@cache
def levels() -> Mapping[str, str]:
    """Short names of all registered levels and their ids in the registry, sorted. Raises MissingPackageError."""
    if _import("minigrid.envs.babyai.core.verifier").use_done_actions:
        raise EnvError(
            "no mission can be accomplished: the package expects an action that this environment does not offer",
            where="BabyAI",
            got="the environment variable BABYAI_DONE_ACTIONS",
            hint="unset it",
        )
    ids = sorted(name for name in _import("gymnasium").registry if name.startswith("BabyAI-"))
    return {re.sub(r"-v\d+$", "", name.removeprefix("BabyAI-")): name for name in ids}


@cache
def _import(module: str) -> Any:
    # minigrid draws with pygame, which would greet on stdout; nothing is drawn here.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    found = import_from(module, "minigrid", _EXTRA)
    generator = import_from("minigrid.envs.babyai.core.roomgrid_level", "minigrid", _EXTRA)
    # The level generator prints each draw that it rejects. Shadowing `print` in that one module silences it in every
    # thread; redirecting stdout would swallow what other threads print meanwhile.
    vars(generator)["print"] = _say_nothing
    return found


def _say_nothing(*_: object, **__: object) -> None:
    pass


@cache
def _constants() -> tuple[Mapping[int, str], Mapping[int, str]]:
    constants = _import("minigrid.core.constants")
    return constants.IDX_TO_OBJECT, constants.IDX_TO_COLOR


def describe(world: Any, image: Any) -> str:
    """Return one line for `image`, the package's view: `[column, row, (kind, colour, state)]`, agent at (3, 6)."""
    kinds, colours = _constants()
    view = image.tolist()
    things: list[tuple[int, int, int, str]] = []
    for i, column in enumerate(view):
        for j, (kind, colour, state) in enumerate(column):
            if kinds[kind] not in _NOT_TOLD and (i, j) != (3, 6):
                name = f"{colours[colour]} {kinds[kind]}"
                name = f"{_DOOR_STATES[state]} {name}" if kinds[kind] == "door" else name
                things.append((6 - j + abs(i - 3), 6 - j, i - 3, f"{_article(name)} {name}{_place(6 - j, i - 3)}"))
    phrases = [thing[-1] for thing in sorted(things)]
    for ahead, right in ((1, 0), (0, -1), (0, 1)):
        reach = 6 if ahead else 3
        cells = ((n, view[3 + n * right][6 - n * ahead][0]) for n in range(1, reach + 1))
        wall = next((n for n, kind in cells if kinds[kind] == "wall"), None)
        if wall is not None:
            phrases.append(f"a wall{_place(wall * ahead, wall * right)}")
    load = "nothing"
    if world.carrying is not None:
        load = f"a {world.carrying.color} {world.carrying.type}"
    return f"You see: {'; '.join(phrases) or 'nothing'}. You carry {load}."


def _place(ahead: int, right: int) -> str:
    side = f" {abs(right)} {'right' if right > 0 else 'left'}" if right else ""
    return (f" {ahead} forward" if ahead else "") + side


def _article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"


def _code(cell: Any) -> tuple[Any, ...]:
    """Kind, colour, state, and what lies inside."""
    return (*cell.encode(), _code(cell.contains) if cell.contains is not None else None)


def _progress(instruction: Any) -> tuple[Any, ...]:
    """Progress of the mission: finished parts, and believed and known places of its objects."""
    if hasattr(instruction, "instr_a"):
        done = (instruction.a_done == "success", instruction.b_done == "success")
        return (*done, _progress(instruction.instr_a), _progress(instruction.instr_b))
    named = (getattr(instruction, name, None) for name in ("desc", "desc_move", "desc_fixed"))
    places = [([_cell(p) for p in d.obj_poss], [_cell(thing.cur_pos) for thing in d.obj_set]) for d in named if d]
    return (getattr(instruction, "preCarrying", None) is None, places)


def _cell(position: Any) -> tuple[int, ...] | None:
    """Column and row as integers; (-1, -1) for what is carried, None for what lies in a box."""
    return None if position is None else tuple(map(int, position))
