"""Variable-length flash attention over packed rows on a GPU, one kernel call per layer.

`VarlenPlan` is to CUDA what `RowPlan` is to a CPU. Queries lie end to end without padding; keys and values of a token
that several rows share are computed once and laid before each of these rows, where the kernel's causal mask, aligned to
the end of keys and queries, has them seen.

`T`, `H`, `G`, `D` are tokens, query heads, key-value heads and head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlhf.device import present
from rlhf.inference.embedded.attention_variant import PLAIN, Variant
from rlhf.inference.embedded.row_layout import Ints, PackedRows, on_device
from rlhf.inference.model_config import ModelConfig, ModelWrapper

#: Widest head of the kernel.
_MAX_HEAD = 256


def takes_varlen(model: nn.Module, device: torch.device) -> bool:
    """True if the varlen kernel supports `model`: Ampere or later, 16 bits, no dropout, caps or sinks, heads to 256."""
    if device.type != "cuda":
        return False
    parameter = next(model.parameters())
    own = ModelWrapper(model)
    config = ModelConfig(own.config).text
    drops = own.inner.training and any(getattr(m, "attention_dropout", None) for m in model.modules())
    fits = config.head_width % 8 == 0 and config.head_width <= _MAX_HEAD
    fits = fits and not config.attn_logit_softcapping and config.model_type != "gpt_oss"
    dtype = getattr(parameter, "computed_in", None) or parameter.dtype  # FSDP's shards are rounded when gathered
    fits = fits and dtype in (torch.bfloat16, torch.float16) and present().has_flash
    return fits and not drops


class VarlenPlan(PackedRows):
    """Block-diagonal causal attention by one call of a variable-length kernel.

    A row shares a beginning with others, so what it computes itself is its end. Arguments are those of `PackedRows`.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu", source: Ints | None = None) -> None:
        super().__init__(lengths, device, source)
        n_own = np.add.reduceat(self._own.astype(np.int64), self._starts)
        asks = n_own > 0  # a row that is the beginning of another computes nothing itself
        self._max_q, self._max_k = int(n_own.max()), int(self.lengths[asks].max())
        #: Keys and values are computed tokens as they lie, unless some are laid out more than once.
        self._is_shared = self.n_computed < self.n_tokens
        self._cu_q = on_device(_cumulated(n_own[asks]), device)
        self._cu_k = on_device(_cumulated(self.lengths[asks]), device) if self._is_shared else self._cu_q
        self._laid = self._first = self._again = self._copies = self._cu_q
        if self._is_shared:
            laid = self._tokens[np.repeat(asks, self.lengths)]
            first, again, copies = _copies(laid, self.n_computed)
            self._laid, self._first = on_device(laid, device), on_device(first, device)
            self._again, self._copies = on_device(again, device), on_device(copies, device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, how: Variant = PLAIN
    ) -> Tensor:
        """Attention within rows; see `AttentionPlan.attend`."""
        from torch.nn.attention.varlen import varlen_attn

        self.is_used = True
        if self._is_shared:
            key, value = (lay_out(x, self._laid, self._first, self._again, self._copies) for x in (key, value))
        found = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self._cu_q,
            self._cu_k,
            self._max_q,
            self._max_k,
            scale=scale,
            window_size=(-1 if how.window is None else how.window - 1, 0),
            enable_gqa=True,
        )
        return cast(Tensor, found)


def _cumulated(lengths: Ints) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _copies(laid: Ints, n_computed: int) -> tuple[Ints, Ints, Ints]:
    """Places of the copies of each token, for the gradient of laying them out.

    Tokens 0 1 2 0 1 3 of 4: the first of each at 0 1 2 5; 0 and 1 lie there again, at 3 and 4, after their first.

    Returns:
        `[n_computed]` place of each token's first copy (0 where nobody reads it); `[M]` tokens that have several, or
        none; `[M, C]` places of the copies of those, and past the last place where there are fewer.
    """
    counts = np.bincount(laid, minlength=n_computed)
    order = np.argsort(laid, kind="stable")
    begins = np.cumsum(counts) - counts
    first = np.where(counts > 0, order[np.minimum(begins, len(laid) - 1)], 0)
    again = np.flatnonzero(counts != 1)
    most = int(counts[again].max(initial=0))
    columns = np.arange(most)
    at = np.minimum(begins[again, None] + columns, len(laid) - 1)
    return first, again, np.where(columns < counts[again, None], order[at], len(laid))


@torch.library.custom_op("rlhf::lay_out", mutates_args={})
def lay_out(x: Tensor, laid: Tensor, first: Tensor, again: Tensor, copies: Tensor) -> Tensor:
    """Gather `x[laid]`, `[n_computed, G, D]` to `[n_read, G, D]`; its gradient adds a token's copies in order.

    Autograd's own gradient of an index adds rows by atomic operations, in 16 bits and in any order.
    """
    return x.index_select(0, laid)


@lay_out.register_fake
def _(x: Tensor, laid: Tensor, first: Tensor, again: Tensor, copies: Tensor) -> Tensor:
    return x.new_empty(laid.shape[0], *x.shape[1:])


@torch.library.custom_op("rlhf::gather_back", mutates_args={})
def gather_back(grad: Tensor, first: Tensor, again: Tensor, copies: Tensor) -> Tensor:
    """Gradient of `lay_out`: the first copy's, and the sum, in float32, of all where there are several."""
    found = grad.index_select(0, first)
    if len(again):
        padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        total = padded.index_select(0, copies.reshape(-1)).view(*copies.shape, *grad.shape[1:])
        found.index_copy_(0, again, total.sum(1, dtype=torch.float32).to(grad.dtype))
    return found


@gather_back.register_fake
def _(grad: Tensor, first: Tensor, again: Tensor, copies: Tensor) -> Tensor:
    return grad.new_empty(first.shape[0], *grad.shape[1:])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return gather_back(grad.contiguous(), *ctx.saved_tensors), None, None, None, None


lay_out.register_autograd(_back, setup_context=_save)
