"""The eight APIs of BFCL's multi-turn tasks, and the comparison of their states.

Each episode has objects of its own, and methods are looked up by name among those that are public: no text of a model
is evaluated. What a few methods change for the whole process (the precision of numbers) is put back after each call.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import hashlib
import inspect
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from environments.contrib.bfcl.calls import BfclCall
from environments.packages import import_from

DISTRIBUTION, EXTRA = "bfcl-eval", "bfcl"

_SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_MODULES: Mapping[str, str] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_STATELESS = frozenset({"MathAPI"})
#: Names that the benchmark refuses wherever they stand.
_REFUSED = frozenset({"kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"})
#: Arguments that would keep a computer busy for ever, and how large they may be.
_BOUNDS: Mapping[str, str] = {"power": "exponent", "logarithm": "precision", "square_root": "precision"}
_MOST = 5_000
_NOT_STATE = frozenset({"_last_modified", "_api_description", "parent"})


class Apis:
    """Fresh objects of the classes that a task involves, loaded with its beginning."""

    def __init__(self, classes: Sequence[str], beginning: Mapping[str, Any], *, long_context: bool) -> None:
        self._objects: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        for name in classes:
            made = getattr(import_from(f"{_SOURCES}.{_MODULES[name]}", DISTRIBUTION, EXTRA), name)()
            if name not in _STATELESS:
                made._load_scenario(copy.deepcopy(beginning.get(name, {})), long_context=long_context)
            self._objects[name] = made
            public = inspect.getmembers(made, predicate=inspect.ismethod)
            self._methods.update((method, bound) for method, bound in public if not method.startswith("_"))

    def run(self, call: BfclCall) -> str:
        """Make a call; errors are part of the answer, in the benchmark's words."""
        try:
            result = self._result(call)
        except Exception as error:
            return f"Error during execution: {error}"
        if isinstance(result, str):
            return result
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                return str(result)
        return str(result)

    def keywords(self, name: str, positional: Sequence[Any]) -> Mapping[str, Any]:
        """Name the arguments that were given by position."""
        return dict(zip(inspect.signature(self._methods[name]).parameters, positional, strict=False))

    def same_state(self, other: Apis) -> bool:
        """True if all public attributes of all objects are equal to those of `other`."""
        for name, mine in self._objects.items():
            theirs = other._objects[name]
            if any(getattr(mine, a, None) != value for a, value in vars(theirs).items() if not a.startswith("_")):
                return False
        return True

    def digest(self) -> str:
        """Hash of everything that these objects remember, their random state with it."""
        found = hashlib.blake2b(digest_size=8)
        for name in sorted(self._objects):
            found.update(repr((name, _plain(self._objects[name]))).encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    def _result(self, call: BfclCall) -> Any:
        last = call.name.rpartition(".")[2]
        if last in _REFUSED:
            raise ValueError(f"Function call {last} is not allowed.")
        if call.name not in self._methods:
            raise NameError(f"name '{call.name.partition('.')[0]}' is not defined")
        arguments = {name: self._given(value) for name, value in call.arguments.items()}
        bound = arguments.get(_BOUNDS.get(call.name, ""), 0)
        if isinstance(bound, int | float) and abs(bound) > _MOST:
            raise ValueError(f"{_BOUNDS[call.name]} may be {_MOST} at most")
        precision = import_from("mpmath", DISTRIBUTION, EXTRA).workdps(15)
        with decimal.localcontext(), precision:
            return self._methods[call.name](**arguments)

    def _given(self, value: Any) -> Any:
        return self._result(value) if isinstance(value, BfclCall) else value


def missing(told: Sequence[str], wanted: Sequence[str]) -> bool:
    """True if an answer of `wanted` is not among `told`, counted with multiplicity."""
    return bool(Counter(wanted) - Counter(told))


def _plain(value: Any) -> Any:
    """Nested tuples of what an object holds, in an order of their own."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return tuple(sorted((repr(key), _plain(one)) for key, one in value.items())) if value else ()
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_plain(one)) for one in value))
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, random.Random):
        return hashlib.blake2b(repr(value.getstate()).encode(), digest_size=8).hexdigest()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    if callable(value) or not hasattr(value, "__dict__"):
        return type(value).__name__
    held = sorted((name, _plain(one)) for name, one in vars(value).items() if name not in _NOT_STATE)
    return (type(value).__name__, tuple(held))
