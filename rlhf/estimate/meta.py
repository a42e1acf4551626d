"""Models on the meta device: shapes and counts of a policy before its weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf.checking import refuse_unreachable
from rlhf.digests import verify_model
from rlhf.errors import ModelError

if TYPE_CHECKING:
    from rlhf.training.policy.model import FromScratch, Lora, Pretrained


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Parameter:
    """Shape and format of a model's tensor.

    Attributes:
        n: numbers in it.
        size: bytes of one of them.
        is_trained: whether it has a gradient.
    """

    n: int
    size: float
    is_trained: bool

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return int(self.n * self.size)


#: Bytes of a number in 4 bits, with a scale of 8 bits for 64 of them and one of 32 for 256 of those.
_SIZE_4BIT = (4 + 8 / 64 + 32 / (64 * 256)) / 8


def parameters_of(model: Any, *, quantization: str | None = None) -> list[Parameter]:
    """Return the parameters of a model or of a part of one, each once.

    Args:
        model: without memory or with.
        quantization: of its frozen linear layers but the output layer: 4bit, 8bit, or None.
    """
    small = {} if quantization is None else _quantized(model, quantization)
    return [Parameter(p.numel(), small.get(id(p), p.element_size()), p.requires_grad) for p in model.parameters()]


def _quantized(model: Any, quantization: str) -> dict[int, float]:
    """Bytes of a number of each weight that is quantised; in 8 bits a row has a scale in float32."""
    from torch import nn

    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return {
        id(m.weight): _SIZE_4BIT if quantization == "4bit" else 1 + 4 / m.in_features
        for m in layers
        if not m.weight.requires_grad
    }


def count(parameters: Iterable[Parameter]) -> tuple[int, int]:
    """Return how many numbers there are, and how many of them are trained."""
    found = list(parameters)
    return sum(p.n for p in found), sum(p.n for p in found if p.is_trained)


def meta_model(policy: FromScratch | Pretrained) -> tuple[Any, Any]:
    """Return the policy's model without memory for its parameters, adapters included, and its configuration.

    A from-scratch model has at most so many parameters: its tokenizer may learn fewer tokens than it is allowed to.

    Raises:
        ModelError: the configuration of a pretrained model cannot be read.
    """
    config = config_of(policy)
    return shaped(config, dtype_of(policy), policy.lora), config


def dtype_of(policy: FromScratch | Pretrained) -> Dtype:
    """Number format of the weights."""
    return policy.dtype


def shaped(config: Any, dtype: str, lora: Lora | None) -> Any:
    """Return a model without memory.

    Args:
        config: Hugging Face's.
        dtype: number format of its weights.
        lora: adapters to put into it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=getattr(torch, dtype))
        if lora is None:
            return model
        adapted = lora.wrap(model)
        for p in adapted.parameters():
            if p.requires_grad:  # PEFT gives adapters the format of their base, but not on this device
                p.data = p.data.to(getattr(torch, dtype))
        return adapted


def config_of(policy: FromScratch | Pretrained) -> Any:
    """Return the configuration of the policy's model. Raises ModelError where it cannot be read."""
    from rlhf.training.policy.model import FromScratch

    if isinstance(policy, FromScratch):
        return _from_scratch_config(policy)
    from transformers import AutoConfig

    refuse_unreachable(policy.path, f"policy.path {policy.path}")
    verify_model(Path(policy.path).expanduser(), weights=False)
    try:
        return AutoConfig.from_pretrained(policy.path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "the model's configuration cannot be read",
            where=f"policy.path {policy.path}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="a folder with config.json, or a name on a reachable hub",
            hint="give the folder of a saved model, or a hub name such as Qwen/Qwen3-0.6B",
        ) from error


def _from_scratch_config(policy: FromScratch) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    kind = Qwen3Config if policy.family == "qwen3" else LlamaConfig
    return kind(
        vocab_size=policy.vocab_size,
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size or 3 * policy.hidden_size,
        num_hidden_layers=policy.n_layers,
        num_attention_heads=policy.n_heads,
        num_key_value_heads=policy.n_kv_heads or policy.n_heads,
        head_dim=policy.head_dim,
        max_position_embeddings=policy.max_context,
        tie_word_embeddings=True,
    )
