"""Harness inside the sandbox: calls functions of a tested program and reports plain values.

It runs in the same process as the tested program, which may do to it what it likes. So nothing is decided here: there
is nothing to compare with on this side, and what comes out is taken apart as text on the other.
"""

from __future__ import annotations

import sys

#: Folder of the tested program, out of the way until it is loaded: it may hold a `types.py` or a `json.py` of its own.
_WORK = sys.path.pop(0) if __name__ == "__main__" else ""

import json  # noqa: E402
import os  # noqa: E402
import types  # noqa: E402

#: Names of the tested program and of this file, beside the files of a repository.
PROGRAM, HARNESS = "_rlhf_program.py", "_rlhf_harness.py"
TYPE_CHECKING = False  # without importing typing: this runs anew for every program
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def encode(value: Any) -> Any:
    """Return `value` as JSON that tells apart what Python tells apart. Raises TypeError for what is no plain value.

    Plain are None, booleans, numbers, texts, bytes, and lists, tuples, sets and dictionaries of them; of dictionaries
    also those of `collections`. Any other class is not, whatever it inherits from.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *(encode(inner) for inner in value)]
    if isinstance(value, dict) and (kind is dict or kind.__module__ == "collections"):
        return ["dict", *([encode(key), encode(inner)] for key, inner in dict.items(value))]
    if kind in (bytes, bytearray):
        return ["bytes", value.decode("latin-1")]
    if kind is complex:
        return ["complex", value.real, value.imag]
    raise TypeError(f"{kind.__name__} is not a plain value")


def decode(coded: Any, names: Mapping[str, Any] | None = None) -> Any:
    """Return what was encoded. Raises ValueError, TypeError, IndexError or OverflowError for what was not.

    Args:
        coded: JSON.
        names: inside the sandbox, what calls among the values call; outside there are none.
    """
    if not isinstance(coded, list):
        if isinstance(coded, dict):
            raise ValueError("not a plain value")
        return coded
    kind, *rest = coded
    if kind == "call" and names is not None:
        return call(rest[0], names)
    if kind == "bytes":
        return bytes(rest[0], "latin-1")
    if kind == "complex":
        return complex(*rest)
    if kind == "dict":
        return {decode(key, names): decode(inner, names) for key, inner in rest}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in kinds:
        raise ValueError(f"{kind!r} is no kind of plain value")
    return kinds[kind](decode(inner, names) for inner in rest)


def call(wanted: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Do one call: `name` is that of a function, or such as `Solution().add`."""
    first, *parts = wanted["name"].split(".")
    function = names[first.removesuffix("()")]
    function = function() if first.endswith("()") else function
    for part in parts:
        function = getattr(function, part.removesuffix("()"))
        function = function() if part.endswith("()") else function
    positional = [decode(inner, names) for inner in wanted["args"]]
    return function(*positional, **{key: decode(inner, names) for key, inner in wanted["kwargs"].items()})


def main() -> None:
    """Load the program, then do the calls in order and write a line for each."""
    order = json.load(sys.stdin)
    channel = os.dup(1)
    os.dup2(2, 1)  # what the program prints is no result
    tested = types.ModuleType("tested")
    sys.modules["tested"] = tested
    sys.path.insert(0, _WORK)
    with open(PROGRAM, encoding="utf-8") as file:
        exec(compile(file.read(), PROGRAM, "exec"), tested.__dict__)
    for index, wanted in enumerate(order["calls"]):
        try:
            said = {"value": encode(call(wanted, tested.__dict__))}
            line = json.dumps([order["token"], index, said])
        except BaseException as error:  # SystemExit too: it is an answer, a wrong one
            said = {"raised": type(error).__name__ + ": " + str(error)[:200]}
            line = json.dumps([order["token"], index, said])
        os.write(channel, line.encode() + b"\n")


if __name__ == "__main__":
    main()
