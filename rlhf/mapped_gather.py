"""Gathering of objects with large arrays through memory-mapped files, without copies.

Objects travel by `ProcessGroup.gather`; arrays that pickle out of band (protocol 5), such as token ids and log-probs,
are written to one file for each process, which the others map. So of the tokens of other processes one reads those
that it trains on, and holds no copy of the rest.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf.processes import current

T = TypeVar("T")

#: Smaller arrays, in bytes, travel with the objects.
_SMALLEST = 1024
#: Every array begins at a multiple of this many bytes, so that NumPy may read it in place.
_ALIGNED = 8


def gather_mapped(value: T, what: str) -> list[T]:
    """Return what every process gave, by rank, as `ProcessGroup.gather` does.

    Where a process cannot read the file of another, as on another machine, all take the arrays with the objects.

    Args:
        value: anything that can be pickled; it must not be changed afterwards.
        what: is gathered, for messages.
    """
    here = current()
    if here.n == 1:
        return [value]
    arrays: list[pickle.PickleBuffer] = []

    def travels(array: pickle.PickleBuffer) -> bool:
        if array.raw().nbytes >= _SMALLEST:
            arrays.append(array)
            return False
        return True

    pickled = pickle.dumps(value, protocol=5, buffer_callback=travels)
    sizes = [array.raw().nbytes for array in arrays]
    with _written(arrays) as path:
        sent = here.gather((pickled, sizes, path), what)
        mapped = [None if rank == here.rank else _mapped(n, file) for rank, (_, n, file) in enumerate(sent)]
        is_read = all(here.gather(all(m is not None for r, m in enumerate(mapped) if r != here.rank), what))
    if not is_read:
        return here.gather(value, what)
    return [
        value if found is None else pickle.loads(data, buffers=found)
        for found, (data, *_) in zip(mapped, sent, strict=True)
    ]


@contextlib.contextmanager
def _written(arrays: Sequence[pickle.PickleBuffer]) -> Iterator[str]:
    """Give the path of a temporary file with `arrays` in it; empty where it cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="rlhf-arrays-"))
            for array in arrays:
                file.write(array.raw())
                file.write(bytes(-array.raw().nbytes % _ALIGNED))
            file.flush()
            path = file.name
        except OSError:
            path = ""
        yield path


def _mapped(sizes: Sequence[int], path: str) -> list[Any] | None:
    """Return read-only views of the arrays in a file; None where it cannot be read."""
    if not path:
        return None
    total = sum(size + -size % _ALIGNED for size in sizes)
    try:
        with Path(path).open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ) if total else b"")
    except (OSError, ValueError):
        return None
    views, start = [], 0
    for size in sizes:
        views.append(whole[start : start + size])
        start += size + -size % _ALIGNED
    return views
