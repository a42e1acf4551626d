"""The plain torch trainer: packed forward, loss, backward, AdamW, on one device.

It cannot tell which algorithm runs: each token reaches it with a log-prob, an advantage and a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlhf.batching.pack import PackedBatch
from rlhf.errors import TrainingError
from rlhf.losses.policy_loss import LossInputs, PolicyLoss
from rlhf.rollout.attention import packed_forward
from rlhf.trainers.optimizer import AdamW
from rlhf.trainers.policy import Policy

#: Updates in a row that may be skipped because the gradient was not finite.
MAX_SKIPPED = 5


@dataclass
class TorchTrainer:
    """Updates `policy` in place.

    Attributes:
        n_updates: optimiser updates so far, of the stage.
        total_updates: updates the stage will make; the schedule's horizon.
        n_skipped: updates left out because the gradient was not finite.
    """

    policy: Policy
    settings: AdamW
    total_updates: int
    n_updates: int = 0
    n_skipped: int = 0
    _n_skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.optimizer = self.settings.build(self.policy.model.parameters())

    def logprobs(
        self, model: torch.nn.Module, batch: PackedBatch, *, temperature: float, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs in nats of the policy tokens, `[N]`, under `model` at `temperature`; and the entropy, `[N]`."""
        device = next(model.parameters()).device
        logits = packed_forward(model, batch.token_ids.to(device), batch.lengths.tolist(), batch.select.to(device))
        log_p = torch.log_softmax(logits.float() / temperature, dim=-1)  # [N, V]
        chosen = log_p.gather(-1, batch.targets.to(device)[:, None]).squeeze(-1)
        return chosen, -(log_p.exp() * log_p).sum(-1) if entropy else None

    def update(self, batches: Sequence[PackedBatch], loss: PolicyLoss, *, temperature: float = 1.0) -> dict[str, float]:
        """One optimiser update from the micro-batches of one minibatch; their weights already share one normaliser."""

        def of(batch: PackedBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
            output = loss(self._inputs(batch, loss, temperature))
            return output.loss, output.metrics, output.metrics_max

        return self._step(batches, of)

    def imitate(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """One update that raises the likelihood of the demonstrated tokens: loss Σ w · A · (−log π).

        Advantages are the tokens' weights: 1 for an action. The logged loss is the mean over action tokens, in nats.
        """
        n_actions = max(sum(int((b.advantages == 1).sum()) for b in batches), 1)

        def of(batch: PackedBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
            logp, _ = self.logprobs(self.policy.model, batch, temperature=1.0)
            weights = (batch.weights * batch.advantages).to(logp.device)
            value = -(weights * logp).sum()
            chosen = (batch.advantages == 1).to(logp.device)
            mean = -logp.detach()[chosen].sum() / n_actions
            return value, {"supervised/loss": mean}, {}

        return self._step(batches, of)

    def _inputs(self, batch: PackedBatch, loss: PolicyLoss, temperature: float) -> LossInputs:
        model = self.policy.model
        logp, entropy = self.logprobs(
            model, batch, temperature=temperature, entropy=getattr(loss, "needs_entropy", False)
        )
        reference = None
        if getattr(loss, "needs_ref", False):
            with self.policy.as_reference() as frozen:
                reference, _ = self.logprobs(frozen, batch, temperature=temperature)
        sampler = batch.sampler_logprobs.to(logp.device)
        return LossInputs(
            policy_logprobs=logp,
            old_logprobs=sampler,
            sampler_logprobs=sampler,
            advantages=batch.advantages.to(logp.device),
            weights=batch.weights.to(logp.device),
            sequence_ids=batch.sequence_ids.to(logp.device),
            ref_logprobs=reference,
            entropy=entropy,
            n_minibatch_tokens=batch.n_minibatch_tokens,
        )

    def _step(
        self,
        batches: Sequence[PackedBatch],
        compute: Callable[[PackedBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]],
    ) -> dict[str, float]:
        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        peaks: dict[str, float] = {}
        for batch in batches:
            value, metrics, metrics_max = compute(batch)
            value.backward()  # type: ignore[no-untyped-call]
            for name, x in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(x)
            for name, x in metrics_max.items():
                peaks[name] = max(peaks.get(name, -math.inf), float(x))
        norm = self._apply()
        self.policy.model.eval()
        return {**sums, **peaks, "optimizer/grad_norm": norm, "optimizer/lr": self._lr()}

    def _lr(self) -> float:
        return self.settings.lr_at(max(self.n_updates - 1, 0), self.total_updates)

    def _apply(self) -> float:
        parameters = [p for p in self.policy.model.parameters() if p.grad is not None]
        limit = self.settings.max_grad_norm if self.settings.max_grad_norm is not None else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not math.isfinite(norm):
            self.n_skipped += 1
            self._n_skipped_in_a_row += 1
            if self._n_skipped_in_a_row >= MAX_SKIPPED:
                raise TrainingError(
                    f"{MAX_SKIPPED} updates in a row had a gradient that is not finite",
                    where=f"update {self.n_updates}",
                    got=f"gradient norm {norm}",
                    expected="finite gradients",
                    hint="lower optimizer.lr or the reward's scale; the weights are those of the last good update",
                )
            return norm
        self._n_skipped_in_a_row = 0
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(self.n_updates, self.total_updates)
        self.optimizer.step()
        self.n_updates += 1
        return norm
