"""Per-token log-probs and distribution statistics of a forward pass, computed in chunks.

The logits of N tokens over a vocabulary of V are the largest array of a training step, and with what autograd keeps of
them in float32 there are several. `read` has the output layer itself give the figures, a piece of the tokens after the
other: no more than `PIECE` logits exist at a time, and the backward pass computes those of a piece again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf.training.backends.fused_head import FusedHead, add_product, has_kernels, pieces
from rlhf.training.policy.lora import causal_of

#: Figures that cost a sum over the vocabulary each, so they are asked for by name.
Figure = Literal["entropy", "log_normalizers", "mean_logprobs"]

#: Logits that exist at a time: 64 MB in float32. Where all of a pass are no more, they are kept for its backward pass.
PIECE = 2**24

#: Output layers whose result the model changes before it returns it, and those that are known to be left alone.
_changed: WeakSet[nn.Module] = WeakSet()
_plain: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Of the policy tokens, `[N]`, in nats; None where it was not asked for.

    Attributes:
        logprobs: of the tokens; carries the gradient.
        entropy: of the distributions that they are drawn from; carries the gradient.
        log_normalizers: log Σ exp of the logits over the temperature; carries the gradient.
        mean_logprobs: mean of the log-probs over the vocabulary, without gradient.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    log_normalizers: Tensor | None = None
    mean_logprobs: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, temperature: float, wanted: Collection[Figure]) -> TokenStats:
        """Read logits `[N, V]` at the policy tokens, `targets` `[N]`.

        Logits of 1, 0 and 0, the first token chosen, temperature 1: log-normaliser ln(e + 2) = 1.551445, log-prob
        −.551445, mean log-prob −1.218111.
        """
        scaled = logits.float() / temperature
        log_p = torch.log_softmax(scaled, dim=-1)
        at = targets[:, None]
        chosen = log_p.gather(-1, at).squeeze(-1)
        return cls(
            chosen,
            -(log_p.exp() * log_p).sum(-1) if "entropy" in wanted else None,
            # log π = logit − log Σ exp; no second pass over the vocabulary.
            scaled.gather(-1, at).squeeze(-1) - chosen if "log_normalizers" in wanted else None,
            log_p.detach().mean(-1) if "mean_logprobs" in wanted else None,
        )

    @classmethod
    def _of_columns(cls, columns: Tensor, wanted: Collection[Figure]) -> TokenStats:
        """Take apart what `_Read` gives, `[N, 4]`."""
        chosen, normalizers, entropy, mean = columns.unbind(-1)
        return cls(
            chosen,
            entropy if "entropy" in wanted else None,
            normalizers if "log_normalizers" in wanted else None,
            mean.detach() if "mean_logprobs" in wanted else None,
        )


class _Read(torch.autograd.Function):
    """Token statistics `[N, 4]` from hidden states `[N, H]` and an output layer `[V, H]`, in chunks.

    With z the logits over the temperature and p their softmax, the columns are log p_y, log Σ exp z, the entropy
    −Σ p log p, and the mean of log p, which gets no gradient; the last two are 0 unless wanted. The gradients by z are
    [v = y] − p, p, and −p (log p + entropy). All of it is float32, as are sums over pieces, whatever the weights are.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, wanted: Collection[Figure]
    ) -> Tensor:
        ctx.temperature, ctx.size = temperature, max(PIECE // len(weight), 1)
        columns = hidden.new_zeros(len(hidden), 4, dtype=torch.float32)
        log_p: Tensor | None = None
        for piece in pieces(len(hidden), ctx.size):
            scaled = _scaled(hidden[piece], weight, temperature)
            log_p = torch.log_softmax(scaled, -1)
            at = targets[piece, None]
            chosen = log_p.gather(-1, at)
            columns[piece, :1] = chosen
            columns[piece, 1:2] = scaled.gather(-1, at) - chosen
            del scaled
            if "entropy" in wanted:
                columns[piece, 2] = -(log_p.exp() * log_p).sum(-1)
            if "mean_logprobs" in wanted:
                columns[piece, 3] = log_p.mean(-1)
        is_one = len(hidden) <= ctx.size
        ctx.has_entropy = "entropy" in wanted
        ctx.save_for_backward(hidden, weight, targets, columns[:, 2], log_p if is_one else None)
        return columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, entropy, kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        of_logp, of_normalizer, of_entropy, _ = (grads[0] / ctx.temperature).unbind(-1)
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        exact = torch.promote_types(weight.dtype, torch.float32)
        by_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        for piece in pieces(len(hidden), ctx.size):
            again = kept is None
            log_p = torch.log_softmax(_scaled(hidden[piece], weight, ctx.temperature), -1) if again else kept
            factor = (of_normalizer - of_logp)[piece, None]
            if ctx.has_entropy:
                factor = factor - of_entropy[piece, None] * (log_p + entropy[piece, None])
            by_logits = (log_p.exp_() if again else log_p.exp()).mul_(factor)
            by_logits.scatter_add_(-1, targets[piece, None], of_logp[piece, None])
            by_logits = by_logits.to(weight.dtype)
            if by_hidden is not None:
                by_hidden[piece] = by_logits @ weight
            if by_weight is not None:
                add_product(by_weight, by_logits.T, hidden[piece])
        return by_hidden, None if by_weight is None else by_weight.to(weight.dtype), None, None, None


def _scaled(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    scaled = nn.functional.linear(hidden, weight).float()
    return scaled if temperature == 1 else scaled.div_(temperature)


def read(
    model: Any, forward: Callable[[], Tensor], targets: Tensor, temperature: float, wanted: Collection[Figure]
) -> TokenStats:
    """Statistics of `targets` `[N]` under `forward`, a call of `model` that returns logits `[N, V]`.

    The output layer is read piece by piece if it is a plain linear one: tied to the embedding or not, in any number
    format, frozen or trained, and also where its weights are gathered only while it is at work (ZeRO 3). Where it has a
    bias or an adapter, or the model caps or scales its logits, they are computed all at once. That a model does so
    shows in its first pass, which is then made twice.
    """
    head = _head(model)
    if head is not None:
        columns: list[Tensor] = []

        def figures(hidden: Tensor) -> Tensor:
            node = FusedHead if has_kernels(hidden.device) else _Read
            found: Tensor = cast(Any, node.apply)(hidden[0], head.weight, targets, temperature, wanted)
            columns.append(found.detach())
            return found[None]

        head.forward = figures
        try:
            returned = forward()
        finally:
            del head.forward
        if not columns:  # the model handed the call to another
            return TokenStats.of(returned, targets, temperature, wanted)
        if head in _plain or torch.allclose(returned.detach(), columns[0], rtol=0.0, atol=0.0, equal_nan=True):
            _plain.add(head)
            return TokenStats._of_columns(returned, wanted)
        _changed.add(head)
    return TokenStats.of(forward(), targets, temperature, wanted)


def _head(model: Any) -> Any:
    """The output layer, or None where it cannot be read piece by piece."""
    base = causal_of(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    is_plain = type(head) is nn.Linear and head.bias is None and "forward" not in vars(head)
    return head if is_plain and head not in _changed else None


def wanted_by(loss: object) -> set[Figure]:
    """Return what a loss asks for by its attributes `needs_...` (`rlhf.losses.policy_loss`)."""
    figures: tuple[Figure, ...] = ("entropy", "log_normalizers", "mean_logprobs")
    return {name for name in figures if getattr(loss, f"needs_{name}", False)}
