"""Keys and values of all sessions, and the attention of new tokens over them.

A session owns a slot: one row of a preallocated buffer per layer. New keys and values are written into their slot, and
queries attend to the slot's prefix through views, so nothing is copied from step to step.

On a CPU in float32 the result of a token does not depend, to the last bit, on what else is in the batch: kernels run
over shapes whose rounding is the same for any number of neighbours (see `_attend_exactly`). It does depend, in the last
bit, on whether a token was sampled or read: a session computed anew after an eviction differs by rounding.

`S`, `T`, `H`, `G`, `D` are slots, new tokens, query heads, key-value heads and head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.inference.embedded.attention_variant import PLAIN, Variant
from rlhf.inference.embedded.attention_variant import weights as weights_of

Ints = npt.NDArray[np.int64]

#: Keys are read in multiples of this; BLAS rounds the tail of a shorter row differently.
_KEY_STEP = 16
#: Fewer keys are read as this many; torch multiplies very small matrices without BLAS.
_MIN_KEYS = 64
#: Values are summed in blocks of this many keys; BLAS chooses blocks by the row's length, which other rows change.
_VALUE_BLOCK = 128
#: Queries of a prompt are padded to a multiple of this; BLAS has kernels of their own for fewer than 4 rows.
_QUERY_STEP = 4
#: Longer stretches of a prompt are cut into pieces of this many queries, each seeing only the keys up to its end.
_MAX_QUERIES = 128
#: Query-key pairs that cost as much as one more kernel call; measured on one CPU core, 6 heads of 32.
_CALL_COST = 1024
#: Most query-key pairs of one kernel call; bounds the memory for scores to this times H floats.
_MAX_PAIRS = 1 << 20
#: Slots added at a time: few, as each has room for a whole context.
_SLOT_STEP = 16
#: Tokens that a slot has room for at first.
_FIRST_LENGTH = 128


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class KVCache:
    """Key and value buffers of every layer, `[S, G, length, D]`, allocated on first write and grown.

    Slots come in small steps, lengths double. Once cleared they begin with the size that they had: new weights
    come with every step, and growing copies all.

    Args:
        max_slots: most sessions.
        max_length: most tokens of a session.
    """

    def __init__(self, max_slots: int, max_length: int) -> None:
        self._max_slots, self._max_length = max_slots, _round_up(max(max_length, _MIN_KEYS), _KEY_STEP)
        self._n_slots = self._length = 0
        self._before = 0, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def n_bytes(self) -> int:
        """Memory held."""
        return sum(x.nbytes for layer in self._layers.values() for x in layer)

    def clear(self) -> None:
        """Free everything."""
        self._before = max(self._before[0], self._n_slots), max(self._before[1], self._length)
        self._layers.clear()
        self._n_slots = self._length = 0

    def reserve(self, n_slots: int, length: int) -> None:
        """Make room for slots below `n_slots`, each of up to `length` tokens; what is cached stays."""
        if n_slots <= self._n_slots and length <= self._length:
            return
        if not self._layers:
            n_slots, length = max(n_slots, self._before[0]), max(length, self._before[1])
        if n_slots > self._n_slots:
            self._n_slots = min(max(n_slots, self._n_slots + _SLOT_STEP), self._max_slots)
        if length > self._length:
            wanted = max(length, 2 * self._length, _FIRST_LENGTH)
            self._length = min(_round_up(wanted, _KEY_STEP), self._max_length)
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._n_slots, old.shape[1], self._length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Give slot `target` the first `n_tokens` of slot `source`."""
        for layer in self._layers.values():
            for x in layer:
                x[target, :, :n_tokens] = x[source, :, :n_tokens]

    def buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, `[S, G, length, D]`; new ones match the heads and dtype of the arguments."""
        if layer not in self._layers:
            # Zeros, not empty memory: masked places are multiplied by 0, which a stray NaN would survive.
            k, v = (x.new_zeros(self._n_slots, x.shape[1], self._length, x.shape[2]) for x in (key, value))
            self._layers[layer] = (k, v)
        return self._layers[layer]


@dataclass(slots=True)
class _Span:
    """Neighbouring slots whose queries share one kernel call.

    Attributes:
        first, last: slots `[first, last)`.
        n_keys: keys each row reads, masked ones included.
        width: queries of each row, padded ones included.
        gather: int64 `[rows * width]`, token behind each query; any token at padding.
        seen: int64 `[rows, width]`, the last key that each query sees.
        mask: float32 `[rows, width, n_keys]`: 0 or -inf.
        shaped: by window, the mask as the kernel wants it, made at the first layer that needs it.
    """

    first: int
    last: int
    n_keys: int
    width: int
    gather: Tensor
    seen: Ints
    mask: Tensor
    shaped: dict[int | None, Tensor] = field(default_factory=dict)


class SlotPlan:
    """Attention of new tokens over the cached prefix of their sessions; an `AttentionPlan`.

    Args:
        cache: with room reserved for every segment.
        slots: `[P]` increasing, one segment of new tokens each; tokens lie in this order.
        starts: `[P]` tokens already cached, which is the position of the segment's first token.
        counts: `[P]` new tokens, at least 1.
        n_tokens: T, at least the sum of `counts`; what is over is padding that nothing reads.
        device: where the model runs.

    Attributes:
        position_ids: `[sum(counts)]`, position of each new token in its session.
    """

    by_layer = True

    def __init__(
        self, cache: KVCache, slots: Ints, starts: Ints, counts: Ints, n_tokens: int, device: torch.device
    ) -> None:
        self._cache, self._device = cache, device
        self._n_new = int(counts.sum())
        self.is_used = False
        firsts = np.cumsum(counts) - counts
        self._slots = np.repeat(slots, counts)
        self.position_ids = np.arange(self._n_new) - np.repeat(firsts - starts, counts)
        self._write: Tensor | None = None
        inverse = np.zeros(n_tokens, np.int64)
        self._spans: list[_Span] = []
        n_places = 0
        for pieces in _spans(_pieces(slots, starts, counts, firsts)):
            span, tokens, places = _make_span(pieces, device)
            inverse[tokens] = n_places + places
            n_places += len(span.gather)
            self._spans.append(span)
        self._inverse = torch.from_numpy(inverse).to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, how: Variant = PLAIN
    ) -> Tensor:
        """Write `key` and `value` into their slots, then attend; see `AttentionPlan.attend`."""
        self.is_used = True
        keys, values = self._cache.buffers(layer, key, value)
        index = self._write_index(keys)
        for buffer, new in ((keys, key), (values, value)):
            buffer.view(-1, buffer.shape[3]).index_copy_(0, index, new[: self._n_new].reshape(-1, new.shape[2]))
        outs = [_attend(span, query.index_select(0, span.gather), keys, values, scale, how) for span in self._spans]
        return (torch.cat(outs) if len(outs) > 1 else outs[0]).index_select(0, self._inverse)

    def _write_index(self, keys: Tensor) -> Tensor:
        """Row of `[S * G * length]` for each new token and head, `[sum(counts) * G]`."""
        if self._write is None:
            _, n_heads, length, _ = keys.shape
            rows = (self._slots[:, None] * n_heads + np.arange(n_heads)) * length + self.position_ids[:, None]
            self._write = torch.from_numpy(rows.reshape(-1)).to(self._device)
        return self._write


def _pieces(slots: Ints, starts: Ints, counts: Ints, firsts: Ints) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, first token) of stretches of at most `_MAX_QUERIES`: single tokens first, then by slot.

    A slot's later pieces come after the first ones of all slots, because one kernel call reads a slot once.
    """
    rows = zip(slots.tolist(), starts.tolist(), counts.tolist(), firsts.tolist(), strict=True)
    if counts.max() <= _MAX_QUERIES:
        pieces = list(rows)
        return pieces if counts.max() == 1 else sorted(pieces, key=lambda p: (p[2] > 1, p[0]))
    cut = [
        (done, (slot, start + done, end - done, first + done))
        for slot, start, count, first in rows
        for done, end in itertools.pairwise(_ends(count))
    ]
    return [piece for _, piece in sorted(cut, key=lambda c: (c[1][2] > 1, c[0], c[1][0]))]


