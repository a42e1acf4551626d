"""The one seam to a model: token ids in, token ids and log-probs out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples from the policy. All calls come from one event loop."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that new calls use."""
        ...

    @property
    def weights_form(self) -> WeightsForm:
        """How `load` takes weights."""
        ...

    @property
    def shares_policy(self) -> bool:
        """Whether it computes with the trainer's own module, so that its log-probs are the trainer's."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens (prompt and generation together) of one call."""
        ...

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once. Calls of one `session` share a cache where their prompts extend each other.

        Raises:
            EngineError: the model failed, or the prompt is longer than the context.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session's cache; unknown names are fine. Cancels what the session still runs."""
        ...

    async def load(self, weights: PolicyWeights) -> None:
        """Use `weights` for all new calls; returns when they do. Raises DeliveryError."""
        ...

    async def close(self) -> None:
        """Stop and free everything."""
        ...
