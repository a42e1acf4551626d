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


def on_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """Tensor of `array` on `device`, by pinned memory for a GPU so that the copy is asynchronous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
