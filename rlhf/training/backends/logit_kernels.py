"""Triton kernels over logits: one-pass token statistics, and their gradient.

Logits `[n, V]` are in any number format; all arithmetic is float32. With z the logits over the temperature and p their
softmax, the statistics `[n, 4]` are log p_y, log Σ exp z, the entropy −Σ p log p, and the mean of log p.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits, targets, found, n_vocab, stride, scale, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    most = float("-inf")
    total = 0.0  # Σ exp(z − most)
    weighted = 0.0  # Σ exp(z − most) z
    plain = 0.0  # Σ z
    for begin in range(0, n_vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < n_vocab
        z = tl.load(base + at, mask=inside, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(most, tl.max(z, 0))
        shrink = tl.exp(most - higher)
        e = tl.exp(z - higher)
        total = total * shrink + tl.sum(e, 0)
        if WITH_SUMS:
            real = tl.where(inside, z, 0.0)
            weighted = weighted * shrink + tl.sum(e * real, 0)
            plain += tl.sum(real, 0)
        most = higher
    log_sum = most + tl.log(total)
    chosen = tl.load(base + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(found + row * 4, chosen - log_sum)
    tl.store(found + row * 4 + 1, log_sum)
    tl.store(found + row * 4 + 2, log_sum - weighted / total if WITH_SUMS else 0.0)
    tl.store(found + row * 4 + 3, plain / n_vocab - log_sum if WITH_SUMS else 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    logits, targets, found, grads, n_vocab, stride, scale, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_vocab
    place = logits + row * stride + at
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
    log_p = z - tl.load(found + row * 4 + 1)
    by_chosen = tl.load(grads + row * 4) * scale
    factor = tl.load(grads + row * 4 + 1) * scale - by_chosen
    if WITH_ENTROPY:
        factor = factor - tl.load(grads + row * 4 + 2) * scale * (log_p + tl.load(found + row * 4 + 2))
    by_z = tl.exp(log_p) * factor
    by_z = tl.where(at == tl.load(targets + row), by_z + by_chosen, by_z)
    tl.store(place, by_z.to(logits.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, targets: Tensor, temperature: float, *, sums: bool, out: Tensor) -> None:
    """Write the statistics of `logits` `[n, V]` at `targets` `[n]` into `out` float32 `[n, 4]`.

    Args:
        logits: rows without gaps.
        targets: int64, the chosen tokens.
        temperature: that logits are divided by.
        sums: whether entropy and mean are wanted; 0 else.
        out: rows without gaps.
    """
    _launch(_statistics, (len(logits),), logits, targets, out, temperature, WITH_SUMS=sums)


def gradients_(
    logits: Tensor, targets: Tensor, found: Tensor, grads: Tensor, temperature: float, *, entropy: bool
) -> Tensor:
    """Put the gradient of Σ `grads` · statistics in the place of the logits, and return it.

    Args:
        logits: `[n, V]`, lost.
        targets: as `statistics` had them.
        found: float32 `[n, 4]`, what that wrote.
        grads: float32 `[n, 4]`, by each of them; that by the mean is passed over.
        temperature: as there.
        entropy: whether the third column of `grads` counts.
    """
    blocks = (len(logits), triton.cdiv(logits.shape[1], _BLOCK))
    _launch(_gradients, blocks, logits, targets, found, temperature, grads.contiguous(), WITH_ENTROPY=entropy)
    return logits


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    logits: Tensor,
    targets: Tensor,
    found: Tensor,
    temperature: float,
    *more: Tensor,
    **flags: bool,
) -> None:
    if not len(logits):
        return
    if logits.stride(1) != 1 or not targets.is_contiguous() or not found.is_contiguous():
        raise ValueError("logits, targets and statistics must be contiguous")
    sizes = (logits.shape[1], logits.stride(0), 1.0 / temperature)
    with torch.cuda.device(logits.device) if logits.is_cuda else torch.no_grad():
        kernel[grid](logits, targets, found, *more, *sizes, **flags, BLOCK=_BLOCK, num_warps=8)
