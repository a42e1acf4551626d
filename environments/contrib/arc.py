"""Abstraction and reasoning on grids (ARC): find the rule of examples, and edit another grid by it.

    Example 1: 120/000 becomes 021/000. ... The grid is 340/000.
    > mirror
    > submit

Grids are rows of digits, one a cell, with / between rows. Tasks are drawn: one to three edits, shown on examples. With
`path` they are those of the Abstraction and Reasoning Corpus, in its files (arXiv 1911.01547, Apache 2.0), which no
registry has. Edits are after ARCLE, arXiv 2407.20806, with whole grids and boxes in place of its selections.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from functools import lru_cache
from itertools import chain, permutations, product
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.procedural import Attempt, Drawn, digest
from environments.core.seed_splits import refuse_unknown
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

Grid = tuple[tuple[int, ...], ...]
_TURNS: Mapping[str, Callable[[Grid], Grid]] = {
    "mirror": lambda grid: tuple(row[::-1] for row in grid),
    "flip": lambda grid: grid[::-1],
    "rotate": lambda grid: tuple(zip(*grid[::-1], strict=True)),
    "transpose": lambda grid: tuple(zip(*grid, strict=True)),
}
_MOST, _LONGEST = 30, 2_000
_UNKNOWN = (
    "Unknown action. Edits: mirror, flip, rotate, transpose, copy, recolour A B, paint ROW COLUMN COLOUR, "
    "fill ROW COLUMN ROW COLUMN COLOUR, grid 012/345; then submit. Rows and columns count from 0."
)


@plain_dataclass(frozen=True)
class Rule:
    """Examples of a rule, a grid to apply it to, what comes of it, and edits that get there.

    `others` are what comes of it by as many other edits that explain the examples as well.
    """

    examples: tuple[tuple[Grid, Grid], ...]
    given: Grid
    wanted: Grid
    edits: tuple[str, ...]
    others: tuple[Grid, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Arc(Drawn):
    """Find the rule of some grids, and edit another by it; pure Python, or files of ARC."""

    size: Annotated[int, Field(ge=2, le=10)] = 3
    """Rows and columns of drawn grids, at most."""
    colours: Annotated[int, Field(ge=2, le=9)] = 4
    """Colours of drawn grids, beside 0."""
    edits: Annotated[int, Field(ge=1, le=3)] = 1
    """Edits that a drawn rule consists of."""
    examples: Annotated[int, Field(ge=1, le=5)] = 2
    """Examples of a drawn rule."""
    path: Path | None = None
    """Folder with `training` and `evaluation`, of JSON files as ARC has them: the splits `train` and `test`."""
    max_steps: Annotated[int, Field(ge=2)] = 8
    """Edits, `submit` among them; a grid that is not submitted counts for nothing."""

    name: ClassVar[str] = "arc"
    #: A grid of 30 x 30 is written in 950 characters.
    agent_defaults: ClassVar[Mapping[str, Any]] = {"max_action_chars": 1000}

    @property
    def level(self) -> str:
        """Level: size, colours, edits and examples of a rule."""
        return f"{self.size}-{self.colours}-{self.edits}-{self.examples}"

    def draw(self, rng: random.Random) -> Rule:
        """Draw edits, and grids that all of them change."""
        while True:
            edits = tuple(self._edit(rng) for _ in range(self.edits))
            shape = (rng.randint(2, self.size), rng.randint(2, self.size))
            grids = [self._grid(rng, *shape) for _ in range(self.examples + 1)]
            done = [applied(edits, grid) for grid in grids]
            if all(a != b for a, b in zip(grids, done, strict=True)) and len(set(grids)) == len(grids):
                examples = tuple(zip(grids[1:], done[1:], strict=True))
                others = self._explained(examples, grids[0])
                return Rule(examples, grids[0], done[0], edits, tuple(sorted(others - {done[0]})))

    def _explained(self, examples: Sequence[tuple[Grid, Grid]], given: Grid) -> set[Grid]:
        """Results for `given` of all rules of `edits` edits that explain the examples.

        Turns and recolourings may be done in any order, so that some of the edits turn and the rest maps colours.
        """
        found: set[Grid] = set()
        for n_turns in range(self.edits + 1):
            for turns in product(_TURNS, repeat=n_turns):
                told: dict[int, int] = {}  # what becomes of each colour of the examples
                pairs = [(applied(turns, before), after) for before, after in examples]
                if all(_is_recoloured(before, after, told) for before, after in pairs):
                    turned = applied(turns, given)
                    maps = _colour_maps(self.colours, self.edits - n_turns)
                    fits = (m for m in maps if all(m[a] == b for a, b in told.items()))
                    found |= {tuple(tuple(m[x] for x in row) for row in turned) for m in fits}
        return found

    def _edit(self, rng: random.Random) -> str:
        a, b = rng.sample(range(self.colours + 1), 2)
        return rng.choice([*_TURNS, f"recolour {a} {b}"])

    def _grid(self, rng: random.Random, rows: int, columns: int) -> Grid:
        return tuple(tuple(rng.randint(0, self.colours) for _ in range(columns)) for _ in range(rows))

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split. Raises EnvError for another split, or a folder that is none of ARC's."""
        if self.path is None:
            return super().tasks(split)
        refuse_unknown(split, self.properties.splits, "Arc.tasks")
        if split == "dev":
            return []
        return [Task(id=f"arc/{split}/{name}", info={"number": i}) for name, i in listed(self.path, split)]

    def rule(self, task: Task) -> Rule:
        """The rule of a task."""
        if self.path is None:
            found: Rule = self.instance(task)
            return found
        _, split, name = task.id.split("/", 2)
        return read_rule(self.path / _FOLDERS[split] / f"{name.rpartition('#')[0]}.json", task.info["number"])

    def start(self, task: Task) -> ArcEpisode:
        """Begin one attempt at a task."""
        return ArcEpisode(self.rule(task), self.max_steps)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Make the edits, from the beginning where something was edited, and submit; None where steps are too few."""
        rule, episode = self.rule(task), self.start(task)
        episode.after(taken)
        if episode.over:
            return () if episode.solved else None
        again = () if episode.grid == rule.given else ("copy",)
        path = ("submit",) if episode.grid == rule.wanted else (*again, *rule.edits, "submit")
        return path if len(path) <= episode.steps_left else None


_FOLDERS = {"train": "training", "test": "evaluation"}


@lru_cache(maxsize=8)
def listed(folder: Path, split: str) -> tuple[tuple[str, int], ...]:
    """Names and numbers of the tests of each file of a split. Raises EnvError where there are none."""
    files = sorted((folder / _FOLDERS[split]).glob("*.json"))
    if not files:
        raise EnvError(
            "this folder holds no tasks of ARC",
            where="environment.path",
            got=str(folder / _FOLDERS[split]),
            expected="JSON files, each with train and test",
            hint="give the folder data of github.com/fchollet/ARC-AGI",
        )
    return tuple((f"{f.stem}#{i}", i) for f in files for i in range(len(json.loads(f.read_text("utf-8"))["test"])))


@lru_cache(maxsize=1024)
def read_rule(file: Path, number: int) -> Rule:
    """Read one test of a file. Raises EnvError where it is not in ARC's form."""
    try:
        told = json.loads(file.read_text("utf-8"))
        examples = tuple((_grid_of(pair["input"]), _grid_of(pair["output"])) for pair in told["train"])
        test = told["test"][number]
        given, wanted = _grid_of(test["input"]), _grid_of(test["output"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise EnvError(
            "this file is not in ARC's form",
            where=str(file),
            got=f"{type(error).__name__}: {error}",
            expected='{"train": [{"input": [[0]], "output": [[0]]}], "test": [...]}, rows of digits of one length',
        ) from error
    return Rule(examples, given, wanted, (f"grid {as_text(wanted)}",))


def _grid_of(rows: object) -> Grid:
    found = read_grid("/".join("".join(map(str, row)) for row in rows)) if isinstance(rows, list) else None
    if found is None:
        raise ValueError("a grid is no rows of digits of one length")
    return found


def _is_recoloured(before: Grid, after: Grid, told: dict[int, int]) -> bool:
    """True if each colour of a grid became one colour, that in `told`; new colours are added to it."""
    if [len(row) for row in before] != [len(row) for row in after]:
        return False
    cells = zip(chain.from_iterable(before), chain.from_iterable(after), strict=True)
    return all(told.setdefault(a, b) == b for a, b in cells)


@lru_cache(maxsize=16)
def _colour_maps(colours: int, n: int) -> frozenset[tuple[int, ...]]:
    """Colour maps of all sequences of `n` recolourings: the new colour of each."""
    all_colours = range(colours + 1)
    maps = {tuple(all_colours)}
    for _ in range(n):
        maps = {tuple(b if x == a else x for x in m) for m in maps for a, b in permutations(all_colours, 2)}
    return frozenset(maps)


def as_text(grid: Grid) -> str:
    """Rows of digits, with / between them."""
    return "/".join("".join(map(str, row)) for row in grid)


def read_grid(text: str) -> Grid | None:
    """The grid of `012/345`; None where rows differ in length, or there are more than 30 rows or columns."""
    rows = text.split("/")
    fits = 1 <= len(rows) <= _MOST and 1 <= len(rows[0]) <= _MOST and len({len(row) for row in rows}) == 1
    return tuple(tuple(map(int, row)) for row in rows) if fits and re.fullmatch("[0-9/]+", text) else None


def applied(edits: Sequence[str], grid: Grid) -> Grid:
    """Grid after the edits; what is no edit changes nothing."""
    for edit in edits:
        grid = edited(edit, grid, grid) or grid
    return grid


def edited(action: str, grid: Grid, given: Grid) -> Grid | None:
    """Grid after one edit, `given` being the first one; None where it is no edit."""
    verb, *rest = action.split() or [""]
    if verb == "grid" and len(rest) == 1:
        return read_grid(rest[0])
    if not all(re.fullmatch(r"\d{1,2}", word) for word in rest):
        return None
    numbers = [int(word) for word in rest]
    if not numbers:
        return given if verb == "copy" else _TURNS[verb](grid) if verb in _TURNS else None
    if verb == "recolour" and len(numbers) == 2 and max(numbers) < 10:
        return tuple(tuple(numbers[1] if x == numbers[0] else x for x in row) for row in grid)
    box = [*numbers[:2], *numbers] if verb == "paint" and len(numbers) == 3 else numbers if verb == "fill" else []
    if len(box) != 5 or box[4] > 9 or max(box[0], box[2]) >= len(grid) or max(box[1], box[3]) >= len(grid[0]):
        return None
    rows, columns = range(box[0], box[2] + 1), range(box[1], box[3] + 1)
    return tuple(
        tuple(box[4] if i in rows and j in columns else x for j, x in enumerate(row)) for i, row in enumerate(grid)
    )


class ArcEpisode(Attempt):
    """One attempt: a grid is edited until it is submitted. The key tells the task and the grid."""

    def __init__(self, rule: Rule, max_steps: int) -> None:
        super().__init__(max_steps)
        self._rule, self.grid, self._name = rule, rule.given, digest(repr(rule))
        told = [f"Example {i}: {as_text(a)} becomes {as_text(b)}." for i, (a, b) in enumerate(rule.examples, start=1)]
        self.opening = self.opened("\n".join([*told, f"The grid is {as_text(self.grid)}. Edit it by the same rule."]))

    def do(self, action: str) -> tuple[str, bool]:
        """Edit the grid, or submit it."""
        said = action.strip().strip("<>\"'`.").casefold()
        if said == "submit":
            self.done, self.solved = True, self.grid in (self._rule.wanted, *self._rule.others)
            self.score = float(self.solved)
            return "Right." if self.solved else "Wrong.", True
        made = edited(said, self.grid, self._rule.given) if len(said) <= _LONGEST else None
        if made is None:
            return _UNKNOWN, False
        self.grid = made
        return f"The grid is {as_text(made)}.", True

    def state(self) -> str:
        """Return the task, the grid, and whether it is submitted."""
        return f"{self._name}/{as_text(self.grid)}{'/submitted' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Return the edits of whole grids, for colours that are there, and to submit."""
        colours = sorted(
            {x for pair in (*self._rule.examples, (self.grid, self.grid)) for g in pair for r in g for x in r}
        )
        recolour = [f"recolour {a} {b}" for a in colours for b in colours if a != b]
        return tuple(sorted([*_TURNS, "copy", "submit", *recolour]))
