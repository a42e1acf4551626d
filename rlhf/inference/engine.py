"""Contract of an inference engine: token ids in, token ids and log-probs out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm
from rlhf.errors import ContextFull, EngineError


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples from the policy. All calls come from one event loop."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that new calls use."""

    @property
    def weights_form(self) -> WeightsForm:
        """Form in which `load` takes weights."""

    @property
    def shares_policy(self) -> bool:
        """True if it computes with the trainer's own module: both log-probs agree, but for rounding in 16 bits."""

    @property
    def max_context(self) -> int:
        """Most tokens (prompt and generation together) of one call."""

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once. Calls of one `session` share a cache where their prompts extend each other.

        Raises:
            EngineError: the model failed, or the prompt is longer than the context.
        """

    async def release(self, session: str) -> None:
        """Forget a session's cache; unknown names are fine. Cancels what the session still runs."""

    async def load(self, weights: PolicyWeights) -> None:
        """Use `weights` for all new calls; returns when they do. Raises DeliveryError."""

    async def close(self) -> None:
        """Stop and free everything."""


@runtime_checkable
class SleepableEngine(Protocol):
    """An engine with a sleep mode: it releases GPU memory between rollouts."""

    async def sleep(self) -> None:
        """Release GPU memory until the next call of `generate` or `load`."""


@runtime_checkable
class RestartableEngine(Protocol):
    """An engine whose instances can restart, and then hold no delivered weights."""

    async def needs_weights(self) -> bool:
        """Return True if no instance holds the weights of the last delivery."""


def check_prompt(prompt: Prompt, where: str, *, max_context: int, n_vocab: int | None = None) -> int:
    """Tokens of room, at least 1, that a prompt leaves for a generation.

    Args:
        prompt: at least one id.
        where: names the engine in the message.
        max_context: tokens of prompt and generation together.
        n_vocab: ids the model knows; None for a model that takes any.

    Raises:
        ContextFull: it leaves no room for a token.
        EngineError: the model does not know one of its ids.
    """
    n = prompt.n_tokens
    if n >= max_context:
        raise ContextFull(
            "the prompt leaves no room for a token",
            where=where,
            got=f"{n} tokens",
            expected=f"fewer than {max_context}",
        )
    ids = prompt.ids
    if n_vocab is not None and not 0 <= ids.min() <= ids.max() < n_vocab:
        raise EngineError(
            "a token id is outside the model's vocabulary",
            where=where,
            got=f"ids from {ids.min()} to {ids.max()}",
            expected=f"0 to {n_vocab - 1}",
            hint="use the tokenizer that belongs to the model",
        )
    return max_context - n
