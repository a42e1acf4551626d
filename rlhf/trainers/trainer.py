"""The plain torch trainer: packed forward, loss, backward, AdamW, on one device.

It cannot tell which algorithm runs: each token reaches it with a log-prob, an advantage and a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlhf.batching.pack import PackedBatch, collate, is_split, pack
from rlhf.batching.samples import Floats, Sample
from rlhf.errors import DataError, TrainingError, boundary
from rlhf.losses.correction import Correction, corrected
from rlhf.losses.mismatch import CorrectionInputs, CorrectionOutput, joined, joined_outputs, mismatch_metrics
from rlhf.losses.policy_loss import LossInputs, PolicyLoss, whole_of
from rlhf.losses.trajectories import Trajectories, trajectories_of
from rlhf.rollout.attention import packed_forward
from rlhf.trainers.optimizer import AdamW, Stepper
from rlhf.trainers.policy import Policy
from rlhf.trainers.reading import Figure, Reading, wanted_by

#: Arrays that a loss gets as they are in the batch.
_OF_TOKENS = (
    "sampler_logprobs", "old_logprobs", "advantages", "weights", "sequence_ids", "places", "old_mean_logprobs",
    "teacher_logprobs", "off_policy",
)  # fmt: skip


@dataclass
class TorchTrainer:
    """Updates `policy` in place.

    Attributes:
        total_updates: updates the stage will make; the schedule's horizon.
        optimizer: over the policy's trained parameters.
    """

    policy: Policy
    settings: AdamW
    total_updates: int

    def __post_init__(self) -> None:
        self.optimizer = self.settings.build(self.policy.model.parameters())
        self._stepper = Stepper(self.settings, self.optimizer, self.total_updates)

    @property
    def n_updates(self) -> int:
        """Optimiser updates so far, of the stage."""
        return self._stepper.n_updates

    @n_updates.setter
    def n_updates(self, value: int) -> None:
        self._stepper.n_updates = value

    @property
    def n_beside(self) -> int:
        """Updates among them that are no part of the schedule."""
        return self._stepper.n_beside

    @n_beside.setter
    def n_beside(self, value: int) -> None:
        self._stepper.n_beside = value

    @property
    def n_skipped(self) -> int:
        """Updates left out because the gradient was not finite."""
        return self._stepper.n_skipped

    def logprobs(
        self, model: torch.nn.Module, batch: PackedBatch, *, temperature: float, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs in nats of the policy tokens, `[N]`, under `model` at `temperature`; and the entropy, `[N]`."""
        found = self.read(model, batch, {"entropy"} if entropy else (), temperature=temperature)
        return found.logprobs, found.entropy

    def read(
        self, model: torch.nn.Module, batch: PackedBatch, wanted: Collection[Figure], *, temperature: float
    ) -> Reading:
        """What `model` says of the policy tokens, at `temperature`."""
        device = next(model.parameters()).device
        logits = packed_forward(model, batch.token_ids.to(device), batch.lengths.tolist(), batch.select.to(device))
        return Reading.of(logits, batch.targets.to(device), temperature, wanted)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, temperature: float, max_tokens: int) -> list[Floats]:
        """Log-probs in nats of the policy tokens of each row, under the present weights; dropout is off.

        Args:
            samples: rows.
            temperature: that the rows were sampled at.
            max_tokens: token budget of one forward pass; the result does not depend on it.
        """
        return self.scores(samples, (), temperature=temperature, max_tokens=max_tokens)["logprobs"]

    @torch.no_grad()
    def scores(
        self,
        samples: Sequence[Sample],
        wanted: Collection[Figure],
        *,
        temperature: float,
        max_tokens: int,
        model: torch.nn.Module | None = None,
    ) -> dict[str, list[Floats]]:
        """As `score`, under `logprobs`, and by its name what else is wanted; of the policy, or of another `model`."""
        model = self.policy.model if model is None else model
        model.eval()
        found = {name: [np.zeros(0, np.float32)] * len(samples) for name in ("logprobs", *wanted)}
        for members in pack(samples, max_tokens):
            rows = [samples[i] for i in members]
            reading = self.read(model, collate(rows, np.ones(len(rows))), wanted, temperature=temperature)
            ends = np.cumsum([row.n_policy_tokens for row in rows])[:-1]
            for name, values in found.items():
                for i, part in zip(members, np.split(getattr(reading, name).cpu().numpy(), ends), strict=True):
                    values[i] = part
        return found

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: PolicyLoss,
        *,
        temperature: float = 1.0,
        correction: Correction | None = None,
    ) -> dict[str, float]:
        """One optimiser update from the micro-batches of one minibatch; their weights already share one normaliser.

        Batches without old log-probs are compared with the engine here: with a `correction`, which must be `per_token`,
        their old log-probs are the policy's of this moment and it weighs their tokens; without, they are the engine's.

        A loss that needs whole trajectories, or groups, costs a forward pass, without gradient and dropout, where some
        lie in more than one of `batches`, unless it needs their ratios only and the old log-probs are the policy's of
        this moment.
        """
        whole = getattr(loss, "needs_whole", None)
        shared: Trajectories | None = None
        tokens: LossInputs | None = None
        if whole is not None and is_split(batches, whole):
            if whole == "tokens":
                tokens = self._all_tokens(batches, loss, temperature)
            else:
                shared = self._measured(batches, temperature, moved=correction is None)
        seen: list[tuple[CorrectionInputs, CorrectionOutput | None]] = []

        def of(batch: PackedBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
            inputs = self._inputs(batch, loss, temperature)
            if batch.old_logprobs is None:
                inputs, compared = _compare(inputs, correction)
                seen.append(compared)
            if whole == "tokens":
                inputs = replace(inputs, whole=whole_of([inputs]) if tokens is None else tokens)
            elif whole is not None:
                figures = shared or _figures(inputs.policy_logprobs, inputs.old_logprobs, [batch])
                inputs = replace(inputs, trajectories=figures)
            output = loss(inputs)
            return output.loss, output.metrics, output.metrics_max

        values = self._step(batches, of)
        return values | (_mismatch(seen) if seen else {})

    @torch.no_grad()
    def _measured(self, batches: Sequence[PackedBatch], temperature: float, *, moved: bool) -> Trajectories:
        """Figures of the trajectories of a minibatch; unless `moved`, batches without old log-probs have ratio 1."""
        self.policy.model.eval()
        device = next(self.policy.model.parameters()).device
        policy, old = [], []
        for batch in batches:
            before = (batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs).to(device)
            if moved or batch.old_logprobs is not None:
                policy.append(self.logprobs(self.policy.model, batch, temperature=temperature)[0])
            else:
                policy.append(before)
            old.append(before)
        return _figures(torch.cat(policy), torch.cat(old), batches)

    @torch.no_grad()
    def _all_tokens(self, batches: Sequence[PackedBatch], loss: PolicyLoss, temperature: float) -> LossInputs:
        """The tokens of a minibatch, in order; the engine's log-probs are the old ones where they have no others."""
        self.policy.model.eval()
        return whole_of([self._inputs(batch, loss, temperature) for batch in batches])

    def imitate(
        self, batches: Sequence[PackedBatch], *, entropy_coef: float = 0.0, beside: bool = False
    ) -> dict[str, float]:
        """One update that raises the likelihood of the demonstrated tokens: loss Σ w · A · (−log π − c · entropy).

        Advantages are the tokens' weights: 1 for an action. The logged loss is the mean of −log π of actions, in nats.
        With `beside` the update is no part of the learning rate's schedule, and has the rate of the one before it.
        """
        wanted: set[Figure] = {"entropy"} if entropy_coef else set()
        n_actions = max(sum(int((b.advantages == 1).sum()) for b in batches), 1)

        def of(batch: PackedBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
            found = self.read(self.policy.model, batch, wanted, temperature=1.0)
            logp = found.logprobs
            weights = (batch.weights * batch.advantages).to(logp.device)
            value = -(weights * logp).sum()
            if found.entropy is not None:
                value = value - entropy_coef * (weights * found.entropy).sum()
            chosen = (batch.advantages == 1).to(logp.device)
            mean = -logp.detach()[chosen].sum() / n_actions
            return value, {"supervised/loss": mean}, {}

        return self._step(batches, of, beside=beside)

    def _inputs(self, batch: PackedBatch, loss: PolicyLoss, temperature: float) -> LossInputs:
        if batch.off_policy is not None and not getattr(loss, "takes_off_policy", False):
            raise DataError(
                "this loss takes every token for the policy's own, and some are not",
                where="TorchTrainer.update",
                got=f"{int(batch.off_policy.sum())} off-policy tokens for {type(loss).__name__}",
                expected="a loss with takes_off_policy = True",
                hint="use loss: {kind: luffy}",
            )
        wanted = wanted_by(loss)
        policy = self.read(self.policy.model, batch, wanted, temperature=temperature)
        reference: Reading | None = None
        if getattr(loss, "needs_ref", False):
            with self.policy.as_reference() as frozen:
                reference = self.read(frozen, batch, wanted & {"log_normalizers"}, temperature=temperature)
        device = policy.logprobs.device
        there: dict[str, Any] = {name: getattr(batch, name) for name in _OF_TOKENS}
        there = {name: None if values is None else values.to(device) for name, values in there.items()}
        if there["old_logprobs"] is None:
            there["old_logprobs"] = there["sampler_logprobs"]
        return LossInputs(
            policy_logprobs=policy.logprobs,
            ref_logprobs=None if reference is None else reference.logprobs,
            entropy=policy.entropy,
            n_minibatch_tokens=batch.n_minibatch_tokens,
            log_normalizers=policy.log_normalizers,
            ref_log_normalizers=None if reference is None else reference.log_normalizers,
            mean_logprobs=policy.mean_logprobs,
            **there,
        )

    def _step(
        self,
        batches: Sequence[PackedBatch],
        compute: Callable[[PackedBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]],
        *,
        beside: bool = False,
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
        norm = self._stepper.step(beside=beside)
        self.policy.model.eval()
        return {**sums, **peaks, "optimizer/grad_norm": norm, "optimizer/lr": self._stepper.lr}


def _figures(policy: torch.Tensor, old: torch.Tensor, batches: Sequence[PackedBatch]) -> Trajectories:
    """Figures of the trajectories whose tokens `batches` hold; log-probs `[N]` of all of them, one after the other."""
    names = ("advantages", "sequence_ids", "group_ids")
    tokens = (torch.cat([getattr(b, name) for b in batches]).to(policy.device) for name in names)
    return trajectories_of(policy, old, *tokens)


def _compare(
    inputs: LossInputs, correction: Correction | None
) -> tuple[LossInputs, tuple[CorrectionInputs, CorrectionOutput | None]]:
    """Return `inputs` as `correction` has them, and what was compared: the tokens that the engine sampled."""
    policy = inputs.policy_logprobs.detach()
    sampled = torch.ones_like(policy, dtype=torch.bool) if inputs.off_policy is None else ~inputs.off_policy
    columns = (policy, inputs.sampler_logprobs, inputs.advantages, inputs.sequence_ids)
    tokens = CorrectionInputs(*(values[sampled] for values in columns))
    if correction is None:
        return inputs, (tokens, None)
    with boundary(TrainingError, where="the correction of trainer and engine"):
        output = corrected(correction, tokens)
    factors = torch.ones_like(inputs.weights)
    factors[sampled] = output.weights.detach().to(factors.dtype)
    return replace(inputs, old_logprobs=policy, weights=inputs.weights * factors), (tokens, output)


def _mismatch(seen: Sequence[tuple[CorrectionInputs, CorrectionOutput | None]]) -> dict[str, float]:
    outputs = [output for _, output in seen if output is not None]
    return mismatch_metrics(joined([tokens for tokens, _ in seen]), joined_outputs(outputs) if outputs else None)
