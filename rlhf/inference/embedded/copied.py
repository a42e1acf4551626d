"""Embedded engine on a copy of the policy, for trainers that shard the policy's own module.

It computes as the engine that shares the trainer's module does, and is sent every parameter at each delivery. Memory
for a whole copy in every process is the price: for large models an engine of its own is the better choice.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlhf.data import PolicyWeights, WeightsForm
from rlhf.errors import DeliveryError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.fingerprint import Digest


class CopiedEngine(TransformersEngine):
    """A `TransformersEngine` whose module is not the trainer's; adapters are merged into its weights.

    Args:
        model: a whole copy of the policy without adapters, from now on the engine's.
        settings: of `TransformersEngine`.
    """

    #: Log-probs are computed by another module than the trainer's.
    shares_policy: ClassVar[bool] = False

    #: Every parameter is sent.
    weights_form: ClassVar[WeightsForm] = "full"

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model.requires_grad_(False), **settings)

    @torch.no_grad()
    def _verified(self, weights: PolicyWeights) -> str:
        """Load every parameter and return the digest of the received weights if it matches the sent one."""
        where = f"{type(self).__name__}.load, version {weights.version}"
        if weights.parameters is None or weights.form != "full":
            raise DeliveryError(
                "this engine has its own copy of the weights",
                where=where,
                got=f"{weights.form} weights",
                expected="full weights",
            )
        self._check_version(weights, where)
        own = dict(self._model.named_parameters(remove_duplicate=False))
        sent, names = Digest(), []
        for name, value in weights.parameters():
            if name not in own:
                raise DeliveryError("the engine's model has no such parameter", where=where, got=name)
            arriving = value.to(own[name].dtype)
            sent.add(name, arriving)
            own[name].copy_(arriving)
            names.append(name)
        held = Digest()
        for name in names:
            held.add(name, own[name])
        if set(names) != set(own) or held.hexdigest() != sent.hexdigest():
            missing = sorted(set(own) - set(names))
            raise DeliveryError(
                "not every parameter arrived",
                where=where,
                got=f"nothing for {', '.join(missing[:3])}" if missing else f"fingerprint {held.hexdigest()}",
                expected=f"{len(own)} parameters, fingerprint {sent.hexdigest()}",
            )
        return held.hexdigest()
