"""Packing of rows into micro-batches of flat tensors, without padding.

A minibatch is what one optimiser update sees; it is packed into micro-batches, each one forward and backward pass of at
most so many tokens. The coefficients of the reduction are computed over the minibatch before it is packed, so the
losses of its micro-batches add up and their number changes memory and speed only.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from rlhf.batching.samples import Floats as FloatRow
from rlhf.batching.samples import Sample
from rlhf.errors import DataError
from rlhf.inference.embedded import attention
from rlhf.losses.reduction import Floats, Reduction
from rlhf.losses.trajectories import Whole

#: What plans of passes are made of, on the CPU.
_ON_HOST = ("token_ids", "lengths", "select")


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Packed micro-batch on the CPU: R rows end to end, T tokens, of which N are policy tokens.

    Attributes:
        token_ids: int64 `[T]`, the rows one after the other.
        lengths: int64 `[R]`, tokens of each row; attention must not cross them.
        select: int64 `[N]`, positions in `[T]` whose logits predict the policy tokens: the position before each, which
            is always in the same row.
        targets: int64 `[N]`, the policy tokens.
        sampler_logprobs: float32 `[N]`, nats.
        advantages: float32 `[N]`.
        weights: float32 `[N]`, the reduction's coefficients over the whole minibatch, times the correction.
        trajectory_ids: int64 `[N]`, which trajectory of the step each token belongs to.
        group_ids: int64 `[N]`, which group of the step.
        token_positions: int64 `[N]`, which of the policy tokens of its trajectory in the minibatch each is, by the
            order of rows.
        n_minibatch_tokens: policy tokens of the whole minibatch.
        old_logprobs: float32 `[N]`, nats, the trainer's before the first update; None where it takes the sampler's.
        old_mean_logprobs: float32 `[N]`, nats; None where nothing asked for them.
        teacher_logprobs: float32 `[N]`, nats, NaN on tokens that the teacher does not teach; None without a teacher.
        off_policy: bool `[N]`, tokens that another than the policy wrote; None where no row of these has any.
        versions: int64 `[N]`, of the policy that sampled each; None where that is not known.
        values: float32 `[N]`, of a critic before the first update; None without one.
        returns: float32 `[N]`, what those values should have been; None without a critic.
        adapters: `[R]`, role whose adapter reads each row, empty for the shared one; None where that reads all.
        routing: int16 `[T, layers, K]`, experts that each token meets, −1 in rows where they are not known; None where
            no row says.
    """

    token_ids: torch.Tensor
    lengths: torch.Tensor
    select: torch.Tensor
    targets: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    trajectory_ids: torch.Tensor
    group_ids: torch.Tensor
    token_positions: torch.Tensor
    n_minibatch_tokens: int
    old_logprobs: torch.Tensor | None = None
    old_mean_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    off_policy: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    adapters: tuple[str, ...] | None = None
    routing: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy of the batch with its flat policy-token arrays on `device`; ids, row lengths and `select` stay.

        To a GPU it goes by way of pinned memory and nobody waits; a batch that is there is returned as it is.
        """
        if torch.device(device).type == self.targets.device.type:
            return self
        pins = torch.device(device).type == "cuda"
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _ON_HOST}
        moved: dict[str, Any] = {
            name: (values.pin_memory() if pins else values).to(device, non_blocking=True)
            for name, values in arrays.items()
            if isinstance(values, torch.Tensor)
        }
        return replace(self, **moved)


class MicroBatches(Sequence[PackedBatch]):
    """Micro-batches of a minibatch, collated lazily so that one at a time is in memory.

    Args:
        rows: of the minibatch.
        weights_R: coefficient of each policy token of each row.
        members: which rows each micro-batch holds, as `pack` says.
    """

    def __init__(self, rows: Sequence[Sample], weights_R: Floats, members: Sequence[Sequence[int]]) -> None:
        self._rows, self._weights, self._members = rows, weights_R, members
        self._n_tokens, self._first = sum(s.n_policy_tokens for s in rows), _tokens_before(rows)

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedBatch]: ...
    def __getitem__(self, index: int | slice) -> PackedBatch | list[PackedBatch]:
        if isinstance(index, slice):
            return [self._laid_out(members) for members in self._members[index]]
        return self._laid_out(self._members[index])

    def _laid_out(self, members: Sequence[int]) -> PackedBatch:
        at = list(members)
        rows = [self._rows[i] for i in at]
        return collate(rows, self._weights[at], n_minibatch_tokens=self._n_tokens, first_R=self._first[at])

    @property
    def shapes(self) -> list[tuple[list[int], int]]:
        """Of each micro-batch the lengths of its rows, and how many policy tokens they hold."""
        found = [[self._rows[i] for i in members] for members in self._members]
        return [([len(s) for s in rows], sum(s.n_policy_tokens for s in rows)) for rows in found]

    @property
    def adapters(self) -> set[str]:
        """Roles whose adapters read the rows; empty for the shared one."""
        return {self._rows[i].adapter for members in self._members for i in members}


class WithoutPadding(Sequence[tuple[PackedBatch, bool]]):
    """Micro-batches of a single process, none of them a dummy that only keeps ranks in step; laid out lazily."""

    def __init__(self, batches: Sequence[PackedBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index], True


def shapes_of(batches: Sequence[PackedBatch]) -> list[tuple[list[int], int]]:
    """Return of each micro-batch the lengths of its rows, and how many policy tokens they hold."""
    if isinstance(batches, MicroBatches):
        return batches.shapes
    return [(batch.lengths.tolist(), len(batch.targets)) for batch in batches]


def adapters_of(batches: Sequence[PackedBatch]) -> set[str]:
    """Return the roles whose adapters read the rows of `batches`; empty for the shared one."""
    if isinstance(batches, MicroBatches):
        return batches.adapters
    return {name for batch in batches for name in batch.adapters or ("",)}


def pack_minibatches(
    samples: Sequence[Sample],
    n_minibatches: int,
    reduction: Reduction,
    max_tokens: int,
    rng: np.random.Generator | None = None,
    *,
    n_least: int = 1,
) -> Iterator[MicroBatches]:
    """Yield the micro-batches of each minibatch, one minibatch at a time; each is collated lazily.

    Args:
        samples: rows of a step; none yield nothing.
        n_minibatches: how many optimiser updates to make of them; fewer if there are fewer trajectories.
        reduction: its coefficients are computed for each minibatch.
        max_tokens: token budget of a micro-batch.
        rng: shuffles trajectories over the minibatches; None takes them in order.
        n_least: as `pack`.
    """
    for rows in minibatches(samples, n_minibatches, rng):
        counts = np.array([s.n_policy_tokens for s in rows])
        weights = reduction(counts, np.array([s.sequence for s in rows]))
        yield MicroBatches(rows, weights, pack(rows, max_tokens, n_least=n_least))


def minibatches(
    samples: Sequence[Sample], n_minibatches: int, rng: np.random.Generator | None = None
) -> list[list[Sample]]:
    """Split rows into minibatches of about equally many trajectories; the rows of a trajectory stay together.

    The order within a minibatch is that of `samples`. One state of `rng` gives one split; None splits in order.
    """
    if n_minibatches < 1:
        raise DataError("no minibatches asked for", where="minibatches", got=str(n_minibatches), expected="at least 1")
    trajectories = np.array(list(dict.fromkeys(s.sequence for s in samples)), np.int64)
    if rng is not None:
        trajectories = rng.permutation(trajectories)
    parts = np.array_split(trajectories, min(n_minibatches, len(trajectories))) if len(trajectories) else []
    number = {int(t): i for i, part in enumerate(parts) for t in part}
    split: list[list[Sample]] = [[] for _ in parts]
    for sample in samples:
        split[number[sample.sequence]].append(sample)
    return split


def pack(samples: Sequence[Sample], max_tokens: int, *, n_least: int = 1) -> list[list[int]]:
    """Distribute rows over micro-batches of at most `max_tokens` computed tokens: best fit, largest first.

    Rows of a group share a prompt, which is computed once in each micro-batch that has any of them, and counts once. So
    a group stays together if it fits, with at most a quarter more tokens than the budget as attention sees them; else
    its rows are distributed by themselves. A row longer than the budget gets a micro-batch of its own, and a warning.
    The result depends on lengths, groups and what these begin with alone: indices into `samples`, ascending in each
    micro-batch.

    Args:
        samples: rows.
        max_tokens: token budget of a micro-batch.
        n_least: processes that share the micro-batches: where all rows would fit into fewer, they are cut evenly into
            about as many, as far as whole rows allow. For that they go by length alone.
    """
    given = max_tokens
    if n_least > 1 and samples:
        lengths = [len(s) for s in samples]
        max_tokens = min(given, max(-(-sum(lengths) // n_least), *lengths))
    units = _units(samples, max_tokens) if max_tokens == given else _rows(samples, range(len(samples)))
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (space left, number of the micro-batch), sorted
    for members, size in units:
        at = bisect_left(free, (size, -1))
        space, number = free.pop(at) if at < len(free) else (max_tokens, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number] += members
        insort(free, (space - size, number))
    n_oversized = sum(len(s) > given for s in samples)
    if n_oversized:
        warnings.warn(
            f"{n_oversized} of {len(samples)} rows are longer than the micro-batch budget of {given} tokens and "
            "get a micro-batch of their own; raise max_tokens_per_microbatch or lower the episode's limits",
            stacklevel=2,
        )
    return [sorted(members) for members in bins]


def _units(samples: Sequence[Sample], max_tokens: int) -> list[tuple[list[int], int]]:
    """Rows and whole groups in the order they are packed in, each with its share of the budget.

    Groups that do not fit come first, row by row.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault((sample.group, sample.adapter), []).append(i)
    sizes = {key: _size([samples[i].token_ids for i in members]) for key, members in groups.items()}
    apart = [_rows(samples, members) for key, members in sorted(groups.items()) if sizes[key] > max_tokens]
    whole = [(members, sizes[key]) for key, members in groups.items() if sizes[key] <= max_tokens]
    return [*chain.from_iterable(apart), *sorted(whole, key=lambda unit: (-unit[1], unit[0]))]


