"""Plain values for JSON, which has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Nested mappings, lists and tuples with None for every number that is not finite; names become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def finite_json(text: str) -> Any:
    """Plain values of JSON, with None for `NaN` and `Infinity`, which Python writes and no other reader takes."""
    return json.loads(text, parse_constant=lambda _: None)
