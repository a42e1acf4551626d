"""Splits by seed range: `train` counts from 0, `dev` from 10 000 000, `test` from 20 000 000.

None may be longer than 10 000 000, so no seed is in two. Two seeds may still draw the same content, where a world does
nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties
from rlhf.data import Task
from rlhf.errors import DataError, EnvError
from rlhf.settings import STRICT

#: First seed of each split; no split is longer than the gap.
FIRST_SEED: Mapping[str, int] = {"train": 0, "dev": 10_000_000, "test": 20_000_000}

SplitSize = Annotated[int, Field(ge=1, le=10_000_000)]


def refuse_unknown(split: str, known: Iterable[str], where: str) -> None:
    """Raise EnvError where `split` is none of `known`; `where` is the call that it was given to."""
    if split not in known:
        raise EnvError("no such split", where=where, got=repr(split), expected=", ".join(known))


def refuse_two_splits(places: dict[str, str], question: str, split: str, where: str) -> None:
    """Note the split of a question of a file in `places`. Raises EnvError where it is in another one already."""
    if places.setdefault(question, split) != split:
        raise EnvError(
            "one question is in two splits",
            where=where,
            got=f"{question[:60]!r} in {places[question]} and {split}",
            expected="each question in one split",
            hint="leave one of them out, or give both the same key `split`",
        )


def asked_of(environment: Any, split: str) -> Any:
    """The field `n_train`, `n_dev` or `n_test` of an environment. Raises EnvError for any other split."""
    refuse_unknown(split, FIRST_SEED, f"{type(environment).__name__}.tasks")
    return getattr(environment, f"n_{split}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Seeded:
    """Splits by seed range: numbers of tasks, and properties of tasks drawn by seed."""

    n_train: SplitSize = 1_000
    """Tasks of the split `train`: one per seed, from the first on."""
    n_dev: SplitSize = 1_000
    """The same for `dev`."""
    n_test: SplitSize = 1_000
    """The same for `test`."""

    @property
    def properties(self) -> Properties:
        """Properties of the environment."""
        return Properties(
            deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True, splits=tuple(FIRST_SEED)
        )

    def n_in(self, split: str) -> int:
        """Number of tasks in a split. Raises EnvError for any other name."""
        return int(asked_of(self, split))

    def seeds(self, split: str) -> range:
        """Return the seeds of a split. Raises EnvError for any other name."""
        n = self.n_in(split)
        return range(FIRST_SEED[split], FIRST_SEED[split] + n)

    def listed(self, split: str, prefix: str, info: Mapping[str, Any] | None = None) -> list[Task]:
        """List the tasks of a split: one per seed, with the id `<prefix>/<split>/<seed>`.

        Raises:
            EnvError: no such split.
        """
        kept = info or {}
        return [Task(id=f"{prefix}/{split}/{seed}", seed=seed, info=kept) for seed in self.seeds(split)]


def split_of_seed(seed: int) -> str:
    """Name the split whose range a seed is in."""
    return "train" if seed < FIRST_SEED["dev"] else "dev" if seed < FIRST_SEED["test"] else "test"


def split_in(task: Task, prefix: str, where: str) -> str:
    """Name the split in the id of a task that `Seeded.listed` made with this prefix.

    Raises:
        DataError: it is another environment's, or that of another version of a package.
    """
    split = next((name for name in FIRST_SEED if task.id == f"{prefix}/{name}/{task.seed}"), None)
    if split is None:
        raise of_another(task, where, f"{prefix}/<split>/<seed>")
    return split


def of_another(task: Task, where: str, expected: str) -> DataError:
    """Error of an environment for a task that it did not make; `expected` is the form of its ids.

    `where` is the environment.
    """
    return DataError(
        "the task is of another environment, or of another version of the package",
        where=where,
        got=task.id,
        expected=expected,
    )
