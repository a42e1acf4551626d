"""Attention shared by trainer and rollout engine, over packed rows without padding.

All tokens of a call lie in one row `[1, T]`. Who attends to whom is said by a plan that travels to every attention
layer in the forward keyword `packed_plan`; gradient checkpointing keeps it. Two plans exist: `RowPlan` here (training:
block-diagonal causal attention over whole rows) and `SlotPlan` in `kv_cache` (rollout: new tokens attend to the cached
prefix of their session). Without a plan the function is transformers' own `sdpa`, so that `model.generate` and plain
calls of a prepared model work as before.

`T`, `H`, `G`, `D` are tokens, query heads, key-value heads and head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.errors import ModelError
from rlhf.inference.embedded.attention_variant import PLAIN, Variant, attend_by_products, band
from rlhf.inference.embedded.expert_routing import ExpertRouting
from rlhf.inference.embedded.row_layout import Ints, PackedRows, on_device, runs, similar
from rlhf.inference.embedded.varlen import VarlenPlan, takes_varlen
from rlhf.inference.model_config import ModelConfig, ModelWrapper
from rlhf.inference.role_adapters import number_of, role_adapters

#: Name under which transformers knows the function.
ATTENTION_NAME = "rlhf_packed"

#: Layers that can be packed.
_KINDS = frozenset({"full_attention", "sliding_attention"})

#: Tokens that rows must have in common, from their first on, to share them.
SHORTEST_SHARED = 16


class AttentionPlan(Protocol):
    """Attention mask of one forward pass."""

    is_used: bool
    """True once a layer has asked; if none has after a forward pass, the model ignored the plan."""
    by_layer: bool
    """True if it needs the layer's number; compiled layers share one program where it does not."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, how: Variant = PLAIN
    ) -> Tensor:
        """Attention of a layer: query `[T, H, D]`, key and value `[T, G, D]`, result `[T, H, D]`."""


