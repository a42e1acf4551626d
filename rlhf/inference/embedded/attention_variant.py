"""Attention that is not plain: sliding windows, capped scores, sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """Deviations of a layer from plain causal attention.

    Attributes:
        window: tokens that a token sees, itself included; None for all before it.
        cap: scores s become cap · tanh(s / cap), as in Gemma 2; None leaves them.
        sinks: `[H]`, one more score for each head, to which no value belongs, as in GPT-OSS; None for none.
    """

    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_fused(self) -> bool:
        """True if torch's fused kernel computes it, with a mask for the window."""
        return self.cap is None and self.sinks is None


PLAIN = Variant()


def band(width: int, window: int, device: torch.device) -> Tensor:
    """Causal sliding-window mask, bool `[width, width]`: token i sees j where i - window < j <= i.

    3 tokens, window 2: token 2 sees 1 and 2.
    """
    ones = torch.ones(width, width, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def weights(scores: Tensor, mask: Tensor, variant: Variant, sinks: Tensor | None) -> Tensor:
    """Attention weights of scaled scores `[..., M, L]`.

    Args:
        scores: scaled, without mask.
        mask: 0 where a query sees a key, -inf elsewhere; broadcast against the scores.
        variant: whose cap is used.
        sinks: `[..., M, 1]` or broadcast against it; they take a share of the weights and give none of it to a key.
    """
    if variant.cap is not None:
        scores = variant.cap * torch.tanh(scores / variant.cap)
    scores = scores + mask
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, variant: Variant, scale: float, dropout: float
) -> Tensor:
    """Attention of rows of one length by plain matrix products.

    Args:
        q: `[R, H, L, D]`.
        k: `[R, G, L, D]`.
        v: likewise.
        seen: bool `[L, L]`, which tokens each token attends to.
        variant: with a cap or sinks.
        scale: of the scores.
        dropout: share of the weights that is dropped.

    Returns:
        `[R, H, L, D]`.
    """
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    sinks = None if variant.sinks is None else variant.sinks.view(1, -1, 1, 1)
    found = weights(q @ k.transpose(-1, -2) * scale, mask, variant, sinks)
    return torch.nn.functional.dropout(found, dropout) @ v
