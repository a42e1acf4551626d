"""Scheduler of continuous batching: each session's tokens, the cached part, and what to compute next.

Host-side bookkeeping of the embedded engine as arrays over slots, so that a step costs the same few array operations
for one session and for a hundred. Torch is not needed here. `S` are slots, `P` the segments of one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlhf.data import Generation, Prompt, SamplingParams
from rlhf.inference.embedded.sampling import SamplingRows, request_key, uniforms

Ints = npt.NDArray[np.int64]

#: A prefix computed for another session is copied if that spares at least this many tokens.
_MIN_SHARED = 16
#: Steps for which an idle session's slot is held for its next turn while others run. Without this every slot would
#: change hands after every turn as soon as there are more sessions than slots, and no cache would ever be of use.
_HOLD_STEPS = 32


@dataclass(slots=True)
class EngineStats:
    """Counters of the engine since it was made.

    Attributes:
        n_generated_tokens: sampled.
        n_prefill_tokens: prompt tokens computed; tokens that a new load or an error made stale count again.
        n_cached_tokens: prompt tokens taken from a cache instead.
        n_forward: forward passes.
        n_evictions: idle sessions that lost their cache to another.
        forward_s: seconds inside the model.
    """

    n_generated_tokens: int = 0
    n_prefill_tokens: int = 0
    n_cached_tokens: int = 0
    n_forward: int = 0
    n_evictions: int = 0
    forward_s: float = 0.0


def own_session(session: str, adapter: str) -> str:
    """Session name under a role's adapter, whose cache no other adapter can use."""
    return f"{session} as {adapter}" if session and adapter else session


@dataclass(slots=True, eq=False)
class Request:
    """Request of a `generate` call.

    Attributes:
        ids: int64 `[P]`, the prompt's.
        future: gets the generation, or an error.
        number: counts requests in order of arrival.
        version: version of the weights that sampled its first token.
        adapter: number of the adapter that reads it; 0 where there is one or none.
        slot: -1 until admitted and after it ended.
        updates: (version, tokens sampled before it) for each delivery since the first token.
    """

    prompt: Prompt
    ids: Ints
    params: SamplingParams
    session: str
    future: asyncio.Future[Generation]
    number: int
    adapter: int = 0
    version: int | None = None
    slot: int = -1
    updates: list[tuple[int, int]] = field(default_factory=list)

    def version_spans(self, n_tokens: int) -> tuple[tuple[int, int], ...]:
        """(version, number of tokens) in order, of `n_tokens` sampled; empty if one version sampled all."""
        if self.version is None or not self.updates:
            return ()
        starts = [(self.version, 0), *self.updates]
        ends = [start for _, start in self.updates] + [n_tokens]
        spans = tuple((v, end - start) for (v, start), end in zip(starts, ends, strict=True) if end > start)
        return spans if len(spans) > 1 else ()


@dataclass(frozen=True, slots=True)
class Segments:
    """New tokens to compute in one step, one segment a session; all `[P]`.

    Attributes:
        slots: increasing.
        starts: tokens of the session that are cached before.
        counts: tokens to compute now.
        samples: whether the segment ends at the newest token, so that the next one is sampled.
    """

    slots: Ints
    starts: Ints
    counts: Ints
    samples: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Copy:
    """A prefix of `n_tokens` that slot `target` takes over from slot `source`."""

    source: int
    target: int
    n_tokens: int


def _without_single_tokens(counts: Ints, pending: Ints) -> Ints:
    """Counts of stretches that are cut off `pending` ones, none of which has or leaves a single token.

    A single token is rounded otherwise than one of a stretch, and where stretches are cut depends on who else is there.

    >>> _without_single_tokens(np.array([1, 5, 4, 1]), np.array([1, 5, 5, 7])).tolist()
    [1, 5, 3, 0]
    """
    is_cut = counts < pending
    found = counts - (is_cut & (pending - counts == 1))
    found = np.where(is_cut & (found == 1), 0, found)
    return found if found.any() else counts