def _rows(samples: Sequence[Sample], members: Iterable[int]) -> list[tuple[list[int], int]]:
    """Rows by themselves, longest first."""
    return [([i], len(samples[i])) for i in sorted(members, key=lambda i: (-len(samples[i]), i))]


def _size(rows: Sequence[npt.NDArray[Any]]) -> int:
    """Share of the budget that rows of a group take together.

    It is the tokens that are computed, and at least four fifths of all that attention lays out: of three rows of 100
    tokens that begin with the same 40 it is 240, as 220 are computed.
    """
    first, *others = rows
    n = min(map(len, rows))
    for row in others:
        differing = np.flatnonzero(row[:n] != first[:n])
        n = int(differing[0]) if len(differing) else n
    n_tokens = sum(map(len, rows))
    n_shared = n * len(others) if n >= attention.SHORTEST_SHARED else 0
    return max(n_tokens - n_shared, -(-4 * n_tokens // 5))


def collate(
    samples: Sequence[Sample],
    weights_R: Floats,
    *,
    n_minibatch_tokens: int | None = None,
    first_R: npt.NDArray[np.int64] | None = None,
) -> PackedBatch:
    """Lay rows end to end.

    Args:
        samples: R rows, at least one.
        weights_R: coefficient of each policy token of each row.
        n_minibatch_tokens: policy tokens of the minibatch these rows are part of; None if they are all of it.
        first_R: place in its trajectory of the first policy token of each row; None if these rows are all of them.
    """
    token_ids = np.concatenate([s.token_ids for s in samples], dtype=np.int64)
    mask = np.concatenate([s.mask for s in samples])
    positions = np.flatnonzero(mask)  # of the policy tokens; a row never starts with one (checked by Sample)
    counts = np.array([s.n_policy_tokens for s in samples])
    weights = np.repeat(weights_R, counts)
    if any(s.correction is not None for s in samples):
        factors = [np.ones(len(s), np.float32) if s.correction is None else s.correction for s in samples]
        weights = weights * np.concatenate(factors)[positions]
    first = _tokens_before(samples) if first_R is None else first_R
    positions_N = np.concatenate([start + _positions(s) for start, s in zip(first, samples, strict=True)])
    off_policy = [np.zeros(len(s), np.bool_) if s.off_policy is None else s.off_policy for s in samples]
    has_off_policy = any(row.any() for row in off_policy)
    versions = [s.versions for s in samples if s.versions is not None]
    has_versions = len(versions) == len(samples)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        lengths=torch.tensor([len(s) for s in samples]),
        select=torch.from_numpy(positions - 1),
        targets=torch.from_numpy(token_ids[positions]),
        sampler_logprobs=torch.from_numpy(np.concatenate([s.sampler_logprobs for s in samples])[positions]),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in samples])[positions]),
        weights=torch.from_numpy(weights.astype(np.float32)),
        trajectory_ids=torch.from_numpy(np.repeat(np.array([s.sequence for s in samples]), counts)),
        group_ids=torch.from_numpy(np.repeat(np.array([s.group for s in samples]), counts)),
        n_minibatch_tokens=int(counts.sum()) if n_minibatch_tokens is None else n_minibatch_tokens,
        old_logprobs=_tensor(_given([s.old_logprobs for s in samples], positions)),
        token_positions=torch.from_numpy(positions_N.astype(np.int64)),
        old_mean_logprobs=_tensor(_given([s.old_mean_logprobs for s in samples], positions)),
        teacher_logprobs=_tensor(_given([s.teacher_logprobs for s in samples], positions)),
        off_policy=torch.from_numpy(np.concatenate(off_policy)[positions]) if has_off_policy else None,
        versions=torch.from_numpy(np.concatenate(versions)[positions].astype(np.int64)) if has_versions else None,
        values=_tensor(_given([s.values for s in samples], positions)),
        returns=_tensor(_given([s.returns for s in samples], positions)),
        adapters=tuple(s.adapter for s in samples) if any(s.adapter for s in samples) else None,
        routing=_routing(samples),
    )


