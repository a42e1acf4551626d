"""Fields of other libraries' models and configurations, with defaults for those that one lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.capabilities import Capability, CapabilityView


class ModelConfig(CapabilityView):
    """Hugging Face model configuration, with None or the library's default for missing fields."""

    num_attention_heads = Capability[int | None](None)
    num_key_value_heads = Capability[int | None](None)
    hidden_size = Capability(0)
    head_dim = Capability[int | None](None)
    max_position_embeddings = Capability[int | None](None)
    rope_parameters = Capability[Mapping[str, Any] | None](None)
    """Of rotary positions; by type of layer where they differ."""
    attention_dropout = Capability[float | None](None)
    layer_types = Capability[Sequence[str] | None](())
    """Attention of each layer; empty where the configuration does not know them."""
    attn_logit_softcapping = Capability[float | None](None)
    model_type = Capability("")
    sliding_window = Capability[int | None](None)
    tie_word_embeddings = Capability(False)
    get_text_config = Capability[Callable[[], Any] | None](None)
    _attn_implementation = Capability[str | None](None)

    @property
    def text(self) -> ModelConfig:
        """Configuration of the language model, where the model holds others too."""
        return ModelConfig(self.get_text_config()) if self.get_text_config else self

    @property
    def attention(self) -> str | None:
        """Name of the attention function."""
        return self._attn_implementation

    @property
    def max_short_positions(self) -> int | None:
        """Positions of a row beyond which longrope reads all of them by other factors; None without it."""
        own = self.rope_parameters or {}
        kinds = [of for of in (own, *own.values()) if isinstance(of, Mapping) and of.get("rope_type") == "longrope"]
        return min((int(of["original_max_position_embeddings"]) for of in kinds), default=None)

    @property
    def n_key_value_heads(self) -> int:
        """Heads whose keys and values are kept."""
        return int(self.num_key_value_heads or self.num_attention_heads or 1)

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        return int(self.head_dim or self.hidden_size // (self.num_attention_heads or 1))


class ModelWrapper(CapabilityView):
    """A model that may be wrapped by PEFT or by DeepSpeed, and may not be Hugging Face's."""

    config = Capability[Any](None)
    get_base_model = Capability[Callable[[], Any] | None](None)
    """PEFT's."""
    module = Capability[Any](None)
    """DeepSpeed's."""
    role_adapters = Capability[Any](None)
    """Ours, see `rlhf.inference.role_adapters`."""
    _supports_attention_backend = Capability[object](False)

    @property
    def is_adapted(self) -> bool:
        """True if PEFT has wrapped it."""
        return self.get_base_model is not None

    @property
    def base(self) -> Any:
        """The model without PEFT's wrapper."""
        return self.get_base_model() if self.get_base_model else self.part

    @property
    def inner(self) -> Any:
        """The model without DeepSpeed's engine around it."""
        return self.part if self.module is None else self.module

    @property
    def takes_attention(self) -> bool:
        """True if its attention can be replaced."""
        return bool(self._supports_attention_backend)
