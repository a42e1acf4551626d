"""Wire protocol of the worker pool: frames on a socket, and environments whose classes are in files.

A frame is a header (mark, length, number of the call) and a pickled value. The mark tells an answer from bytes that
somebody else wrote.
"""

from __future__ import annotations

import importlib.util
import pickle
import struct
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from environments.base import StepResult
from rlhf.errors import EnvError

HEADER = struct.Struct("<4sIQ")
_MARK = b"rlhf"

#: Kinds of answers: a step's result as a plain tuple, which pickles in a third of the time; any other value; an error
#: of ours; the text of anybody else's.
RESULT, VALUE, ERROR, TEXT = range(4)

#: Bytes of one frame. What a step answers is bounded long before; this is for lists of tasks.
MAX_FRAME_BYTES = 2**30

#: Number of the frame that says that a worker has loaded its environment.
READY = 0


class NotAFrame(Exception):
    """Bytes that are no frame, or a value that cannot be read."""


class Raised(EnvError):
    """The environment raised in its worker; the message is the same as without workers."""


def frame(number: int, value: object) -> bytes:
    """Return `value` as the frame of call `number`. Raises what pickling raises, and EnvError for too long a frame."""
    payload = pickle.dumps(value, protocol=5)
    if len(payload) > MAX_FRAME_BYTES:
        raise EnvError(
            "an answer is too long to be sent between processes",
            got=f"{len(payload)} bytes",
            expected=f"at most {MAX_FRAME_BYTES}",
        )
    return HEADER.pack(_MARK, len(payload), number) + payload


class Frames:
    """Takes frames out of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __bool__(self) -> bool:
        """True if there is the beginning of a frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add `data`, and give number and payload of every frame that is complete. Raises NotAFrame."""
        self._buffer += data
        begin = 0
        try:
            while len(self._buffer) - begin >= HEADER.size:
                mark, length, number = HEADER.unpack_from(self._buffer, begin)
                if mark != _MARK:
                    raise NotAFrame(repr(bytes(self._buffer[begin : begin + 60])))
                if length > MAX_FRAME_BYTES:
                    raise NotAFrame(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are read")
                end = begin + HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[begin + HEADER.size : end])
                begin = end
                yield number, payload
        finally:
            del self._buffer[:begin]


def answer_of(value: object) -> tuple[int, object]:
    """Return kind and plain form of what a call returned."""
    if type(value) is StepResult:
        return RESULT, _plain(value)
    return VALUE, value


def decoded(payload: bytes) -> Any:
    """Return the value of an answer. Raises what the environment raised, and NotAFrame where it cannot be read."""
    try:
        kind, value = pickle.loads(payload)
    except Exception as error:  # a class that is not here, or one that does not unpickle
        raise NotAFrame(f"{type(error).__name__}: {error}") from error
    if kind == ERROR:
        raise value
    if kind == TEXT:
        raise Raised(value)
    return StepResult(*value) if kind == RESULT else value


_plain = attrgetter(*(field.name for field in fields(StepResult)))


def packed(environment: object, *more: object) -> bytes:
    """Return `environment` and `more` pickled for another process, with the files that its classes come from."""
    sources = {
        name: file
        for name in sorted(_modules_of(environment))
        if (file := getattr(sys.modules.get(name), "__file__", None))
    }
    return pickle.dumps((sources, pickle.dumps((environment, *more))))


def unpacked(data: bytes) -> tuple[Any, ...]:
    """Return what was packed. Classes of a script, or of a file that a recipe names, are loaded from their files."""
    sources, stored = pickle.loads(data)
    for name, file in sources.items():
        if name in sys.modules and name != "__main__":
            continue
        if name == "__main__" or importlib.util.find_spec(name.partition(".")[0]) is None:
            # Not on the path, so it is loaded under the same name, a script without its `if __name__ == "__main__"`.
            spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, Path(file))
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    found: tuple[Any, ...] = pickle.loads(stored)
    return found


def _modules_of(value: object) -> set[str]:
    """Names of the modules of all settings objects in `value`."""
    if isinstance(value, list | tuple | set | frozenset):
        return {name for item in value for name in _modules_of(item)}
    if isinstance(value, dict):
        return {name for item in value.values() for name in _modules_of(item)}
    own = {type(value).__module__} - {"builtins"}
    if is_dataclass(value):
        own |= {name for field in fields(value) for name in _modules_of(getattr(value, field.name, None))}
    return own
