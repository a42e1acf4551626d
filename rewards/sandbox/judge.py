"""The process in which what a program returned is read and compared; see `rewards.sandbox.values`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rewards.sandbox.asserts import Assertion, parse
from rewards.sandbox.harness import decode

_MOST_SAID = 300


def serve(name: str, *arguments: Any) -> Any:
    """Do one of the two; for a process of its own."""
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    return _read(*arguments) if name == "read" else [_compared(*test) for test in arguments[0]]


def _read(stdout: str, token: str, n: int) -> list[list[str]]:
    found: list[list[str]] = []
    for line in stdout.split("\n"):
        try:
            said_token, index, said = json.loads(line)
            if said_token != token or index != len(found) or len(found) == n:
                continue
            if "raised" in said:
                found.append(["", str(said["raised"])[:_MOST_SAID]])
            else:
                decode(said["value"])
                found.append([json.dumps(said["value"]), ""])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError):
            continue
    return found


def _compared(kind: str, wanted: Any, coded: Sequence[str]) -> str:
    try:
        values = [decode(json.loads(value)) for value in coded]
        holds = _assertion(wanted).holds(values) if kind == "assert" else bool(_as_json(values[0]) == wanted)
        return "" if holds else f"returned {', '.join(map(repr, values))[:200]}"
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError):
        return "returned what cannot be compared or shown"


@lru_cache(maxsize=1024)
def _assertion(text: str) -> Assertion:
    return parse(text, "unit_tests")[0]


def _as_json(value: Any) -> Any:
    """Return a plain value as it would be written as JSON, where a tuple is a list."""
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _as_json(v) for key, v in value.items()}
    return value
