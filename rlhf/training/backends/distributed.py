"""Base of trainers over several processes, which share the micro-batches of every update.

Every process is given all micro-batches of a minibatch and goes through every n-th of them. The coefficients of their
tokens were made over the whole minibatch, so losses and gradients simply add up over the processes. All make the same
number of passes, because some of them are made together: where one has no micro-batch left it goes through one that
counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhf.batching.pack import PackedBatch
from rlhf.processes import current, in_turn
from rlhf.training.backends.changed_share import share_of
from rlhf.training.backends.microbatch_stats import Computed, Plain, plain
from rlhf.training.backends.torch import R, T, TorchTrainer


@dataclass
class DistributedTrainer(TorchTrainer):
    """Trainer of several processes: each must make the same calls in the same order."""

    @property
    def rounds_in_place(self) -> bool:
        """Never: what is updated is float32."""
        return False

    @property
    def n_processes(self) -> int:
        """Number of processes that share the micro-batches."""
        return current().n

    def _each(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        here = current()
        with here.comm_errors("a forward pass"):
            own = [work(item) for item, _ in self._shared(items)]
        return in_turn(items, here.gather(own, "what a forward pass found"))

    def _own(self, batches: Sequence[PackedBatch]) -> list[tuple[PackedBatch, bool]]:
        return self._shared(batches)

    def _shared(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Every n-th item; where another process has one more, the last again, not to count."""
        if not items:
            return []
        here = current()
        own = [(item, True) for item in items[here.rank :: here.n]]
        return own + [(items[-1], False)] * (-(-len(items) // here.n) - len(own))

    def _merged(
        self, batches: Sequence[PackedBatch], computed: Sequence[Computed], n_changed: torch.Tensor
    ) -> tuple[list[Plain], float]:
        found, n = plain(computed, n_changed)
        of_all, counts = zip(*current().gather((found, (n, self._changes.n)), "what an update logs"), strict=True)
        return in_turn(batches, of_all), share_of(counts)
