"""Output layer and cross-entropy in one autograd node, on a GPU: log-probs and statistics without float32 logits.

Logits stay in the format of the weights and become their own gradient in place. Where all of a pass are few they are
kept for its backward pass, and the gradient of the weights is one product; else a piece of the tokens after the other
is computed again there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf.device import present

#: Bytes of logits that exist at a time, where not all are kept.
PIECE_BYTES = 2**30

#: Share of the device's memory that logits may take until the backward pass.
KEPT_SHARE = 0.05


def held_bytes(n_tokens: int, row_bytes: int, all_of_gpu: int) -> int:
    """Bytes of logits, `row_bytes` a token, that a pass over `n_tokens` holds at a time on a GPU with that memory."""
    return min(n_tokens, rows_at_a_time(n_tokens, row_bytes, all_of_gpu)) * row_bytes


def rows_at_a_time(n_tokens: int, row_bytes: int, all_of_gpu: int) -> int:
    """Tokens whose logits exist at a time: all where they are few enough to keep, else those of a piece."""
    if n_tokens * row_bytes <= KEPT_SHARE * all_of_gpu:
        return max(n_tokens, 1)
    return max(PIECE_BYTES // row_bytes, 1)


def has_kernels(device: torch.device) -> bool:
    """True if a device has the kernels: CUDA with Triton."""
    return device.type == "cuda" and find_spec("triton") is not None and present().has_triton


class FusedHead(torch.autograd.Function):
    """Statistics `[N, 4]` of tokens from hidden states `[N, H]` and an output layer `[V, H]`.

    Columns and gradients are those of `rlhf.training.backends.token_stats`; log-softmax and its sums are float32,
    logits and their
    gradient have the format of the weights, and matrix products add up in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, wanted: Collection[str]
    ) -> Tensor:
        """Statistics `[N, 4]`, float32."""
        from rlhf.training.backends.logit_kernels import statistics

        ctx.size = rows_at_a_time(len(hidden), hidden.element_size() * len(weight), _memory(hidden.device))
        ctx.temperature, ctx.has_entropy = temperature, "entropy" in wanted
        columns = hidden.new_zeros(len(hidden), 4, dtype=torch.float32)
        sums = bool({"entropy", "mean_logprobs"} & set(wanted))
        logits = None
        for piece in pieces(len(hidden), ctx.size):
            logits = nn.functional.linear(hidden[piece], weight)
            statistics(logits, targets[piece], temperature, sums=sums, out=columns[piece])
        ctx.save_for_backward(hidden, weight, targets, columns)
        ctx.kept = logits if len(hidden) <= ctx.size and any(ctx.needs_input_grad) else None
        return columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients by hidden states and weights, in their formats."""
        from rlhf.training.backends.logit_kernels import gradients_

        hidden, weight, targets, columns = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        kept, ctx.kept = ctx.kept, None  # its memory becomes the gradient's; a second pass computes it again
        is_one = len(hidden) <= ctx.size  # the product is then rounded once anyway
        by_weight = torch.zeros_like(weight, dtype=None if is_one else torch.float32) if wants_weight else None
        for piece in pieces(len(hidden), ctx.size):
            logits = nn.functional.linear(hidden[piece], weight) if kept is None else kept
            by_logits = gradients_(
                logits, targets[piece], columns[piece], grads[0][piece], ctx.temperature, entropy=ctx.has_entropy
            )
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[piece])
            if by_weight is not None:
                add_product(by_weight, by_logits.T, hidden[piece])
        return by_hidden, None if by_weight is None else by_weight.to(weight.dtype), None, None, None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to a total of at least its precision, without rounding the product."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 2**33


def pieces(n: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover n, the last one as long as is left."""
    return (slice(begin, begin + size) for begin in range(0, n, max(size, 1)))
