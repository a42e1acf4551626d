"""Statistics of a micro-batch, and their sum over the micro-batches of an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rlhf.losses.mismatch import CorrectionInputs, CorrectionOutput, joined, joined_outputs, mismatch_metrics

#: What was compared of a micro-batch: the tokens, and what a correction made of them.
Compared = tuple[CorrectionInputs, CorrectionOutput | None]

#: Of a micro-batch what adds up, what is compared for the largest, and what was compared with the engine.
Plain = tuple[dict[str, float], dict[str, float], Compared | None]


@dataclass(frozen=True)
class Computed:
    """Result of a forward pass over one micro-batch.

    Attributes:
        loss: scalar to differentiate, this micro-batch's share.
        metrics: shares of what is logged, which add up.
        metrics_max: of which the largest is logged.
        compared: with the engine, where the old log-probs are found in the update.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics_max: Mapping[str, torch.Tensor] = field(default_factory=dict)
    compared: Compared | None = None


def plain(computed: Sequence[Computed], count: torch.Tensor) -> tuple[list[Plain], float]:
    """Micro-batch figures and `count`, a scalar, as numbers, with one GPU synchronisation."""
    tensors = [x for c in computed for x in (*c.metrics.values(), *c.metrics_max.values())]
    numbers = torch.stack([x.detach().double().reshape(()) for x in (*tensors, count)]).tolist()
    given = iter(numbers)
    found = [
        ({name: next(given) for name in c.metrics}, {name: next(given) for name in c.metrics_max}, c.compared)
        for c in computed
    ]
    return found, numbers[-1]


def metrics_of(found: Iterable[Plain]) -> dict[str, float]:
    """Return what is logged of an update whose micro-batches came to `found`."""
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    seen = []
    for metrics, metrics_max, compared in found:
        for name, x in metrics.items():
            sums[name] = sums.get(name, 0.0) + x
        for name, x in metrics_max.items():
            peaks[name] = max(peaks.get(name, -math.inf), x)
        if compared is not None:
            seen.append(compared)
    return {**sums, **peaks, **(_mismatch(seen) if seen else {})}


def over_updates(name: str, values: Sequence[float]) -> float:
    """Figure of a step from those of its updates: of a learning rate the last, of a maximum that, else the mean.

    >>> over_updates("optimizer/lr", [1.0, 3.0]), over_updates("loss/total", [1.0, 3.0])
    (3.0, 2.0)
    """
    if name.endswith("/lr"):
        return values[-1]
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def _mismatch(seen: Sequence[Compared]) -> dict[str, float]:
    outputs = [output for _, output in seen if output is not None]
    return mismatch_metrics(joined([tokens for tokens, _ in seen]), joined_outputs(outputs) if outputs else None)
