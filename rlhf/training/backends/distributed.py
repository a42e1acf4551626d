"""Base of trainers over several processes, which share the micro-batches of every update.

Every process is given all micro-batches of a minibatch and goes through every n-th of them. The coefficients of their
tokens were made over the whole minibatch, so losses and gradients simply add up over the processes. Where rows are
shared (`rlhf.training.backends.sequence_parallel`), that is said of groups of processes. All make the same
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
from rlhf.training.backends.sequence_parallel import SequenceGroup
from rlhf.training.backends.torch import R, T, TorchTrainer


@dataclass
class DistributedTrainer(TorchTrainer):
    """Trainer of several processes: each must make the same calls in the same order.

    Attributes:
        n_per_row: neighbouring processes that share each micro-batch.
    """

    n_per_row: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequence = SequenceGroup.join(self.n_per_row, self.policy.model)

    def close(self) -> None:
        """Leave the policy's module as an ordinary one: the stage is over."""
        super().close()
        if self.sequence is not None:
            self.sequence.leave()

    @property
    def rounds_in_place(self) -> bool:
        """Never: what is updated is float32."""
        return False

    @property
    def n_processes(self) -> int:
        """Number of processes, or of groups that share rows, that the micro-batches are dealt out to."""
        return current().n // self.n_per_row

    def _each(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        here = current()
        with here.comm_errors("a forward pass"):
            own = [work(item) for item, _ in self._shared(items)]
        return in_turn(items, here.gather(own, "what a forward pass found")[:: self.n_per_row])

    def _own(self, batches: Sequence[PackedBatch]) -> list[tuple[PackedBatch, bool]]:
        return self._shared(batches)

    def _shared(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Every n-th item; where another process has one more, the last again, not to count."""
        if not items:
            return []
        n = self.n_processes
        own = [(item, True) for item in items[current().rank // self.n_per_row :: n]]
        return own + [(items[-1], False)] * (-(-len(items) // n) - len(own))

    def _merged(
        self, batches: Sequence[PackedBatch], computed: Sequence[Computed], n_changed: torch.Tensor
    ) -> tuple[list[Plain], float]:
        found, n = plain(computed, n_changed)
        of_all, counts = zip(*current().gather((found, (n, self._changes.n)), "what an update logs"), strict=True)
        return in_turn(batches, of_all[:: self.n_per_row]), share_of(counts)