class RowPlan(PackedRows):
    """Block-diagonal causal attention: tokens see the tokens before them in their own row, and no others.

    Rows of similar length share one kernel call. They are padded on the right, where the causal mask alone keeps the
    padding out of every real token, so no mask is stored and memory stays linear in T.

    A token that several rows share is computed once: it stands in the padded layout of each of these rows, for the
    kernel call alone, and its gradient is the sum of what they say. What the others compute of it is dropped.

    Arguments are those of `PackedRows`.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu", source: Ints | None = None) -> None:
        super().__init__(lengths, device, source)
        self._groups: list[tuple[int, int]] = []  # rows, padded length
        self._masks: dict[tuple[int, int], Tensor] = {}  # by padded length and window, for all layers of the pass
        at, inverse = self._layout(self._starts)
        real = at >= 0
        shared = np.flatnonzero(real & ~self._own[at])
        self._shared = runs(shared, self._tokens[at[shared]])
        self._aligned = bool(real.all()) and bool((inverse == self._places).all()) and not len(shared)
        self._gather = on_device(np.where(real, self._tokens[at], 0), device)
        self._inverse = on_device(inverse[self._own], device)
        self._dropped = on_device(np.flatnonzero(~(real & self._own[at])), device)

    def _layout(self, starts: Ints) -> tuple[Ints, Ints]:
        """Return padded place -> place (-1 at padding), and place -> padded place."""
        order = np.argsort(-self.lengths, kind="stable")
        gather, inverse, first = [], np.empty(self.n_tokens, np.int64), 0
        for rows in similar(order, self.lengths):
            width = int(self.lengths[rows[0]])
            offsets = np.arange(width)
            inside = offsets < self.lengths[rows, None]
            tokens = np.where(inside, starts[rows, None] + offsets, -1)
            places = first + np.arange(tokens.size).reshape(tokens.shape)
            inverse[tokens[inside]] = places[inside]
            gather.append(tokens.reshape(-1))
            self._groups.append((len(rows), width))
            first += tokens.size
        return np.concatenate(gather), inverse

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, how: Variant = PLAIN
    ) -> Tensor:
        """Attention within rows; see `AttentionPlan.attend`."""
        self.is_used = True
        if not self._aligned:
            query = _move(query, self._gather, self._inverse)
            key, value = (_move(x, self._gather, self._inverse, shared=self._shared) for x in (key, value))
        # Split at once: the gradient of a slice would be a tensor of its own, as large as the whole.
        sizes = [n_rows * width for n_rows, width in self._groups]
        outs = []
        for (n_rows, width), *parts in zip(
            self._groups, *(torch.split(x, sizes) for x in (query, key, value)), strict=True
        ):
            q, k, v = (x.view(n_rows, width, *x.shape[1:]).transpose(1, 2) for x in parts)
            mask = self._mask(width, how, q.device)
            outs.append(_attend_rows(q, k, v, mask, how, scale, dropout).transpose(1, 2).flatten(0, 1))
        joined = torch.cat(outs) if len(outs) > 1 else outs[0]
        return joined if self._aligned else _move(joined, self._inverse, self._gather, zero=self._dropped)

    def _mask(self, width: int, how: Variant, device: torch.device) -> Tensor | None:
        """Mask of equal-length rows, `[width, width]`; None where the kernel masks causally itself."""
        window = min(how.window or width, width)
        if how.is_fused and window == width:
            return None
        if (width, window) not in self._masks:
            self._masks[width, window] = band(width, window, device)
        return self._masks[width, window]


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Variant, scale: float, dropout: float
) -> Tensor:
    """Causal attention of equal-length rows: q `[R, H, L, D]`, k and v `[R, G, L, D]`."""
    if mask is not None and not how.is_fused:
        return attend_by_products(q, k, v, mask, how, scale, dropout)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )


def shared_prefixes(token_ids: Ints, lengths: Ints) -> Ints:
    """Index of the computed token for each place of the rows end to end, `[T]`: its own, or an equal one's.

    Rows that begin alike share those tokens, if they are at least `SHORTEST_SHARED`: under causal attention what is
    computed of them is the same. In the order of a dictionary it is a row's neighbour that has most in common with it.

    Rows 1 2 3 4, 7 and 1 2 3 5 6, where 2 tokens are enough: 0 1 2 3, 4, 0 1 2 8 9.
    """
    source, starts = np.arange(len(token_ids)), np.cumsum(lengths) - lengths
    rows = [token_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    order = sorted(range(len(rows)), key=lambda r: rows[r].astype(">i8").tobytes())
    for before, row in pairwise(order):
        n = min(len(rows[before]), len(rows[row]))
        differing = np.flatnonzero(rows[before][:n] != rows[row][:n])
        n = int(differing[0]) if len(differing) else n
        if n >= SHORTEST_SHARED:
            source[starts[row] : starts[row] + n] = source[starts[before] : starts[before] + n]
    return source


class _Move(torch.autograd.Function):
    """`x[index]` whose gradient is `grad[back]`, rows `zero` of it cleared, and the runs `shared` of `grad` added.

    Autograd's own gradient of an index adds rows one by one, ten times slower; here most rows have one origin.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, back: Tensor, zero: Tensor | None, shared: Sequence[tuple[int, int, int]]
    ) -> Tensor:
        ctx.save_for_backward(back, zero)
        ctx.shared = shared
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        back, zero = ctx.saved_tensors
        grad = grads[0].index_select(0, back)
        if zero is not None:
            grad.index_fill_(0, zero, 0.0)
        for place, token, n in ctx.shared:
            grad[token : token + n] += grads[0][place : place + n]
        return grad, None, None, None, None


