"""Checks of values and exceptions from untrusted code: environments, rewards, agents, programs of a policy.

None of those that look at a value runs a line of the code that it came from: no `__bool__`, `__float__`, `__repr__`,
`__len__` or `__class__` of its own is asked, so it can neither raise, nor hang, nor answer otherwise the next time.
What is accepted is given back as Python's own type.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.errors import RlhfError, raised_at

#: Bytes of UTF-8 that one text, or all texts of one list, may have.
MAX_TEXT_BYTES = 4 * 2**20
#: Characters of an exception's message, and of a verdict's reason, that are kept.
MAX_MESSAGE = 4000

_NAME_OF = type.__dict__["__name__"].__get__


def number(value: object) -> float | None:
    """Return a finite real number as a float: of `int`, `float`, `bool` and NumPy's scalars. None for anything else."""
    kind = type(value)
    if kind is float:
        found = value
    elif issubclass(kind, float):
        found = float.__float__(value)  # type: ignore[arg-type]
    elif issubclass(kind, int):
        try:
            found = int.__float__(value)  # type: ignore[arg-type]
        except OverflowError:
            return None
    else:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or not issubclass(kind, numpy.floating | numpy.integer | numpy.bool_):
            return None
        found = float(numpy.generic.item(value))
    return found if math.isfinite(found) else None  # type: ignore[arg-type,return-value]


def truth(value: object) -> bool | None:
    """Return a `bool`, or NumPy's, as Python's own; None for anything else, which is no truth value here."""
    if value is True or value is False:
        return value
    numpy: Any = sys.modules.get("numpy")
    return bool(numpy.generic.item(value)) if numpy is not None and type(value) is numpy.bool_ else None


def text(value: object) -> str | None:
    """Return a text as a plain `str`; None for anything else."""
    if type(value) is str:
        return value
    return str.__str__(value) if issubclass(type(value), str) else None


def texts(value: object, max_bytes: int = MAX_TEXT_BYTES) -> tuple[str, ...] | None:
    """Return a tuple or list of texts as a tuple; None for anything else, or more bytes than that in all.

    An empty text counts as one byte, so that their number is bounded too.
    """
    kind = type(value)
    if not issubclass(kind, tuple | list):
        return None
    own: Any = tuple if issubclass(kind, tuple) else list
    if own.__len__(value) > max_bytes:
        return None
    is_plain = kind is tuple and all(type(one) is str for one in value)  # type: ignore[attr-defined]
    if is_plain and 4 * sum(map(len, value)) + own.__len__(value) <= max_bytes:  # type: ignore[call-overload]
        return value  # type: ignore[return-value]
    found, left = [], max_bytes
    for one in own.__iter__(value):
        plain = text(one)
        if plain is None:
            return None
        left -= n_bytes(plain) + 1
        if left < 0:
            return None
        found.append(plain)
    return tuple(found)


def n_bytes(plain: str) -> int:
    """Bytes of a text in UTF-8; of one with more characters than any text may have bytes, their number."""
    if plain.isascii() or len(plain) > MAX_TEXT_BYTES:
        return len(plain)
    return len(plain.encode("utf-8", "surrogatepass"))


def is_large(plain: str) -> bool:
    """True if a text has more bytes than it may."""
    return 4 * len(plain) > MAX_TEXT_BYTES and n_bytes(plain) > MAX_TEXT_BYTES


def type_of(value: object) -> str:
    """Name of the type of any value."""
    return str(_NAME_OF(type(value)))


def shown(value: object, most: int = 80) -> str:
    """Return the type of any value, with the value itself if it is short and plain."""
    kind, name = type(value), type_of(value)
    if value is None or kind is bool:
        return repr(value)
    if kind is float or (kind is int and int.bit_length(value) <= 256):  # type: ignore[arg-type]
        return f"{name} {value!r}"
    if kind is int:
        return f"an int of {int.bit_length(value)} bits"  # type: ignore[arg-type]
    plain = text(value)
    if plain is not None:
        return f"{name} {plain!r}" if len(plain) <= most else f"{name} of {len(plain)} characters, {plain[:most]!r}..."
    if issubclass(kind, tuple | list):
        own: Any = tuple if issubclass(kind, tuple) else list
        return f"{name} of {own.__len__(value)}"
    return name


def cut(plain: str, most: int = MAX_MESSAGE) -> str:
    """Return a text, or its beginning with its whole length behind it."""
    return plain if len(plain) <= most else f"{plain[:most]}... ({len(plain)} characters)"


def slots(value: object, kind: type, names: Sequence[str]) -> list[object] | None:
    """Return the fields of an object of a class with slots, as they lie there; None unless it is one and has them all.

    A property by which a derived class puts something else in their place is not asked.
    """
    if not issubclass(type(value), kind):
        return None
    try:
        return [kind.__dict__[name].__get__(value) for name in names]
    except AttributeError:  # made without its constructor
        return None


#: What asyncio says of `asyncio.run`, and of `run_until_complete` of the same and of another loop, within a loop.
_LOOP_IN_LOOP = (
    "cannot be called from a running event loop",
    "event loop is already running",
    "while another loop is running",
)


def message_of(error: BaseException) -> str:
    """Return what an exception says, cut to a length that can be read."""
    try:
        return cut(text(str(error)) or "")
    except BaseException as other:
        if is_from_outside(other):
            raise
        return f"its message raises {type_of(other)}"


def described(error: BaseException) -> str:
    """Return kind, message and place of an exception; one of this project's says itself where it happened.

    Of a function that runs an event loop of its own within ours, with what to do instead.
    """
    said = message_of(error)
    if type(error) is RuntimeError and any(words in said for words in _LOOP_IN_LOOP):
        said += "; make the function an `async def`, and `await` in it"
    if issubclass(type(error), RlhfError):
        return said
    return (f"{type_of(error)}: {said}" if said else type_of(error)) + raised_at(error)


def is_listing(value: object) -> bool:
    """True if a value can be gone through, also by its `__getitem__` alone, as a map-style data set."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def defined_at(function: object) -> str:
    """Place of a function or method, ` (maze.py:12)`; empty for anything else."""
    plain = inspect.unwrap(function.__func__ if inspect.ismethod(function) else function)  # type: ignore[arg-type]
    if not inspect.isfunction(plain):
        return ""
    return f" ({Path(plain.__code__.co_filename).name}:{plain.__code__.co_firstlineno})"


def is_from_outside(error: BaseException) -> bool:
    """True if an exception ends the present task from outside, not by the code that raised it.

    It is so where the task has been cancelled, where its loop is gone, and of an interrupt where a signal's handler
    raised it here. `raise CancelledError`, `raise KeyboardInterrupt` and `sys.exit()` in a called function are not.
    """
    kind = type(error)
    if issubclass(kind, Exception | SystemExit):
        return False
    if issubclass(kind, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread() and _is_of_signal(error)
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if issubclass(kind, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return issubclass(kind, GeneratorExit) and task is None


def _is_of_signal(error: BaseException) -> bool:
    """True if a handler of SIGINT or SIGTERM raised this; Python's own is taken to have."""
    handlers: list[Any] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if signal.default_int_handler in handlers:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    called = [handler.func if isinstance(handler, partial) else handler for handler in handlers]
    codes = [one.__code__ for one in called if inspect.isfunction(one) or inspect.ismethod(one)]
    return trace is not None and trace.tb_frame.f_code in codes


def name_of(part: object) -> str:
    """Return the name of a function or class as it was defined; of any other object that of its class."""
    try:
        return str(part.__qualname__)  # type: ignore[attr-defined]
    except AttributeError:
        return type(part).__name__
