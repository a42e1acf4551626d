"""Peak memory of a forward and backward pass, found on tensors without storage.

The trainer's own code runs on torch's `meta` device, where a tensor has a shape and nothing else, over a model of the
policy's widths with a few of its layers. What is alive at a time is added up from the sizes of the storages; layers are
alike, so those that are left out are added by the difference that one makes. Nothing is guessed about which tensors
autograd keeps, and neither weights nor memory are needed.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.inference.model_config import ModelConfig, ModelWrapper
from rlhf.training.backends.compiled import recomputed_layers

#: Layers of the two passes whose difference is one layer.
_FEW = (2, 3)


@dataclass(frozen=True)
class Pass:
    """A micro-batch to go through.

    Attributes:
        n_tokens: in all rows.
        n_sampled: of them, at whose places logits are read.
        wanted: figures of `rlhf.training.backends.token_stats` that the loss asks for.
        with_reference: whether a frozen model reads the same rows before the backward pass.
        recomputes: whether activations are computed again in the backward pass, or for what share of the layers.
        n_per_row: processes that share it.
    """

    n_tokens: int
    n_sampled: int
    wanted: frozenset[Any] = frozenset()
    with_reference: bool = False
    recomputes: bool | float = False
    n_per_row: int = 1


def peak_bytes(config: Any, model_of: Callable[[Any], Any], asked: Pass) -> int | None:
    """Peak bytes of a pass beside weights and gradients; None where the model cannot be run so.

    Args:
        config: of the model, Hugging Face's.
        model_of: makes a model on the `meta` device, adapters included, from a configuration.
        asked: the micro-batch.
    """
    n_layers = int(config.get_text_config().num_hidden_layers)
    try:
        if n_layers <= _FEW[1]:
            return _peak(model_of(config), asked)
        if not isinstance(asked.recomputes, bool):
            return _partly(config, model_of, asked, n_layers)
        few, more = (_peak(model_of(_with_layers(config, n)), asked) for n in _FEW)
    except Exception:  # models whose shapes hang on values, such as a choice of experts, raise what they like
        return None
    return few + (n_layers - _FEW[0]) * (more - few)


def _partly(config: Any, model_of: Callable[[Any], Any], asked: Pass, n_layers: int) -> int | None:
    """Peak where a share of the layers computes activations again; the others add what one keeps beyond that."""
    n_kept = n_layers - sum(recomputed_layers(n_layers, asked.recomputes))
    least, most = (peak_bytes(config, model_of, replace(asked, recomputes=again)) for again in (True, False))
    return None if least is None or most is None else least + n_kept * (most - least) // n_layers


def _with_layers(config: Any, n: int) -> Any:
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    text.num_hidden_layers = n
    if layers := ModelConfig(text).layer_types:
        text.layer_types = list(layers)[:n]
    return cut


def _peak(model: Any, asked: Pass) -> int:
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.sequence_parallel import SequenceGroup
    from rlhf.training.backends.torch import TorchTrainer
    from rlhf.training.policy.model import Policy

    policy = Policy.of(model, None, None)
    policy.is_lora = ModelWrapper(model).is_adapted
    shared = SequenceGroup(asked.n_per_row, 0) if asked.n_per_row > 1 else None
    trainer = TorchTrainer(policy, AdamW(), 1, recomputes=asked.recomputes, sequence=shared)
    for parameter in model.parameters():
        if parameter.requires_grad:  # the gradients of an earlier micro-batch, to which those of this one are added
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    held = {p.untyped_storage()._cdata for p in model.parameters()}
    held |= {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
    held |= {b.untyped_storage()._cdata for b in model.buffers()}
    batch = _batch(asked.n_tokens, asked.n_sampled)
    model.train()
    _fuse(model)
    with _Alive(held) as alive:
        reading = trainer.read(model, batch, asked.wanted, temperature=1.0)
        if asked.with_reference:
            with torch.no_grad():
                trainer.read(model, batch, asked.wanted & {"log_normalizers"}, temperature=1.0)
        loss = -reading.logprobs.sum()
        if reading.entropy is not None:
            loss = loss - reading.entropy.sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return int(alive.most)


def _batch(n_tokens: int, n_sampled: int) -> Any:
    """Micro-batch of three rows of different lengths; the last tokens of it are sampled."""
    from rlhf.batching.pack import collate
    from rlhf.batching.samples import Sample

    cuts = np.array([0, n_tokens // 2, n_tokens // 2 + n_tokens // 3, n_tokens])
    rows = []
    for number, length in enumerate(np.diff(cuts).tolist()):
        if length < 2:
            continue
        mask = np.zeros(length, np.bool_)
        mask[-min(max(n_sampled * length // n_tokens, 1), length - 1) :] = True
        nothing = np.zeros(length, np.float32)
        ids = np.full(length, number, np.int64)  # what rows begin with in common is computed once: these have nothing
        rows.append(Sample(ids, mask, nothing, nothing, number, 0))
    return collate(rows, np.ones(len(rows)))


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the live storages that operations inside have allocated.

    Args:
        known: storages that do not count.
    """

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._alive = set(known), dict[int, Any]()
        self._now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.allclose.default:  # values that there are none of
            return True
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return found

    def _see(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self._now -= n_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self._now += n_bytes
        self.most = max(self.most, self._now)


def _fuse(model: Any) -> None:
    """Have the layers of attention, whose plans hear of `layer_idx`, keep what fused kernels keep.

    Each layer enters the mode by itself: a backward pass that computes a layer again does so outside of any other.
    """
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            mode = _Fused()
            module.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
            module.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None), always_call=True)


class _Fused(TorchFunctionMode):
    """Stand-in for fused attention, which keeps inputs and output and no score matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Shapes of attention `[R, H, T, D]` and of its gradients."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Fused kernels give [R, T, H, D] in memory.
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
