"""Rows of figures as a data frame: of pandas where that is installed, else of pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

#: `pandas.DataFrame`, or `pyarrow.Table` where pandas is not installed.
Frame: TypeAlias = Any


def frame_of(rows: Sequence[Mapping[str, Any]]) -> Frame:
    """Frame of the rows, with a column for every name; missing values are null."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if find_spec("pandas") is not None:
        import pandas

        return pandas.DataFrame(list(rows), columns=names)
    import pyarrow

    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})
