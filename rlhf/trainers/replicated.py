"""Models that several processes hold whole and train together: each has a share of the work, all have the same weights.

Coefficients of a loss are made over a whole minibatch, so the gradients of the shares add up to that of one process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlhf.processes import current


def add_gradients(parameters: Iterable[torch.nn.Parameter], what: str) -> None:
    """Give every process the sum of the gradients of all; one that had no share has gradients of 0.

    Two processes with gradients of (1, 2) and none: (1, 2) in both.

    Args:
        parameters: the same in each, in the same order.
        what: they are of, for messages.

    Raises:
        ProcessError: another process has ended or did not come in time.
    """
    here = current()
    if here.n == 1:
        return
    import torch.distributed as dist

    with here.hearing(what):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
