"""What one forward pass tells of the policy tokens beside their log-probs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

#: Figures that cost a sum over the vocabulary each, so they are asked for by name.
Figure = Literal["entropy", "log_normalizers", "mean_logprobs"]


@dataclass(frozen=True, slots=True)
class Reading:
    """Of the policy tokens, `[N]`, in nats; None where it was not asked for.

    Attributes:
        logprobs: of the tokens; carries the gradient.
        entropy: of the distributions that they are drawn from; carries the gradient.
        log_normalizers: log Σ exp of the logits over the temperature; carries the gradient.
        mean_logprobs: mean of the log-probs over the vocabulary, without gradient.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    log_normalizers: torch.Tensor | None = None
    mean_logprobs: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, targets: torch.Tensor, temperature: float, wanted: Collection[Figure]) -> Reading:
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


def wanted_by(loss: object) -> set[Figure]:
    """Return what a loss asks for by its attributes `needs_...` (`rlhf.losses.policy_loss`)."""
    figures: tuple[Figure, ...] = ("entropy", "log_normalizers", "mean_logprobs")
    return {name for name in figures if getattr(loss, f"needs_{name}", False)}
