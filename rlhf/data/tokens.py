"""Compact arrays of token ids and log-probs, on the standard library: NumPy sees them without a copy."""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rlhf.data.untrusted import shown
from rlhf.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: An array of this process, or a view of one that another process made.
Packed: TypeAlias = "array[Any] | memoryview"
#: Four bytes hold the ids of any model; ids that no model has, such as those of texts, may need eight.
_WHOLE, _FRACTIONS = "iqQ", "fd"
#: First protocol of pickle that leaves large arrays out.
OUT_OF_BAND = 5
#: Largest log-prob that counts as rounding above 0.
_MOST = 1e-4


class TokenBuffer:
    """A growing array of token ids; the prompts and generations of a conversation are parts of it.

    It is only ever appended to, so a part never changes.
    """

    __slots__ = ("ids",)

    def __init__(self, ids: Packed) -> None:
        self.ids = ids

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (_buffer_in, stored(self.ids)) if protocol >= OUT_OF_BAND else (TokenBuffer, (owned(self.ids),))

    def __len__(self) -> int:
        return len(self.ids)

    def begins_like(self, ids: Packed) -> bool:
        """True if this begins with `ids`, or `ids` begin with all of this."""
        n = min(len(self.ids), len(ids))
        return code_of(self.ids) == code_of(ids) and self.ids[:n] == ids[:n]

    def append(self, ids: Packed) -> None:
        """Put ids of the same type behind the others."""
        self.ids = owned(self.ids)
        try:
            self.ids.extend(ids)
        except BufferError:  # a NumPy array looks at it, and keeps what it has
            self.ids = self.ids + owned(ids)


def code_of(values: Packed) -> str:
    """Type code of an array's elements."""
    return values.typecode if isinstance(values, array) else values.format


def owned(values: Packed) -> array[Any]:
    """Return `values` as an array of this process, copied if another made it."""
    return values if isinstance(values, array) else array(values.format, values.tobytes())


def stored(values: Packed) -> tuple[str, pickle.PickleBuffer]:
    """Return what `loaded` makes `values` of, which protocol 5 pickles without a copy."""
    return code_of(values), pickle.PickleBuffer(values)


def loaded(code: str, data: Any) -> Packed:
    """Return the array that was `stored`; of a buffer out of band, a view of it."""
    if not isinstance(data, memoryview):
        return array(code, bytes(data))
    kind: Any = code
    return data.cast("B").cast(kind)


def _buffer_in(code: str, data: Any) -> TokenBuffer:
    return TokenBuffer(loaded(code, data))


def packed_ids(ids: Iterable[int]) -> array[int]:
    """Return a copy of token ids as an array.

    Raises:
        DataError: one of them is no whole number.
    """
    if isinstance(ids, array):
        return ids[:]
    if isinstance(ids, memoryview):
        return owned(ids)
    for code in _WHOLE:
        try:
            return array(code, ids)
        except OverflowError:
            continue
        except TypeError:
            break
    raise DataError("token ids are whole numbers of at most 64 bits", where="token_ids", got=shown(ids))


def packed_logprobs(values: Sequence[float]) -> array[float]:
    """Return a copy of log-probs as an array, in float32 where that is exact.

    Raises:
        DataError: one of them is not a finite number at most 0, give or take rounding.
    """
    if not isinstance(values, tuple | list | array):
        values = tuple(values)
    is_right = not values or (max(values) <= _MOST and math.isfinite(sum(values)))
    if not is_right and (odd := [x for x in values if not (math.isfinite(x) and x <= _MOST)]):
        raise DataError("a log-prob is not a finite number at most 0", where="Generation.logprobs", got=str(odd[:3]))
    small, large = (array(code, values) for code in _FRACTIONS)
    return small if small == large else large


def view(values: Packed, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
    """Return a part of an array as a NumPy array that cannot be written to."""
    import numpy as np

    kind: np.dtype[Any] = np.dtype(code_of(values))
    found: npt.NDArray[Any] = np.frombuffer(values, kind) if values else np.empty(0, kind)
    found.flags.writeable = False
    return found[start:stop]
