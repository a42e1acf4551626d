"""Models of others' making: a probe of untested architectures, and no dropout."""

from __future__ import annotations

import torch
from torch import nn

from rlhf.errors import ModelError, RlhfError
from rlhf.inference.embedded.attention import ATTENTION_NAME, packed_forward
from rlhf.inference.model_config import ModelConfig, ModelWrapper

#: Families that `tests/training/test_architectures.py` trains and samples from, or that differ in names alone.
TESTED = frozenset(
    {
        "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite",
        "granitemoe", "llama", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
    }
)  # fmt: skip
#: Largest difference of a log-prob, in nats: by rounding in 32 and in 16 bits.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16 = 0.25


def is_tested(model: nn.Module) -> bool:
    """True if the model is of a tested family, which `check_rows` need not probe."""
    return ModelConfig(ModelWrapper(model).base.config).model_type in TESTED


@torch.no_grad()
def check_rows(model: nn.Module) -> None:
    """Compare two packed rows with plain forward passes, for untested model families.

    Raises:
        ModelError: they differ: something beside attention mixes tokens, or positions are not those given.
    """
    base = ModelWrapper(model).base
    name = ModelConfig(base.config).model_type
    first = next(base.parameters())
    if is_tested(model) or first.is_meta:
        return
    n_vocab = int(base.get_input_embeddings().num_embeddings)
    rows = [torch.arange(1, n + 1) * 7 % n_vocab for n in (12, 7)]
    was_training = base.training
    base.eval()
    try:
        packed = packed_forward(model, torch.cat(rows), [len(row) for row in rows]).float().log_softmax(-1)
        base.set_attn_implementation("eager")
        alone = [base(input_ids=row[None].to(first.device), use_cache=False).logits[0] for row in rows]
        apart = float((torch.cat(alone).float().log_softmax(-1) - packed).abs().max())
    except RlhfError:
        raise
    except Exception as error:  # of whatever a model raises that takes other arguments
        raise _unfit(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    finally:
        base.set_attn_implementation(ATTENTION_NAME)
        base.train(was_training)
    bound = _TOLERANCE.get(first.dtype, _TOLERANCE_16)
    if not apart <= bound:
        raise _unfit(name, f"log-probs that differ by {apart:.3g} nats")


def without_dropout(model: nn.Module) -> None:
    """Disable the model's dropout, so that trained log-probs equal sampled ones."""
    for module, name in _dropouts(model):
        setattr(module, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """True if a module drops out in training mode, as adapters may."""
    return bool(_dropouts(model))


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules with a dropout rate above 0, and the attribute that holds it."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and (name == "p" if isinstance(module, nn.Dropout) else "drop" in name)
    ]


def _unfit(name: str, got: str) -> ModelError:
    return ModelError(
        "packed rows of this model differ from single rows",
        where=f"a model of type {name}",
        got=got,
        expected="the same log-probs: causal attention, and position ids as given",
        hint=f"use a model of a tested family: {', '.join(sorted(TESTED))}",
    )
