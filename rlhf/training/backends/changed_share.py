"""Share of trained weights that an update changes, as the model computes with them.

In 16 bits an update of a weight is rounded: at a learning rate of 1e-6 to nothing, for most. With masters in float32 it
is not lost, and the weight moves once enough of them have added up. Updated in place, it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhf.training.backends.sharded import ShardInfo, device_of, format_of, shard_of

#: Places among all trained weights that the tensors to look at lie at, and weights looked at for each.
N_PLACES, N_EACH = 64, 64
#: Steps in a row without a change that are worth a word.
MAX_STILL = 5
#: Share of the weights that an update in place should change in 16 bits: below, most of it is rounded away.
MOVED_SHARE = 0.5


def places_in(sizes: Sequence[int]) -> dict[int, npt.NDArray[np.int64]]:
    """Fixed uniform sample of weight positions, by the number of the tensor.

    Few tensors, so that looking takes few kernels. Of 64 stretches of equal length of all weights, end to end, each
    picks the tensor at a random place in it, and a tensor picked k times gives one weight in each of 64 k stretches of
    its own, or all that it has. Sizes (4, 8192): of the second each stretch of two weights gives one.

    Args:
        sizes: how many weights each tensor has.
    """
    rng = np.random.default_rng(0)
    ends = np.cumsum(sizes)
    picked = (np.arange(N_PLACES) + rng.random(N_PLACES)) * ends[-1] / N_PLACES
    found = {}
    for number, n_picks in zip(
        *np.unique(np.searchsorted(ends, picked, side="right"), return_counts=True), strict=True
    ):
        size = sizes[number]
        n = min(N_EACH * int(n_picks), size)
        places = (np.arange(n) + rng.random(n)) * size / n
        found[int(number)] = np.minimum(places.astype(np.int64), size - 1)
    return found


class Changes:
    """Counter of sampled weights that an update changes; of sharded ones, this process's part.

    Weights without a gradient count as not changed, such as the embedding of a token that was not seen. Weights of 0,
    such as half of a new adapter, change at any learning rate.

    Args:
        model: of whose parameters those that require a gradient are trained.

    Attributes:
        n: weights that are looked at in this process; known once an update has begun.
    """

    def __init__(self, model: Any) -> None:
        self.n = 0
        self._model = model
        self._chosen: list[tuple[Any, torch.Tensor]] | None = None
        self._before = torch.zeros(0)

    def begin(self) -> None:
        """Before an update."""
        if self._chosen is None:
            self._chosen = self._choose()
            self.n = sum(len(own) for _, own in self._chosen)
        self._before = self._present(self._chosen)

    def end(self) -> torch.Tensor:
        """After it: how many have changed, a scalar on the device, which is not waited for."""
        return (self._present(self._chosen or []) != self._before).sum()

    def _choose(self) -> list[tuple[Any, torch.Tensor]]:
        trained = [p for p in self._model.parameters() if p.requires_grad]
        found = []
        for number, places in places_in([ShardInfo(p).ds_numel or p.numel() for p in trained]).items():
            parameter = trained[number]
            stored, begin = shard_of(parameter)
            own = places[(places >= begin) & (places < begin + len(stored))] - begin
            if len(own):
                found.append((parameter, torch.from_numpy(own).to(stored.device)))
        return found

    def _present(self, chosen: Sequence[tuple[Any, torch.Tensor]]) -> torch.Tensor:
        device = device_of(self._model)
        parts = [shard_of(p)[0].take(own).to(device, format_of(p), non_blocking=True) for p, own in chosen]
        return torch.cat(parts) if parts else torch.zeros(0, device=device)


def share_of(counts: Iterable[tuple[float, int]]) -> float:
    """Return the share that changed of what all processes have looked at.

    Args:
        counts: of each, how many changed and how many there are; weights that several hold are in the counts of each.
    """
    given = list(counts)
    return sum(changed for changed, _ in given) / max(sum(n for _, n in given), 1)


@dataclass
class NoUpdateMonitor:
    """Detector of lost updates: consecutive steps that changed no weight (16-bit rounding, too small a learning rate).

    One such step says little: masters add up what each update does, and gradients may be as good as 0 for once. Steps
    at less than half of the peak learning rate are passed over: in warm-up, and where a schedule ends, it is meant to
    be small.

    Attributes:
        n: such steps so far.
    """

    n: int = 0

    def learn(self, values: Mapping[str, float], where: str, *, peak: float, in_place: bool) -> dict[str, str]:
        """Update on a finished step; returns cautions by name.

        Args:
            values: what its updates logged; without a share there were none. A step of which an update was left out has
                no finite gradient norm, and is passed over.
            where: the step, for the reader.
            peak: learning rate.
            in_place: whether weights in 16 bits are updated without masters in float32.
        """
        share, lr = values.get("optimizer/changed_share"), values.get("optimizer/lr", 0.0)
        norm = values.get("optimizer/grad_norm", 0.0)
        if share is None or lr < peak / 2 or norm == 0 or not math.isfinite(norm):
            return {}
        self.n = self.n + 1 if share == 0 else 0
        found = {}
        if in_place and share < MOVED_SHARE:
            found["in_place"] = (
                f"{where} changed {share:.1%} of the weights, which are in 16 bits and have no masters in float32: "
                "what was smaller is rounded away; train in float32, or with an optimiser that keeps masters"
            )
        elif self.n >= MAX_STILL:
            found["still"] = (
                f"none of the sampled weights has changed in the {self.n} steps up to {where}, though there are "
                f"gradients: a learning rate of {lr:.3g} is too small for their number format; raise optimizer.lr"
            )
        return {name: f"caution: {text}" for name, text in found.items()}
