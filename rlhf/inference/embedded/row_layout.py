"""Layout of rows end to end: which tokens are computed, and where; base of attention plans.

`T` is the places of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

#: Squared tokens of padding that cost as much as one more kernel call; measured on one CPU core, 6 heads of 32.
_CALL_COST = 8192


class PackedRows:
    """Places and tokens of rows that may share beginnings.

    Args:
        lengths: `[R]` tokens of each row, in order, each at least 1.
        device: where the model runs.
        source: `[T]`, for each place of the rows the one whose token stands there too, as `shared_prefixes` finds them;
            None: nothing is shared.

    Attributes:
        n_tokens: T, places of all rows; `n_computed` of them have tokens of their own.
        kept: int64 `[n_computed]`, those places.
        token_of: int64 `[T]`, which of the computed tokens stands at each place.
        position_ids: int64 `[n_computed]`.

    Raises:
        ValueError: there are no rows, or one has no token.
    """

    by_layer = False

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu", source: Ints | None = None) -> None:
        self.lengths: Ints = np.asarray(lengths, np.int64)
        if not len(self.lengths) or self.lengths.min() < 1:
            raise ValueError(f"row lengths must be at least 1, got {list(lengths)[:8]}")
        self.is_used = False
        self._starts: Ints = np.cumsum(self.lengths) - self.lengths
        self.n_tokens = int(self.lengths.sum())
        self._places = np.arange(self.n_tokens)
        #: `[T]`, whether the token of a place is computed for it, and which of the computed ones it is.
        self._own = np.ones(self.n_tokens, np.bool_) if source is None else source == self._places
        self._tokens = self._places if source is None else (np.cumsum(self._own) - 1)[source]
        kept = self._places[self._own]
        self.n_computed = len(kept)
        self.kept, self.token_of = on_device(kept, device), on_device(self._tokens, device)
        self.position_ids = on_device((self._places - np.repeat(self._starts, self.lengths))[self._own], device)

    def computed_at(self, places: Ints) -> Ints:
        """Indices of the computed tokens at these places of the rows."""
        found: Ints = self._tokens[places]
        return found


def runs(places: Ints, tokens: Ints) -> list[tuple[int, int, int]]:
    """Runs of places and tokens that both increase by one: (first place, first token, length)."""
    cuts = np.flatnonzero((np.diff(places) != 1) | (np.diff(tokens) != 1)) + 1
    found = zip(np.split(places, cuts), np.split(tokens, cuts), strict=True)
    return [(int(p[0]), int(t[0]), len(p)) for p, t in found if len(p)]


def similar(order: Ints, lengths: Ints) -> list[Ints]:
    """Split rows, longest first, wherever padding one more row would cost more than another kernel call."""
    squares = lengths[order] ** 2
    groups, begin = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or squares[begin] - squares[i] > _CALL_COST:
            groups.append(order[begin:i])
            begin = i
    return groups


def on_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """Tensor of `array` on `device`, by pinned memory for a GPU so that the copy is asynchronous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