def _ends(count: int) -> list[int]:
    """Boundaries of the stretches of `count` tokens; none but a token that comes alone is of one token.

    >>> _ends(257), _ends(1)
    ([0, 128, 255, 257], [0, 1])
    """
    ends = [*range(0, count, _MAX_QUERIES), count]
    if len(ends) > 2 and ends[-1] - ends[-2] == 1:
        ends[-2] -= 1
    return ends


def _spans(pieces: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Group pieces greedily: one joins its predecessors if the padding that brings costs less than another call.

    Single tokens and stretches never mix, so that the kernel of a token does not depend on its neighbours.
    """
    spans: list[list[tuple[int, int, int, int]]] = []
    first = last = width = n_keys = cost = 0
    for piece in pieces:
        slot, start, count, _ = piece
        end = start + count
        if spans and slot > last and (count > 1) == (width > 1):
            wide, long = max(width, count), max(n_keys, end)
            joined = (slot + 1 - first) * wide * long
            if joined <= min(cost + count * end + _CALL_COST, _MAX_PAIRS):
                spans[-1].append(piece)
                last, width, n_keys, cost = slot, wide, long, joined
                continue
        spans.append([piece])
        first, last, width, n_keys, cost = slot, slot, count, end, count * end
    return spans


def _make_span(pieces: list[tuple[int, int, int, int]], device: torch.device) -> tuple[_Span, Ints, Ints]:
    """Span of some pieces, the tokens in it `[n]`, and the places of their results in it `[n]`."""
    slots, starts, counts, firsts = np.array(pieces, np.int64).T
    first, last = int(slots[0]), int(slots[-1]) + 1
    width = 1 if counts.max() == 1 else _round_up(int(counts.max()), _QUERY_STEP)
    n_keys = _round_up(max(int((starts + counts).max()), _MIN_KEYS), _KEY_STEP)
    rows, offsets = slots - first, np.arange(width)
    real = offsets < counts[:, None]
    gather = np.zeros((last - first, width), np.int64)
    gather[rows] = np.where(real, firsts[:, None] + offsets, 0)
    # Rows without queries and padded queries see at least key 0, so no softmax is empty.
    seen = np.zeros((last - first, width), np.int64)
    seen[rows] = starts[:, None] + offsets
    mask = np.where(np.arange(n_keys) > seen[:, :, None], np.float32(-np.inf), np.float32(0))
    at = torch.from_numpy(gather.reshape(-1)).to(device)
    span = _Span(first, last, n_keys, width, at, seen, torch.from_numpy(mask).to(device))
    places = rows[:, None] * width + offsets
    return span, gather[rows][real], places[real]


def _windowed(span: _Span, window: int | None) -> Tensor:
    """Mask of a span `[rows, width, n_keys]` in windowed layers; a padding query sees key 0."""
    if window is None or window >= span.n_keys:
        return span.mask
    outside = np.arange(span.n_keys) <= span.seen[:, :, None] - window
    outside[..., 0] &= span.seen - window < span.n_keys - 1
    return span.mask.masked_fill(torch.from_numpy(outside).to(span.mask.device), -torch.inf)


def _attend(span: _Span, query: Tensor, keys: Tensor, values: Tensor, scale: float, how: Variant) -> Tensor:
    """Attention of a span: query `[rows * width, H, D]`, buffers `[S, G, length, D]`, result like the query."""
    n_rows, n_heads, n_groups = span.last - span.first, query.shape[1], keys.shape[1]
    shared = n_heads // n_groups  # query heads that read one key-value head
    n_queries = span.width * shared
    q = query.view(n_rows, span.width, n_groups, shared, -1).transpose(1, 2).reshape(n_rows, n_groups, n_queries, -1)
    k, v = (x[span.first : span.last, :, : span.n_keys] for x in (keys, values))
    exact = query.device.type == "cpu" and query.dtype == torch.float32
    exact = exact or not how.is_fused
    if (shaped := span.shaped.get(how.window)) is None:
        mask = _windowed(span, how.window)
        mask = mask[:, None, :, None].expand(n_rows, n_groups if exact else 1, span.width, shared, span.n_keys)
        if span.width == 1:  # every query of the row has the same mask
            mask = mask[:, :, :, :1]
        shaped = span.shaped[how.window] = mask.reshape(n_rows, mask.shape[1], -1, span.n_keys).to(query.dtype)
    if exact:
        sinks = None
        if how.sinks is not None:  # `[H]` as `[rows * G, M, 1]`
            sinks = how.sinks.view(1, n_groups, 1, shared).expand(n_rows, -1, span.width, -1).reshape(-1, n_queries, 1)
        out = _attend_exactly(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), shaped.flatten(0, 1), scale, how, sinks
        )
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=shaped, scale=scale)
    return out.reshape(n_rows, n_groups, span.width, shared, -1).transpose(1, 2).reshape(len(query), n_heads, -1)


def _attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, how: Variant = PLAIN, sinks: Tensor | None = None
) -> Tensor:
    """Batch-invariant attention: a query's rounding depends on its own keys only; as fast as the fused CPU kernel.

    q `[B, M, D]`, k and v `[B, L, D]`, mask `[B, M or 1, L]`. A matrix product sums over the keys in blocks that BLAS
    chooses by L, which is the longest row's; blocks of a fixed size make the sum the same whatever L is, for what is
    beyond a row's end adds exact zeros. Fewer than 4 queries run in another kernel, which sums in order by itself.
    A lone matrix is computed twice, because one alone is split between threads and several are not.
    """
    if len(q) == 1:
        q, k, v, mask = (x.expand(2, -1, -1) for x in (q, k, v, mask))
        sinks = None if sinks is None else sinks.expand(2, -1, -1)
        return _attend_exactly(q, k, v, mask, scale, how, sinks)[:1]
    if how.is_fused:
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(-1)
    else:
        weights = weights_of(torch.bmm(q, k.transpose(1, 2)) * scale, mask, how, sinks)
    if q.shape[1] < _QUERY_STEP or k.shape[1] <= _VALUE_BLOCK:
        return torch.bmm(weights, v)
    out = torch.bmm(weights[..., :_VALUE_BLOCK], v[:, :_VALUE_BLOCK])
    for begin in range(_VALUE_BLOCK, k.shape[1], _VALUE_BLOCK):
        block = slice(begin, begin + _VALUE_BLOCK)
        out.baddbmm_(weights[..., block], v[:, block])
    return out
