"""Data-parallel replicas: each process computes a share, and all hold the same weights.

Coefficients of a loss are made over a whole minibatch, so the gradients of the shares add up to that of one process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlhf.processes import current


def add_gradients(parameters: Iterable[torch.nn.Parameter], what: str) -> None:
    """Sum gradients over all processes; a missing one counts as 0.

    Two processes with gradients of (1, 2) and none: (1, 2) in both. A parameter of which nobody has one keeps none, as
    in one process: an optimiser leaves it alone, where it would decay it, and its moments, by a gradient of 0.

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

    own = list(parameters)
    if not own:
        return
    with here.comm_errors(what):
        given = torch.tensor([float(p.grad is not None) for p in own], device=own[0].device)
        dist.all_reduce(given)
        for parameter, n_given in zip(own, given.tolist(), strict=True):
            if not n_given:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
            dist.all_reduce(parameter.grad)