class SlotTable:
    """Sessions in slots. A slot is free, idle (its session may come back) or busy (a request runs in it).

    A session keeps one slot; what it runs beside that has a slot for as long as it runs.

    Args:
        n_slots: most sessions.
        max_context: most tokens of a session.
        stats: counts reused tokens and evictions.

    Attributes:
        requests: `[S]` what runs in each slot.
        busy: bool `[S]`.
    """

    def __init__(self, n_slots: int, max_context: int, stats: EngineStats) -> None:
        self._n_slots, self._stats = n_slots, stats
        self.requests: list[Request | None] = [None] * n_slots
        self.busy = np.zeros(n_slots, np.bool_)
        self._names: list[str | None] = [None] * n_slots
        self._slot_of: dict[str, int] = {}
        self._ended = np.zeros(n_slots, np.int64)  # the step at which each slot became idle
        self._step = 0
        self._ids = np.zeros((n_slots, max_context), np.int64)
        self._logprobs = np.zeros((n_slots, max_context), np.float32)
        self._prompt = np.zeros(n_slots, np.int64)  # tokens of the newest prompt
        self._known = np.zeros(n_slots, np.int64)  # tokens of the session: prompt and sampled
        self._computed = np.zeros(n_slots, np.int64)  # of these, with keys and values in the cache
        self._limit = np.zeros(n_slots, np.int64)  # tokens at which the request ends
        self._number = np.zeros(n_slots, np.int64)
        self._key = np.zeros(n_slots, np.uint64)
        self._temperature = np.ones(n_slots)
        self._top_p = np.ones(n_slots)
        self._top_k = np.zeros(n_slots, np.int64)
        self._stops = np.full((n_slots, 1), -1, np.int64)
        self._wants_text = np.zeros(n_slots, np.bool_)
        self._adapter = np.zeros(n_slots, np.int64)

    def idle_slot(self, session: str) -> int | None:
        """Slot that a session keeps and runs nothing in; None if there is none, as for calls without a session."""
        slot = self._slot_of.get(session)
        return None if slot is None or self.busy[slot] else slot

    def admit(self, waiting: Sequence[Request]) -> Iterator[tuple[Request, Copy | None]]:
        """Assign slots to requests in order of arrival, current owners first; yields each admitted one.

        A request whose session runs another gets a slot for itself. It stays out while every slot is busy or held, or
        while a prefix that it shares is being computed for another. The copy a request needs is to be made before the
        next one is drawn.
        """
        for owners in (True, False):
            for request in waiting:
                slot = self.idle_slot(request.session)
                if (slot is not None) is not owners or request.slot >= 0:
                    continue
                reused = self._own_prefix(slot, request.ids) if slot is not None else 0
                source, shared = self._shared_prefix(request, reused)
                if source is not None and shared > self._computed[source]:
                    continue
                if slot is None:
                    slot = self._take_slot(source)
                    if slot is None:
                        return
                copy = None if source is None or source == slot else Copy(source, slot, shared)
                self._start(request, slot, reused if source is None else shared)
                yield request, copy

    def segments(self, max_tokens: int) -> Segments:
        """Choose what to compute: sampled tokens that are not cached, then prompts by arrival, up to `max_tokens`."""
        self._step += 1
        slots = np.flatnonzero(self.busy)
        pending = self._known[slots] - self._computed[slots]
        counts = pending
        if pending.sum() > max_tokens:
            order = np.lexsort((self._number[slots], pending > 1))
            ahead = np.cumsum(pending[order]) - pending[order]
            counts = np.empty_like(pending)
            counts[order] = np.clip(max_tokens - ahead, 0, pending[order])
            counts = _without_single_tokens(counts, pending)
            slots, pending, counts = (x[counts > 0] for x in (slots, pending, counts))
        return Segments(slots, self._computed[slots], counts, counts == pending)

    def token_ids(self, segments: Segments, places: Ints) -> Ints:
        """Ids of the segments' tokens, whose places in their sessions are `places`."""
        return self._ids[np.repeat(segments.slots, segments.counts), places]

    def adapters(self, segments: Segments) -> Ints:
        """Number of the adapter that reads each of the segments' tokens."""
        return np.repeat(self._adapter[segments.slots], segments.counts)

    def sampling_rows(self, slots: Ints) -> SamplingRows:
        """Sampling parameters of each slot's next token."""
        uniform = uniforms(self._key[slots], self._known[slots] - self._prompt[slots])
        return SamplingRows(self._temperature[slots], self._top_p[slots], self._top_k[slots], uniform)

    def is_first(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """True for slots whose next token is the first of their generation."""
        return np.asarray(self._known[slots] == self._prompt[slots])

    def wants_text(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """True for slots whose request has stop strings."""
        return np.asarray(self._wants_text[slots])

    def sampled(self, slot: int, n: int) -> list[int]:
        """The last `n` ids that a busy slot has sampled, or all if there are fewer."""
        begin = max(int(self._prompt[slot]), int(self._known[slot]) - n)
        ids: list[int] = self._ids[slot, begin : int(self._known[slot])].tolist()
        return ids

    def advance(self, segments: Segments, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> tuple[Ints, Ints]:
        """Record what a step computed and sampled; `tokens` and `logprobs` are of the segments that sample.

        Returns:
            Slots whose request sampled a stop token, and slots whose request reached its limit without one.
        """
        self._computed[segments.slots] += segments.counts
        slots = segments.slots[segments.samples]
        known = self._known[slots]
        self._ids[slots, known], self._logprobs[slots, known] = tokens, logprobs
        self._known[slots] = known + 1
        stopped = (tokens[:, None] == self._stops[slots]).any(axis=1)
        full = (known + 1 >= self._limit[slots]) & ~stopped
        return slots[stopped], slots[full]

    def end(self, slot: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Release a busy slot (to its session, or free); returns the sampled ids and log-probs."""
        request = self.requests[slot]
        if request is None:
            raise KeyError(f"slot {slot} is not busy")
        new = slice(int(self._prompt[slot]), int(self._known[slot]))
        sampled = tuple(self._ids[slot, new].tolist()), tuple(self._logprobs[slot, new].tolist())
        self.requests[slot], self.busy[slot], request.slot = None, False, -1
        self._ended[slot] = self._step
        if self._names[slot] is None:
            self.forget(slot)
        return sampled

    def forget(self, slot: int) -> None:
        """Free a slot that is not busy."""
        name, self._names[slot] = self._names[slot], None
        if name:
            del self._slot_of[name]
        self._known[slot] = self._computed[slot] = 0

    def begin_version(self, version: int) -> None:
        """Note, in every request that has begun to sample, that later tokens are by other weights."""
        for slot in np.flatnonzero(self.busy).tolist():
            request = self.requests[slot]
            if request is not None and request.version is not None:
                request.updates.append((version, int(self._known[slot] - self._prompt[slot])))

    def forget_cache(self) -> None:
        """Nothing counts as cached any more; busy slots compute all of their tokens again."""
        self._computed[:] = 0

    def _own_prefix(self, slot: int, ids: Ints) -> int:
        """Tokens of the prompt that are cached in its session's slot; the last one is always computed."""
        n = min(int(self._computed[slot]), len(ids) - 1)
        differs = np.flatnonzero(self._ids[slot, :n] != ids[:n])
        return int(differs[0]) if len(differs) else n

    def _shared_prefix(self, request: Request, reused: int) -> tuple[int | None, int]:
        """Slot with the longest shared prompt prefix, if well beyond `reused`, and its length."""
        ids, n = request.ids, len(request.ids) - 1
        if n - reused < _MIN_SHARED:
            return None, 0
        # Only slots that agree just beyond `reused` can spare enough; this leaves few to compare in full.
        near = slice(reused, reused + _MIN_SHARED)
        available = np.where(self.busy, self._known, self._computed)
        like = (self._ids[:, near] == ids[near]).all(axis=1) & (self._adapter == request.adapter)
        rows = np.flatnonzero(like & (available >= reused + _MIN_SHARED))
        if not len(rows):
            return None, 0
        differs = self._ids[rows, :n] != ids[:n]
        shared = np.minimum(np.where(differs.any(axis=1), differs.argmax(axis=1), n), available[rows])
        best = int(shared.argmax())
        row, length = int(rows[best]), int(shared[best])
        if length == n < self._prompt[row]:  # which read the last token in a stretch, and so rounds it otherwise
            length -= 1
        return (row, length) if length - reused >= _MIN_SHARED else (None, 0)

    def _take_slot(self, source: int | None) -> int | None:
        """Free slot, or the longest idle session's, `source` last; None if there is none."""
        for slot, name in enumerate(self._names):
            if name is None and not self.busy[slot]:
                return slot
        held = self.busy | (self.busy.any() & (self._step - self._ended < _HOLD_STEPS))
        idle = np.flatnonzero(~held).tolist()
        if not idle:
            return None
        slot = min(idle, key=lambda s: (s == source, self._ended[s]))
        self.forget(slot)
        self._stats.n_evictions += 1
        return int(slot)

    def _start(self, request: Request, slot: int, n_cached: int) -> None:
        params, n = request.params, len(request.ids)
        self._stats.n_cached_tokens += n_cached
        self.requests[slot], self.busy[slot], request.slot = request, True, slot
        if request.session and request.session not in self._slot_of:
            self._names[slot] = request.session
            self._slot_of[request.session] = slot
        self._ids[slot, :n] = request.ids
        self._prompt[slot], self._known[slot], self._computed[slot] = n, n, n_cached
        self._limit[slot] = min(n + params.max_tokens, self._ids.shape[1])
        self._number[slot], self._key[slot] = request.number, request_key(params.seed)
        self._temperature[slot], self._top_p[slot], self._top_k[slot] = params.temperature, params.top_p, params.top_k
        stops = request.prompt.stop_ids
        if len(stops) > self._stops.shape[1]:
            wider = np.full((self._n_slots, len(stops)), -1, np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._wants_text[slot], self._adapter[slot] = bool(params.stop_strings), request.adapter
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops
