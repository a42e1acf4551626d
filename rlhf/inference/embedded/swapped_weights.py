"""The embedded engine over the trainer's own module, sampling with other weights than the module has.

While it computes, and only then, the module's trained parameters hold these weights, so that an older version of a
policy costs its trained parameters and no second model: of an adapter, the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from rlhf.data import PolicyWeights
from rlhf.errors import DeliveryError
from rlhf.inference.embedded.engine import TransformersEngine

#: Parameters, each with what it is to hold for a while.
Held = Sequence[tuple[torch.nn.Parameter, torch.Tensor]]


def held_by(model: Any, weights: Mapping[str, torch.Tensor]) -> Held:
    """Parameters of `model` named by `weights`, each with its tensor on its device and in its format."""
    return [(p, weights[name].to(p)) for name, p in model.named_parameters() if name in weights]


@contextmanager
def having(held: Held) -> Iterator[None]:
    """Context in which the parameters hold other tensors; what autograd saved of their own stays untouched."""
    own = [p.data for p, _ in held]
    try:
        for p, weights in held:
            p.data = weights
        yield
    finally:
        for (p, _), data in zip(held, own, strict=True):
            p.data = data


class SwappedWeightsEngine(TransformersEngine):
    """A `TransformersEngine` of fixed weights over a module that is trained.

    Args:
        model: the trainer's module; nothing else may compute with it from another thread.
        weights: of trained parameters, by their names.
        settings: of `TransformersEngine`.
    """

    #: Log-probs are those of other weights than the trainer's.
    shares_policy: ClassVar[bool] = False

    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor], **settings: Any) -> None:
        super().__init__(model, **settings)
        self._held = held_by(model, weights)

    async def load(self, weights: PolicyWeights) -> None:
        """Raise DeliveryError: its weights stay."""
        raise DeliveryError(
            "this engine holds the weights of an older version and takes no delivery",
            where=f"{type(self).__name__}.load",
            got=f"version {weights.version}",
            expected=f"version {self.policy_version} only",
        )

    def _step(self) -> None:
        """Compute with the weights that are held; the module has its own back when this returns."""
        with having(self._held):
            super()._step()
