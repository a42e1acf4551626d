"""Sequence parallelism: several processes share the tokens of one micro-batch, so that rows may be long.

Ulysses (Jacobs et al., arXiv 2309.14509) over packed rows. Of n processes number r has the tokens r, r + n, r + 2n, ...
and computes everything of them but attention. There an all-to-all gives each process a share of the heads over all
tokens, and a second one gives the results back, so attention is that of one process, whatever its plan. What is found
of the policy tokens is gathered, and the loss is computed alike in all of them; each sends gradients back to its own
tokens, and those of the weights add up over the processes. torch's own collectives do it, as DeepSpeed's attention
layer takes no packed rows and compiles for a minute at its first use.

Tokens are dealt out one by one, as policy tokens come in runs, and the output layer is shared evenly that way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlhf.batching.pack import PackedBatch
from rlhf.errors import TrainingError
from rlhf.inference.embedded.attention import AttentionPlan, plan_rows, planned_forward
from rlhf.inference.embedded.attention_variant import PLAIN, Variant
from rlhf.inference.embedded.row_layout import on_device
from rlhf.inference.model_config import ModelWrapper
from rlhf.processes import current
from rlhf.training.backends.sharding import heads_problem, heads_rule
from rlhf.training.backends.token_stats import Figure, TokenStats, read


def check_heads(n: int, model: Any, of: str = "") -> None:
    """Raise TrainingError where `n` processes cannot share the attention heads of a model, of whom `of` says."""
    config = ModelWrapper(model).config.get_text_config()
    problem = heads_problem(n, config.num_attention_heads, config.num_key_value_heads) if n > 1 else None
    if problem:
        raise TrainingError(
            "the attention heads are not divisible by this number of processes",
            where="trainer.sequence_parallel",
            got=f"{n}, and {problem}{of}",
            expected=heads_rule(config.num_attention_heads, config.num_key_value_heads),
        )


@dataclass(frozen=True)
class SequenceGroup:
    """Processes that share every micro-batch, as one of them sees them.

    Attributes:
        n: how many they are.
        rank: which one this is among them, from 0.
        group: of torch.distributed; None where tensors have no memory and nothing is sent.
    """

    n: int
    rank: int
    group: Any = None

    @classmethod
    def join(cls, n: int, model: Any) -> SequenceGroup | None:
        """Group of `n` neighbouring processes for a model; None for one. All processes must join together.

        Raises:
            TrainingError: `n` does not divide the processes, or does not go with the model's attention heads.
        """
        if n == 1:
            return None
        here = current()
        if here.n % n:
            raise TrainingError(
                "the number of processes is not divisible by sequence_parallel",
                where="trainer.sequence_parallel",
                got=f"{n}, and {here.n} processes",
                expected=f"a divisor of {here.n}" if here.n > 1 else f"{n} processes, or a multiple",
                hint=f"start {n} processes (rlhf train --nproc {n}), or set trainer.sequence_parallel=1",
            )
        check_heads(n, model)
        import torch.distributed as dist

        subgroups: Any = dist.new_subgroups
        group, _ = subgroups(n, timeout=timedelta(seconds=here.timeout_s))
        return cls(n, here.rank % n, group)

    def leave(self) -> None:
        """End the group."""
        import torch.distributed as dist

        if self.group is not None:
            dist.destroy_process_group(self.group)

    def read(
        self, model: Any, batch: PackedBatch, wanted: Collection[Figure], temperature: float, device: torch.device
    ) -> TokenStats:
        """Statistics of all policy tokens of a micro-batch that every process of the group gives alike."""
        rows = plan_rows(model, batch.token_ids, batch.lengths.tolist(), None, batch.adapters, device)
        n_tokens, select = len(rows.token_ids), rows.plan.computed_at(batch.select.numpy())
        own = np.minimum(np.arange(-(-n_tokens // self.n)) * self.n + self.rank, n_tokens - 1)
        owner, n_policy = select % self.n, np.bincount(select % self.n, minlength=self.n)
        mine = np.flatnonzero(owner == self.rank)
        # Each process finds as many figures, at least one, so that all make the same calls.
        most = max(int(n_policy.max()), 1)
        places, targets = np.zeros(most, np.int64), torch.zeros(most, dtype=torch.int64, device=device)
        places[: len(mine)] = select[mine] // self.n
        targets[: len(mine)] = batch.targets.to(device)[on_device(mine, device)]
        number = np.empty(len(select), np.int64)
        number[np.argsort(owner, kind="stable")] = np.concatenate([np.arange(n) for n in n_policy])
        at = on_device(owner * most + number, device)
        plan = _SplitPlan(rows.plan, self, n_tokens)
        adapters = None if rows.adapters is None else rows.adapters[own]

        def forward() -> Tensor:
            ids, positions = on_device(rows.token_ids[own], device), rows.plan.position_ids[on_device(own, device)]
            return planned_forward(model, ids, positions, plan, on_device(places, device), adapters)

        with current().comm_errors("a forward pass over shared rows"):
            found = read(model, forward, targets, temperature, wanted)
            names = [f.name for f in fields(found) if getattr(found, f.name) is not None]
            columns = torch.stack([getattr(found, name) for name in names], -1)
            gathered: Tensor = cast(Any, _Gather.apply)(columns, self)
        return TokenStats(**dict(zip(names, gathered.flatten(0, 1)[at].unbind(-1), strict=True)))


class _SplitPlan:
    """Attention plan of rows whose tokens lie with several processes; the `inner` one sees them whole."""

    def __init__(self, inner: AttentionPlan, group: SequenceGroup, n_tokens: int) -> None:
        self._inner, self._group, self._n_tokens = inner, group, n_tokens
        self.by_layer, self.is_used = inner.by_layer, False

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, how: Variant = PLAIN
    ) -> Tensor:
        """Attention of this process's tokens, `[T / n, H, D]`, to all before them; see `AttentionPlan.attend`."""
        self.is_used = True
        n, n_kv = self._group.n, key.shape[1]
        if n_kv % n:  # fewer than processes
            key, value = (x.repeat_interleave(n // n_kv, 1) for x in (key, value))
        if how.sinks is not None:
            how = replace(how, sinks=how.sinks.chunk(n)[self._group.rank])
        q, k, v = (
            self._exchange(torch.unflatten(x, 1, (n, -1))).flatten(0, 1)[: self._n_tokens] for x in (query, key, value)
        )
        out = self._inner.attend(layer, q, k, v, scale, dropout, how)
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, -len(out) % n))
        return self._exchange(torch.unflatten(out, 0, (-1, n))).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(x, self._group))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """All-to-all of `[t, n, h, D]`: `[:, r]` goes to process r, and what it sent comes back there.

    It turns heads by process into tokens by process and the other way round, and is its own gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _sent(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sent(grads[0], ctx.group), None


def _sent(x: Tensor, group: SequenceGroup) -> Tensor:
    by_process = x.transpose(0, 1).contiguous()
    found = torch.empty_like(by_process)
    if group.group is not None:
        torch.distributed.all_to_all_single(found, by_process, group=group.group)
    return found.transpose(0, 1)


class _Gather(torch.autograd.Function):
    """Gather of `[M, C]` into `[n, M, C]`; all compute the same of it, so the gradient is a process's own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.rank = group.rank
        found = x.new_empty(group.n, *x.shape)
        if group.group is not None:
            torch.distributed.all_gather(list(found.unbind()), x.contiguous(), group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None