def _routing(samples: Sequence[Sample]) -> torch.Tensor | None:
    """Experts of all tokens, −1 in rows that do not say; None where none does."""
    known = next((s.routing for s in samples if s.routing is not None), None)
    if known is None:
        return None
    rows = [np.full((len(s), *known.shape[1:]), -1, np.int16) if s.routing is None else s.routing for s in samples]
    return torch.from_numpy(np.concatenate(rows))


def _positions(sample: Sample) -> npt.NDArray[np.int64]:
    """Positions of a row's policy tokens, from 0, with a gap of one before each reply but the first."""
    at = np.flatnonzero(sample.mask)
    return np.arange(len(at)) + np.cumsum(np.diff(at, prepend=at[:1] - 1) > 1)


def _tokens_before(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    """Positions of the first policy token of each row, behind those of earlier rows of the same trajectory, `[R]`."""
    seen: dict[int, int] = {}
    first = []
    for sample in samples:
        first.append(seen.get(sample.sequence, 0))
        seen[sample.sequence] = first[-1] + int(_positions(sample).max(initial=-1)) + 2
    return np.array(first, np.int64)


def _tensor(values: FloatRow | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


def is_split(batches: Sequence[PackedBatch], whole: Whole) -> bool:
    """True if tokens of one trajectory, or of one group, lie in more than one of `batches`."""
    name = "group_ids" if whole == "group" else "trajectory_ids"
    found = [torch.unique(getattr(batch, name)) for batch in batches]
    return bool(found) and sum(map(len, found)) > len(torch.unique(torch.cat(found)))


def _given(arrays: Sequence[FloatRow | None], positions: npt.NDArray[np.intp]) -> FloatRow | None:
    """Values at `positions` of the rows end to end, or None where no row has any."""
    found = [a for a in arrays if a is not None]
    if not found:
        return None
    if len(found) != len(arrays):
        raise DataError(
            "some rows have figures that others lack",
            where="collate",
            got=f"{len(found)} of {len(arrays)} rows",
            expected="all rows of a step, or none",
        )
    return np.concatenate(found)[positions]
