"""Plain values for JSON, which has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def finite(value: Any) -> Any:
    """Nested mappings, lists and tuples with None for every number that is not finite; names become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def cell(value: Any) -> Any:
    """Cell of a table as JSON has it: arrays as lists, dates as ISO text, None for what is no number or no time.

    Raises:
        TypeError: it is nothing of the kind, such as bytes.
    """
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): cell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cell(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat() if value == value else None
    if isinstance(value, timedelta | Decimal | UUID):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return finite(value)
    raise TypeError(f"no plain value: {type(value).__name__}")


def finite_json(text: str) -> Any:
    """Plain values of JSON, with None for `NaN` and `Infinity`, which Python writes and no other reader takes."""
    return json.loads(text, parse_constant=lambda _: None)
