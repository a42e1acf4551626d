"""Columns of the data, such as category, difficulty or subject, by which the results of an evaluation are split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf.data import Task
from rlhf.errors import RecipeError, nearest

#: Group of the tasks whose row has no value in a column.
NONE = "(none)"
#: Names of columns that a message gives.
_MOST_NAMED = 12


def groups_by(tasks: Iterable[Task], columns: Sequence[str], *, where: str = "--by") -> dict[str, dict[str, str]]:
    """Return the group of each task in each of `columns`.

    Args:
        tasks: of the evaluation.
        columns: of the rows of a data set that are neither prompt nor reference, or keys of `Task.info` of another
            environment; `meta.subject` is a key within a column.
        where: for the message.

    Returns:
        Column -> task id -> value as text, `(none)` where the task has none. Groups are in order: numbers by size,
        also within text, and `(none)` last.

    Raises:
        RecipeError: no task has such a column.
    """
    rows = {task.id: _row(task) for task in tasks}
    found = {}
    for column in columns:
        values = {task: _value(row, column) for task, row in rows.items()}
        if all(value is None for value in values.values()):
            names = dict.fromkeys(name for row in rows.values() for name in row)
            raise RecipeError(
                "no task has this column",
                where=where,
                got=column,
                expected=", ".join(list(names)[:_MOST_NAMED]) + ", ..." * (len(names) > _MOST_NAMED)
                or "tasks whose rows have other columns than prompt and reference",
                hint=nearest(column, names) or "name a column of the data",
            )
        texts = {task: NONE if value is None else _text(value) for task, value in values.items()}
        found[column] = dict(sorted(texts.items(), key=lambda pair: _order(pair[1])))
    return found


def _row(task: Task) -> dict[str, Any]:
    """The columns of the task's row; of an environment without rows, what its task says of itself."""
    columns = task.info.get("columns")
    return dict(columns if isinstance(columns, Mapping) else task.info)


def _value(row: Mapping[str, Any], column: str) -> Any:
    outer, _, inner = column.partition(".")
    if column not in row and inner and isinstance(row.get(outer), Mapping):
        return _value(row[outer], inner)
    value = row.get(column)
    return None if value in ("", [], {}) else value


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _order(text: str) -> tuple[Any, ...]:
    """Sort key: `Level 2` before `Level 10`, and `(none)` behind all."""
    if re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", text):
        return False, [("", float(text))]
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return text == NONE, [(part, 0.0) if i % 2 == 0 else ("", float(part)) for i, part in enumerate(parts)]
