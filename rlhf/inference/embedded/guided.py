"""Embedded engine whose logits are corrected by what training changed in a smaller model (RAST)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rlhf.data import PolicyWeights
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.embedded.scheduler import Copy, Segments


class GuidedEngine(TransformersEngine):
    """A `TransformersEngine` that samples from softmax(ℓ + λ (ℓ_tuned − ℓ_base)), ℓ the logits of its own module.

    Logits (1, 0), tuned (0, 2), base (0, 1) and λ = .5: (1, .5). Log-probs of generations are those of the sum. The two
    models see the same tokens in the same passes, each with keys and values of its own. Tokens that they do not have,
    which fill up a vocabulary, are corrected by nothing.

    Args:
        model: as `TransformersEngine` has it.
        guides: the tuned model and the base model, with the module's tokens.
        weight: λ.
        settings: of `TransformersEngine`.

    Source: RAST, arXiv 2506.15710.
    """

    #: Log-probs are those of three models together.
    shares_policy: ClassVar[bool] = False

    def __init__(self, model: Any, *, guides: tuple[Any, Any], weight: float, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._weight = weight
        self._guides = [_Guide(guide, **settings) for guide in guides]

    @property
    def cache_bytes(self) -> int:
        """Memory of all keys and values, those of the guides included."""
        return self._cache.n_bytes + sum(guide.cache_bytes for guide in self._guides)

    def drop_cache(self) -> None:
        """Free all keys and values, those of the guides included."""
        super().drop_cache()
        for guide in self._guides:
            guide._cache.clear()

    def _take_over(self, slot: int, copy: Copy) -> None:
        super()._take_over(slot, copy)
        for guide in self._guides:
            guide._take_over(slot, copy)

    def _forward(self, segments: Segments) -> Tensor:
        logits = super()._forward(segments).float()
        tuned, base = (guide.follow(self, segments) for guide in self._guides)
        n = min(logits.shape[1], tuned.shape[1], base.shape[1])
        logits = logits.clone()
        logits[:, :n] += self._weight * (tuned[:, :n] - base[:, :n])
        return logits


class _Guide(TransformersEngine):
    """Computes the forward passes of another engine with a separate model."""

    def follow(self, engine: GuidedEngine, segments: Segments) -> Tensor:
        """Logits in float32 after the segments of `engine` that sample, `[n, V]`."""
        self._table = engine._table
        return self._forward(segments).float()


class UnguidedEngine(TransformersEngine):
    """A guided engine as the publisher sees it: loads weights into both, and answers the canary without guide logits.

    Args:
        engine: that samples.
    """

    def __init__(self, engine: GuidedEngine) -> None:
        super().__init__(engine._model, version=engine.policy_version, **engine.options)
        self._engine = engine

    async def load(self, weights: PolicyWeights) -> None:
        """Deliver to both; see `TransformersEngine.load`."""
        await super().load(weights)
        await self._engine.load(weights)
