"""One attention function for trainer and rollout engine: rows of any length side by side, no padding in linear layers.

All tokens of a call lie in one row `[1, T]`. Who attends to whom is said by a plan that travels to every attention
layer in the forward keyword `packed_plan`; gradient checkpointing keeps it. Two plans exist: `RowPlan` here (training:
block-diagonal causal attention over whole rows) and `SlotPlan` in `kv_cache` (rollout: new tokens attend to the cached
prefix of their session). Without a plan the function is transformers' own `sdpa`, so that `model.generate` and plain
calls of a prepared model work as before.

`T`, `H`, `G`, `D` are tokens, query heads, key-value heads and head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf.errors import ModelError

#: Name under which transformers knows the function.
ATTENTION_NAME = "rlhf_packed"

#: Squared tokens of padding that cost as much as one more kernel call; measured on one CPU core, 6 heads of 32.
_CALL_COST = 8192

Ints = npt.NDArray[np.int64]


class AttentionPlan(Protocol):
    """Who attends to whom in one forward pass."""

    n_calls: int
    """Layers that have used the plan; 0 after a forward pass means that the model did not hand it on."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        """Attention of one layer: query `[T, H, D]`, key and value `[T, G, D]`, result `[T, H, D]`."""
        ...


class RowPlan:
    """Block-diagonal causal attention: tokens see the tokens before them in their own row, and no others.

    Rows of similar length share one kernel call. They are padded on the right, where the causal mask alone keeps the
    padding out of every real token, so no mask is stored and memory stays linear in T.

    Args:
        lengths: `[R]` tokens of each row, in order, each at least 1.
        device: where the model runs.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths: Ints = np.asarray(lengths, np.int64)
        if not len(self.lengths) or self.lengths.min() < 1:
            raise ValueError(f"row lengths must be at least 1, got {list(lengths)[:8]}")
        self.n_calls = 0
        starts = np.cumsum(self.lengths) - self.lengths
        self.n_tokens = int(self.lengths.sum())
        self.position_ids = torch.from_numpy(np.arange(self.n_tokens) - np.repeat(starts, self.lengths)).to(device)
        self._groups: list[tuple[int, int, int]] = []  # rows, padded length, first padded token
        gather, inverse = self._layout(starts)
        real = gather >= 0
        self._aligned = bool(real.all()) and bool((inverse == np.arange(self.n_tokens)).all())
        self._gather = torch.from_numpy(np.where(real, gather, 0)).to(device)
        self._inverse = torch.from_numpy(inverse).to(device)
        self._pads = torch.from_numpy(np.flatnonzero(~real)).to(device)

    def _layout(self, starts: Ints) -> tuple[Ints, Ints]:
        """Return padded place -> token (-1 at padding), and token -> padded place."""
        order = np.argsort(-self.lengths, kind="stable")
        gather, inverse, first = [], np.empty(self.n_tokens, np.int64), 0
        for rows in _similar(order, self.lengths):
            width = int(self.lengths[rows[0]])
            offsets = np.arange(width)
            inside = offsets < self.lengths[rows, None]
            tokens = np.where(inside, starts[rows, None] + offsets, -1)
            places = first + np.arange(tokens.size).reshape(tokens.shape)
            inverse[tokens[inside]] = places[inside]
            gather.append(tokens.reshape(-1))
            self._groups.append((len(rows), width, first))
            first += tokens.size
        return np.concatenate(gather), inverse

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        """Attention within rows; see `AttentionPlan.attend`."""
        self.n_calls += 1
        if not self._aligned:
            query, key, value = (_move(x, self._gather, self._inverse, None) for x in (query, key, value))
        outs = []
        for n_rows, width, first in self._groups:
            q, k, v = (
                x[first : first + n_rows * width].view(n_rows, width, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            gqa = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        joined = torch.cat(outs) if len(outs) > 1 else outs[0]
        return joined if self._aligned else _move(joined, self._inverse, self._gather, self._pads)


def _similar(order: Ints, lengths: Ints) -> list[Ints]:
    """Split rows, longest first, wherever padding one more row would cost more than another kernel call."""
    squares = lengths[order] ** 2
    groups, begin = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or squares[begin] - squares[i] > _CALL_COST:
            groups.append(order[begin:i])
            begin = i
    return groups


class _Move(torch.autograd.Function):
    """`x[index]` whose gradient is `grad[back]`, rows `zero` of it cleared.

    Autograd's own gradient of an index adds rows one by one, ten times slower; here each row has one origin.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, zero: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, zero)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back, zero = ctx.saved_tensors
        grad = grads[0].index_select(0, back)
        return (grad if zero is None else grad.index_fill_(0, zero, 0.0)), None, None, None


def _move(x: Tensor, index: Tensor, back: Tensor, zero: Tensor | None) -> Tensor:
    return cast(Tensor, _Move.apply(x, index, back, zero))  # type: ignore[no-untyped-call]


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer, as transformers calls it; query `[1, H, T, D]`, result `[1, T, H, D]`."""
    if packed_plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unknown = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if unknown:
        raise ModelError(
            "this attention variant cannot be packed",
            where=type(module).__name__,
            got=", ".join(unknown),
            expected="plain full attention",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_plan.attend(cast(int, module.layer_idx), q, k, v, scale, dropout)[None], None


AttentionInterface.register(ATTENTION_NAME, _packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def use_packed_attention(model: nn.Module) -> None:
    """Prepare `model` (a transformers causal LM, or a PEFT wrapper of one) for `packed_forward` and the engine.

    Raises:
        ModelError: the model has layers that are not plain full attention, or cannot change its attention.
    """
    wrapper: Any = model
    base = wrapper.get_base_model() if hasattr(model, "get_base_model") else wrapper
    config = base.config
    name = type(base).__name__
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not hasattr(config, "layer_types") and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if kinds != {"full_attention"}:
        raise ModelError(
            "only models whose layers all attend to the whole context are supported",
            where=name,
            got=", ".join(sorted(kinds)),
            expected="full_attention in every layer",
            hint="if the context is shorter than the window, set sliding_window to null in the model's config.json",
        )
    if not getattr(base, "_supports_attention_backend", False):
        raise ModelError(
            "the model does not let its attention be replaced",
            where=name,
            expected="a model class of transformers 5 with _supports_attention_backend, such as Qwen3, Qwen2 or Llama",
        )
    base.set_attn_implementation(ATTENTION_NAME)


def planned_forward(
    model: nn.Module, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, select: Tensor | None
) -> Tensor:
    """Logits `[N, V]` of tokens `[T]` at places `select` `[N]` (None: all) under `plan`.

    Raises:
        ModelError: the model was not prepared, or drops the plan on the way to its attention layers.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation != ATTENTION_NAME:
        raise ModelError(
            "the model is not prepared for packed rows",
            where=type(model).__name__,
            got=f"attention {implementation!r}",
            expected=repr(ATTENTION_NAME),
            hint="call use_packed_attention(model) once after loading",
        )
    output = model(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        # A mask of four dimensions is taken as finished, which spares the model from building one of [T, T].
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
        use_cache=False,
        logits_to_keep=0 if select is None else select,
        packed_plan=plan,
    )
    if not plan.n_calls:
        raise ModelError(
            "the model does not hand keyword arguments on to its attention layers, so rows would see each other",
            where=type(model).__name__,
            expected="a model class of transformers 5 that passes **kwargs through, such as Qwen3, Qwen2 or Llama",
        )
    return cast(Tensor, output.logits[0])


def packed_forward(model: nn.Module, token_ids: Tensor, lengths: Sequence[int], select: Tensor | None = None) -> Tensor:
    """Logits of rows laid end to end; differentiable, and never larger than what is selected.

    Args:
        model: prepared by `use_packed_attention`.
        token_ids: int64 `[T]`, all rows one after the other.
        lengths: `[R]` tokens of each row; they sum to T.
        select: int64 `[N]` places in `[0, T)` whose logits are wanted; None for all.

    Returns:
        `[N, V]` in the model's dtype; row i predicts the token after place `select[i]`.

    Raises:
        ValueError: `lengths` do not sum to T.
        ModelError: see `planned_forward`.
    """
    plan = RowPlan(lengths, token_ids.device)
    if token_ids.ndim != 1 or plan.n_tokens != len(token_ids):
        raise ValueError(f"token_ids must be [T] with T = sum(lengths), got {list(token_ids.shape)}, {plan.n_tokens}")
    return planned_forward(model, token_ids, plan.position_ids, plan, select)
