"""The plain torch trainer: packed forward, loss, backward, AdamW, on one device.

It cannot tell which algorithm runs: each token reaches it with a log-prob, an advantage and a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from rlhf.batching.pack import PackedBatch, WithoutPadding, adapters_of, collate, is_split, pack
from rlhf.batching.samples import Floats, Sample
from rlhf.errors import DataError, TrainingError, boundary
from rlhf.inference.embedded.attention import packed_forward
from rlhf.inference.embedded.expert_routing import ExpertRouting
from rlhf.inference.role_adapters import unused_parameters
from rlhf.losses.importance_correction import Correction, corrected
from rlhf.losses.mismatch import CorrectionInputs
from rlhf.losses.policy_loss import LossInputs, LossNeeds, LossOutput, PolicyLoss, whole_of
from rlhf.losses.trajectories import Trajectories, trajectories_of
from rlhf.spans import Part, span
from rlhf.training.backends.changed_share import Changes, share_of
from rlhf.training.backends.compiled import CompiledLayers
from rlhf.training.backends.master_weights import MasterAdamW, is_short
from rlhf.training.backends.microbatch_stats import Compared, Computed, Plain, metrics_of, plain
from rlhf.training.backends.optimizer import AdamW, Stepper
from rlhf.training.backends.sequence_parallel import SequenceGroup
from rlhf.training.backends.sharded import device_of
from rlhf.training.backends.token_stats import Figure, TokenStats, read, wanted_by
from rlhf.training.policy.model import Policy
from rlhf.training.throughput import Meter

#: Arrays that a loss gets as they are in the batch.
_OF_TOKENS = (
    "sampler_logprobs", "old_logprobs", "advantages", "weights", "trajectory_ids", "token_positions",
    "old_mean_logprobs", "teacher_logprobs", "off_policy",
)  # fmt: skip


T = TypeVar("T")
R = TypeVar("R")


@dataclass
class TorchTrainer:
    """Updates `policy` in place.

    Attributes:
        total_updates: updates the stage will make; the schedule's horizon.
        recomputes: whether the backward pass computes activations again, or for what share of the layers.
        compiles: whether layers are compiled.
        moments: number format of the optimiser's moments.
        offloads: whether these lie in the memory of the CPU.
        sequence: processes that share each micro-batch with this one; None where it goes through all of it.
        optimizer: over the policy's trained parameters.
        meter: of what is trained on.
        routing: of a mixture of experts whose routing is replayed, else None.
    """

    policy: Policy
    settings: AdamW
    total_updates: int
    recomputes: bool | float = False
    compiles: bool = False
    moments: torch.dtype = torch.float32
    offloads: bool = False
    sequence: SequenceGroup | None = None

    def __post_init__(self) -> None:
        if self.recomputes:
            self.policy.recompute(self.recomputes)
        self.meter = Meter.of(self.policy.model)
        self._compiled = CompiledLayers(self.policy.model) if self.compiles else None
        self.optimizer: Any = self._optimizer()
        self._stepper = Stepper(self.settings, self.optimizer, self.total_updates)
        self._changes = Changes(self.policy.model)
        self.routing: ExpertRouting | None = None

    def _optimizer(self) -> Any:
        parameters = self.policy.model.parameters()
        if self.moments == torch.float32 and not self.offloads:
            return self.settings.build(parameters)
        kind = partial(MasterAdamW, moments=self.moments, offloads=self.offloads)
        return self.settings.build(parameters, kind=kind)

    def _at_work(self) -> AbstractContextManager[None]:
        """Context of forward passes: compiled layers, and expert routers that record or replay."""
        if self.routing is not None:
            return self.routing.in_use()
        return nullcontext() if self._compiled is None else self._compiled.in_use()

    def replay_routing(self) -> None:
        """Use in updates the experts that `scores` records; layers are not compiled. Raises ModelError without any."""
        self.routing, self._compiled = ExpertRouting(self.policy.model), None

    @property
    def live(self) -> Any:
        """The policy as it is called where gradients are to flow."""
        return self.policy.model

    def close(self) -> None:
        """Leave the policy's module as an ordinary one: the stage is over."""
        if self.recomputes:
            self.policy.recompute(False)

    @property
    def n_updates(self) -> int:
        """Optimiser updates so far, of the stage."""
        return self._stepper.n_updates

    @n_updates.setter
    def n_updates(self, value: int) -> None:
        self._stepper.n_updates = value

    @property
    def n_off_schedule(self) -> int:
        """Updates among them that are no part of the schedule."""
        return self._stepper.n_off_schedule

    @n_off_schedule.setter
    def n_off_schedule(self, value: int) -> None:
        self._stepper.n_off_schedule = value

    @property
    def n_skipped(self) -> int:
        """Updates left out because the gradient was not finite."""
        return self._stepper.n_skipped

    @property
    def rounds_in_place(self) -> bool:
        """True if 16-bit weights are updated without float32 masters."""
        trained = (p for p in self.policy.model.parameters() if p.requires_grad)
        return not isinstance(self.optimizer, MasterAdamW) and any(map(is_short, trained))

    def read(
        self, model: torch.nn.Module, batch: PackedBatch, wanted: Collection[Figure], *, temperature: float
    ) -> TokenStats:
        """Return statistics of the policy tokens under `model`, at `temperature`."""
        device = device_of(model)
        if self.sequence is not None:
            return self.sequence.read(model, batch, wanted, temperature, device)
        there, routing = batch.to(device), self.routing
        if routing is not None:
            routing.replay(there.routing)

        def forward() -> torch.Tensor:
            lengths = batch.lengths.tolist()
            return packed_forward(model, batch.token_ids, lengths, there.select, batch.adapters, device, routing)

        return read(model, forward, there.targets, temperature, wanted)

    @torch.no_grad()
    def compute_logprobs(self, samples: Sequence[Sample], *, temperature: float, max_tokens: int) -> list[Floats]:
        """Log-probs in nats of the policy tokens of each row, under the present weights; dropout is off.

        Args:
            samples: rows.
            temperature: that the rows were sampled at.
            max_tokens: token budget of one forward pass; the result does not depend on it.
        """
        return self.compute_token_stats(samples, (), temperature=temperature, max_tokens=max_tokens)["logprobs"]

    @torch.no_grad()
    def compute_token_stats(
        self,
        samples: Sequence[Sample],
        wanted: Collection[Figure],
        *,
        temperature: float,
        max_tokens: int,
        model: torch.nn.Module | None = None,
        routing: bool = False,
    ) -> dict[str, list[Any]]:
        """Per-token figures of the policy or of another `model`, by name: `logprobs` and what is `wanted`.

        With `routing` there is also that of each row, see `Sample.routing`; only after `replay_routing`.
        """
        part: Part = "logprobs" if model is None else "reference"
        model = self.policy.model if model is None else model
        model.eval()
        names = ("logprobs", *wanted)
        found: dict[str, list[Any]] = {name: [np.zeros(0, np.float32)] * len(samples) for name in names}
        if routing:
            found["routing"] = [None] * len(samples)

        def look(members: list[int]) -> dict[str, Any]:
            rows = [samples[i] for i in members]
            batch = replace(collate(rows, np.ones(len(rows))), routing=None)
            recording = self.routing if routing else None
            if recording is not None:
                recording.record()
            reading = self.read(model, batch, wanted, temperature=temperature)
            experts = {} if recording is None else {"routing": recording.recorded()}
            return {name: getattr(reading, name).cpu().numpy() for name in names} | experts

        packs = pack(samples, max_tokens, n_least=self.n_processes)
        with span(part), self._at_work():
            looked = self._each(packs, look)
        for members, flat in zip(packs, looked, strict=True):
            for name, values in found.items():
                sizes = [len(samples[i]) if name == "routing" else samples[i].n_policy_tokens for i in members]
                for i, own in zip(members, np.split(flat[name], np.cumsum(sizes)[:-1]), strict=True):
                    values[i] = own
        return found

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: PolicyLoss,
        *,
        temperature: float = 1.0,
        correction: Correction | None = None,
    ) -> dict[str, float]:
        """Optimizer update from a minibatch's micro-batches; their weights share one normaliser.

        Batches without old log-probs are compared with the engine here: with a `correction`, which must be `per_token`,
        their old log-probs are the policy's of this moment and it weighs their tokens; without, they are the engine's.

        A loss that needs whole trajectories, or groups, costs a forward pass, without gradient and dropout, where some
        lie in more than one of `batches`, unless it needs their ratios only and the old log-probs are the policy's of
        this moment.
        """
        with self._at_work():
            return self._updated(batches, loss, temperature, correction)

    def _updated(
        self, batches: Sequence[PackedBatch], loss: PolicyLoss, temperature: float, correction: Correction | None
    ) -> dict[str, float]:
        whole = LossNeeds(loss).needs_whole
        shared: Trajectories | None = None
        tokens: LossInputs | None = None
        if whole is not None and is_split(batches, whole):
            with span("logprobs"):
                if whole == "tokens":
                    tokens = self._all_tokens(batches, loss, temperature)
                else:
                    shared = self._measured(batches, temperature, moved=correction is None)

        def of(batch: PackedBatch) -> Computed:
            inputs = self._inputs(batch, loss, temperature)
            compared: Compared | None = None
            if batch.old_logprobs is None:
                inputs, compared = _compare(inputs, correction)
            if whole == "tokens":
                inputs = replace(inputs, whole=whole_of([inputs]) if tokens is None else tokens)
            elif whole is not None:
                figures = shared or _figures(inputs.policy_logprobs, inputs.old_logprobs, [batch])
                inputs = replace(inputs, trajectories=figures)
            output = _checked(loss(inputs), loss)
            return Computed(output.loss, output.metrics, output.metrics_max, compared)

        return self._step(batches, of)

    @torch.no_grad()
    def _measured(self, batches: Sequence[PackedBatch], temperature: float, *, moved: bool) -> Trajectories:
        """Figures of the trajectories of a minibatch; unless `moved`, batches without old log-probs have ratio 1."""
        self.policy.model.eval()
        device = device_of(self.policy.model)

        def before(batch: PackedBatch) -> torch.Tensor:
            return (batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs).to(device)

        def now(batch: PackedBatch) -> torch.Tensor:
            if moved or batch.old_logprobs is not None:
                return self.read(self.policy.model, batch, (), temperature=temperature).logprobs
            return before(batch)

        return _figures(torch.cat(self._each(batches, now)), torch.cat([before(b) for b in batches]), batches)

    @torch.no_grad()
    def _all_tokens(self, batches: Sequence[PackedBatch], loss: PolicyLoss, temperature: float) -> LossInputs:
        """Tokens of a minibatch, in order; the engine's log-probs stand in for missing old ones."""
        self.policy.model.eval()
        return whole_of(self._each(batches, lambda batch: self._inputs(batch, loss, temperature)))

    def sft_update(
        self, batches: Sequence[PackedBatch], *, entropy_coef: float = 0.0, off_schedule: bool = False
    ) -> dict[str, float]:
        """SFT update: loss Σ w · A · (−log π − c · entropy) over demonstrated tokens.

        Advantages are the tokens' weights: 1 for an action. The logged loss is the mean of −log π of those that weigh
        1, in nats: of actions, and of observations too where they weigh as much.
        With `off_schedule` the update is no part of the learning rate's schedule, and has the rate of the last one.
        """
        wanted: set[Figure] = {"entropy"} if entropy_coef else set()
        n_actions = max(sum(int((b.advantages == 1).sum()) for b in batches), 1)

        def of(batch: PackedBatch) -> Computed:
            found = self.read(self.live, batch, wanted, temperature=1.0)
            logp = found.logprobs
            weights = batch.weights * batch.advantages
            value = -(weights * logp).sum()
            if found.entropy is not None:
                value = value - entropy_coef * (weights * found.entropy).sum()
            mean = -(logp.detach() * (batch.advantages == 1)).sum() / n_actions
            return Computed(value, {"supervised/loss": mean})

        with self._at_work():
            return self._step(batches, of, off_schedule=off_schedule)

    def _inputs(self, batch: PackedBatch, loss: PolicyLoss, temperature: float) -> LossInputs:
        if batch.off_policy is not None and not LossNeeds(loss).takes_off_policy:
            raise DataError(
                "this loss needs on-policy tokens, and some are off-policy",
                where="TorchTrainer.update",
                got=f"{int(batch.off_policy.sum())} off-policy tokens for {type(loss).__name__}",
                expected="a loss with takes_off_policy = True",
                hint="use loss: {kind: luffy}",
            )
        wanted, batch = wanted_by(loss), batch.to(device_of(self.policy.model))
        model = self.live if torch.is_grad_enabled() else self.policy.model
        policy = self.read(model, batch, wanted, temperature=temperature)
        reference: TokenStats | None = None
        if LossNeeds(loss).needs_ref:
            alone = nullcontext() if self.routing is None else self.routing.paused()
            with span("reference"), self.policy.as_reference() as frozen, alone:
                reference = self.read(
                    frozen, replace(batch, routing=None), wanted & {"log_normalizers"}, temperature=temperature
                )
        there: dict[str, Any] = {name: getattr(batch, name) for name in _OF_TOKENS}
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
            staleness=self._staleness(batch),
            **there,
        )

    def _staleness(self, batch: PackedBatch) -> torch.Tensor | None:
        """Ages of the tokens in versions, see `LossInputs`."""
        versions = batch.versions
        return None if versions is None else torch.where(versions < 0, -1, self.policy.version - versions)

    # --- what trainers over several processes do differently ---

    @property
    def n_processes(self) -> int:
        """Number of processes that share the micro-batches."""
        return 1

    def _each(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        """Return what `work`, which asks the model once, makes of each of the items, in order."""
        return [work(item) for item in items]

    def _own(self, batches: Sequence[PackedBatch]) -> Sequence[tuple[PackedBatch, bool]]:
        """Return the micro-batches to go through here, and whether each counts."""
        return WithoutPadding(batches)

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _merged(
        self, batches: Sequence[PackedBatch], computed: Sequence[Computed], n_changed: torch.Tensor
    ) -> tuple[list[Plain], float]:
        """Return what every micro-batch came to, and the share of the sampled weights that changed."""
        found, n = plain(computed, n_changed)
        return found, share_of([(n, self._changes.n)])

    @contextmanager
    def _left_alone(self, unused: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Context of an update that moves none of some parameters, whose gradients are zero."""
        for parameter in unused:
            parameter.grad = None
        yield

    def _step(
        self, batches: Sequence[PackedBatch], compute: Callable[[PackedBatch], Computed], *, off_schedule: bool = False
    ) -> dict[str, float]:
        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.meter.add(batches)
        own, counted, device = self._own(batches), [], device_of(self.policy.model)
        for number, (batch, counts) in enumerate(own):
            with span("forward"):
                now = compute(batch.to(device))
            with span("backward"):
                self._backward(now.loss if counts else now.loss * 0.0, is_last=number == len(own) - 1)
            if not counts and self.routing is not None:
                self.routing.uncount()
            if counts:
                counted.append(replace(now, loss=now.loss.detach()))
        unused = unused_parameters(self.policy.model, adapters_of(batches))
        with span("optimiser"), self._left_alone(unused):
            self._changes.begin()
            norm = self._stepper.step(off_schedule=off_schedule)
            n_changed = self._changes.end()
        self.policy.model.eval()
        found, share = self._merged(batches, counted, n_changed)
        made = {"optimizer/grad_norm": norm, "optimizer/lr": self._stepper.lr, "optimizer/changed_share": share}
        return {**metrics_of(found), **made}


def _figures(policy: torch.Tensor, old: torch.Tensor, batches: Sequence[PackedBatch]) -> Trajectories:
    """Figures of the trajectories of `batches`; log-probs `[N]` of all, end to end."""
    names = ("advantages", "trajectory_ids", "group_ids")
    tokens = (torch.cat([getattr(b, name) for b in batches]).to(policy.device) for name in names)
    return trajectories_of(policy, old, *tokens)


def _compare(inputs: LossInputs, correction: Correction | None) -> tuple[LossInputs, Compared]:
    """Return `inputs` as `correction` has them, and what was compared: the tokens that the engine sampled."""
    policy = inputs.policy_logprobs.detach()
    columns = (policy, inputs.sampler_logprobs, inputs.advantages, inputs.trajectory_ids)
    if inputs.off_policy is None:  # a mask on a GPU would have to be counted first
        sampled: Any = slice(None)
    else:
        sampled = ~inputs.off_policy
    tokens = CorrectionInputs(*(values[sampled] for values in columns))
    if correction is None:
        return inputs, (tokens, None)
    with boundary(TrainingError, where="the correction of trainer and engine"):
        output = corrected(correction, tokens)
    factors = torch.ones_like(inputs.weights)
    factors[sampled] = output.weights.detach().to(factors.dtype)
    return replace(inputs, old_logprobs=policy, weights=inputs.weights * factors), (tokens, output)


def _checked(output: object, loss: object) -> LossOutput:
    """Return what a loss returned. Raises TrainingError where nothing could be learnt from it."""
    found = output.loss if isinstance(output, LossOutput) else None
    if isinstance(output, LossOutput) and isinstance(found, torch.Tensor) and found.requires_grad and found.ndim == 0:
        return output
    raise TrainingError(
        "a loss returned a value without a gradient",
        where=type(loss).__name__,
        got=f"{type(output).__name__}" + ("" if found is None else f" with {_form(found)}"),
        expected="LossOutput(loss), a scalar tensor that depends on inputs.policy_logprobs",
        hint="return rlhf.losses.policy_loss.LossOutput on every path, and detach no log-probs",
    )


def _form(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without a gradient")