def _move(
    x: Tensor,
    index: Tensor,
    back: Tensor,
    *,
    zero: Tensor | None = None,
    shared: Sequence[tuple[int, int, int]] = (),
) -> Tensor:
    return cast(Tensor, _Move.apply(x, index, back, zero, shared))  # type: ignore[no-untyped-call]


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
    """Attention of a layer, as transformers calls it; query `[1, H, T, D]`, result `[1, T, H, D]`."""
    if packed_plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    asked = [kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux")]
    how = PLAIN if asked == [None] * 3 else Variant(*asked)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = cast(int, module.layer_idx) if packed_plan.by_layer else 0
    return packed_plan.attend(layer, q, k, v, scale, dropout, how)[None], None


def _make_known() -> None:
    """Register the attention function with transformers, lazily, as a recipe needs no model code."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def use_packed_attention(model: nn.Module) -> None:
    """Prepare `model` (a transformers causal LM, or a PEFT wrapper of one) for `packed_forward` and the engine.

    Raises:
        ModelError: the model has layers that are not plain full attention, or cannot change its attention.
    """
    base = ModelWrapper(model).base
    config = ModelConfig(base.config)
    name = type(base).__name__
    kinds = set(config.layer_types or ["full_attention"]) - _KINDS
    if kinds:
        raise ModelError(
            "this model mixes tokens outside of attention layers, so packed rows would not be independent",
            where=name,
            got=", ".join(sorted(kinds)),
            expected=" or ".join(sorted(_KINDS)),
            hint="use a model with attention layers only; docs/models.md lists the tested ones",
        )
    if not ModelWrapper(base).takes_attention:
        raise ModelError(
            "the model does not allow its attention to be replaced",
            where=name,
            expected="a model class of transformers 5 with _supports_attention_backend, such as Qwen3, Qwen2 or Llama",
        )
    _make_known()
    base.set_attn_implementation(ATTENTION_NAME)


def check_context(config: Any, max_context: int, where: str = "max_context") -> None:
    """Raise ModelError, said of `where`, where rows of `max_context` tokens cannot be packed with others.

    Longrope has short factors and long ones, and the longest row of a call chooses for all.
    """
    found = ModelConfig(config).text
    positions, short = found.max_position_embeddings, found.max_short_positions
    if positions is not None and max_context > positions:
        raise ModelError(
            "the context is longer than the model supports",
            where=where,
            got=str(max_context),
            expected=f"at most {positions}",
            hint="lower max_context, or use a model with more max_position_embeddings",
        )
    if short is not None and max_context > short:
        raise ModelError(
            "a longer row would change the positions of all rows beside it, as the model's rope_type is longrope",
            where=where,
            got=str(max_context),
            expected=f"at most {short}, original_max_position_embeddings of its configuration",
            hint=f"set limits.max_context: {short}, or use a model with other positions",
        )


def planned_forward(
    model: nn.Module,
    token_ids: Tensor,
    position_ids: Tensor,
    plan: AttentionPlan,
    select: Tensor | None,
    adapters: Ints | None = None,
) -> Tensor:
    """Logits `[N, V]` of tokens `[T]` at places `select` `[N]` (None: all) under `plan`.

    Where roles have adapters of their own, `adapters` are their numbers, `[T]`; None: the shared one reads all.

    Raises:
        ModelError: the model was not prepared, or drops the plan on the way to its attention layers.
    """
    implementation = ModelConfig(ModelWrapper(model).config).attention
    if implementation != ATTENTION_NAME:
        raise ModelError(
            "the model is not prepared for packed rows",
            where=type(model).__name__,
            got=f"attention {implementation!r}",
            expected=repr(ATTENTION_NAME),
            hint="call use_packed_attention(model) once after loading",
        )
    routed = role_adapters(model)
    if routed is not None:
        routed.say(adapters, token_ids.device)
    output = model(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        # A mask of four dimensions is taken as finished, which spares the model from building one of [T, T].
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
        use_cache=False,
        logits_to_keep=0 if select is None else select,
        packed_plan=plan,
    )
    if not plan.is_used:
        raise ModelError(
            "the model does not pass keyword arguments to its attention layers, so packed rows would interact",
            where=type(model).__name__,
            expected="a model class of transformers 5 that passes **kwargs through, such as Qwen3, Qwen2 or Llama",
        )
    return cast(Tensor, output.logits[0])


def packed_forward(
    model: nn.Module,
    token_ids: Tensor,
    lengths: Sequence[int],
    select: Tensor | None = None,
    adapters: Sequence[str] | None = None,
    device: torch.device | None = None,
    routing: ExpertRouting | None = None,
) -> Tensor:
    """Logits of rows laid end to end; differentiable, and never larger than what is selected.

    What rows have in common from their first token on, such as the prompt of a group, is computed once. Values and
    gradients are those of separate rows but for rounding; dropout, where there is any, drops the same for all of them.

    Args:
        model: prepared by `use_packed_attention`.
        token_ids: int64 `[T]`, all rows one after the other; best on the CPU, where they are compared.
        lengths: `[R]` tokens of each row; they sum to T.
        select: int64 `[N]` places in `[0, T)` whose logits are wanted; None for all.
        adapters: `[R]` which role's adapter reads each row, empty for the shared one; None: that one reads all.
        device: where the model runs; None is where its first parameter lies.
        routing: records or says which experts the tokens meet; None leaves that to the model.

    Returns:
        `[N, V]` in the model's dtype; row i predicts the token after place `select[i]`.

    Raises:
        ValueError: `lengths` do not sum to T.
        ModelError: see `planned_forward`.
        EngineError: the model has no adapter of a role.
    """
    if token_ids.ndim != 1 or sum(lengths) != len(token_ids):
        raise ValueError(f"token_ids must be [T] with T = sum(lengths), got {list(token_ids.shape)}, {sum(lengths)}")
    device = next(model.parameters()).device if device is None else device
    # Tensors without memory have no ids to compare: nothing is shared, which is the most that there can be to compute.
    if token_ids.is_meta:
        bare = RowPlan(lengths, token_ids.device)
        return planned_forward(model, token_ids, bare.position_ids, bare, select)
    rows = plan_rows(model, token_ids, lengths, select, adapters, device)
    ids = on_device(rows.token_ids, device)
    if routing is not None:
        routing.begin(rows.plan, rows.select)
    return planned_forward(model, ids, rows.plan.position_ids, rows.plan, rows.select, rows.adapters)


class PlannedRows(NamedTuple):
    """Tokens and attention plan of a pass over rows.

    Attributes:
        token_ids: `[n_computed]`, of the tokens that are computed.
        plan: for attention.
        select: `[N]` which of them are read, on the model's device; None for all.
        adapters: `[n_computed]` number of the adapter that reads each; None where one reads all.
    """

    token_ids: Ints
    plan: RowPlan | VarlenPlan
    select: Tensor | None
    adapters: Ints | None


def plan_rows(
    model: nn.Module,
    token_ids: Tensor,
    lengths: Sequence[int],
    select: Tensor | None,
    adapters: Sequence[str] | None,
    device: torch.device,
) -> PlannedRows:
    """Plan a pass over rows that shares what they begin with; arguments are those of `packed_forward`."""
    numbers = _numbers(model, lengths, adapters)
    ids = token_ids.cpu().numpy()
    # One text read by two adapters is no common beginning.
    source = shared_prefixes(ids if numbers is None else ids + (numbers << 32), np.asarray(lengths, np.int64))
    plan = (VarlenPlan if takes_varlen(model, device) else RowPlan)(lengths, device, source)
    kept = source == np.arange(len(source))
    if select is not None:
        select = on_device(select.numpy(), device) if select.device.type == "cpu" else select.to(device)
        select = select if kept.all() else plan.token_of[select]
    elif not kept.all():
        select = plan.token_of
    return PlannedRows(ids[kept], plan, select, None if numbers is None else numbers[kept])


def _numbers(model: nn.Module, lengths: Sequence[int], adapters: Sequence[str] | None) -> Ints | None:
    """Adapter number of each token, `[T]`; None where a single adapter reads all."""
    if adapters is None or not any(adapters):
        return None
    numbers = [number_of(model, name, "packed_forward, adapters") for name in adapters]
    return np.repeat(np.asarray(numbers, np.int64), lengths)
