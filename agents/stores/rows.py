"""Entries as rows of a store's file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.stores.entry import Entry, Origin
from rlhf.errors import StoreError

#: Of the table `entry`, without its vectors.
COLUMNS = "id, kind, text, fields, task, split, version"


def entry_of(row: tuple[Any, ...]) -> Entry:
    """The entry of a row of `COLUMNS`."""
    number, kind, text, fields, task, split, version = row
    return Entry(number, kind, text, json.loads(fields), Origin(task, split), version)


def where(**wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """The condition that columns have these values, None being any; and the values."""
    given = {name: value for name, value in wanted.items() if value is not None}
    return (" WHERE " if given else "") + " AND ".join(f"{name} = ?" for name in given), tuple(given.values())


def written(fields: Mapping[str, Any], path: Path) -> str:
    """The fields as JSON with sorted names. Raises StoreError where they are no plain values."""
    try:
        return json.dumps(dict(fields), sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(
            "the fields of an entry are not plain JSON values", where=str(path), got=str(error), expected="plain values"
        ) from error
