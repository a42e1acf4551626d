"""Value critic: state values before the updates of a step, and its own updates after.

It is updated apart from the policy, by an optimiser of its own. The trainer of the policy cannot tell that there is a
critic; and the critic learns from every row of a step, also from those that filters and corrections keep from the
policy: a group whose attempts all failed says nothing about which of them was better, and all about what to expect.

Several processes hold it whole, each in its own memory, and share its micro-batches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.pack import PackedBatch, collate, pack, pack_minibatches
from rlhf.batching.samples import Bools, Floats, Layout, Sample, make_samples, placed
from rlhf.checking import CheckContext
from rlhf.data import Credit, Outcome, ScoredGroup, Values
from rlhf.errors import TrainingError
from rlhf.inference.embedded.attention import packed_forward
from rlhf.losses.reduction import Reduction
from rlhf.losses.value import value_loss
from rlhf.processes import current, in_turn
from rlhf.settings import STRICT
from rlhf.training.backends.replicated import add_gradients
from rlhf.training.context import StageKeys
from rlhf.training.critics.base import CriticTrainerBase, StepPredictions, Updates, optimizer_of, value_metrics
from rlhf.training.critics.value_model import ValueHeadSettings, ValueModel
from rlhf.training.policy.model import Policy

_CUT = (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT)
#: Of the value loss: every token counts the same, whatever the reduction of the policy's loss.
_MEAN = Reduction(kind="token_mean")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Critic(ValueHeadSettings):
    """Value critic: estimates the expected return of a state, the baseline of advantages."""

    #: It learns beside trainers of several processes.
    spans_processes: ClassVar[bool] = True

    bootstrap: bool = True
    """Bootstrap truncated trajectories with the critic's value; false treats truncation as termination."""
    clip: Annotated[float, Field(gt=0)] | None = 0.5
    """Value clipping: maximum change of a value in one step, in units of the score; null is no bound."""

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about a bound on how far values move in a step that moves none."""
        stage = context.stage
        is_bound = self.clip is not None and self.clip != type(self)().clip and self.backbone != "policy"
        if is_bound and stage.epochs * stage.minibatches == 1:
            why = "makes one update per step, before which no value has moved"
            yield f"{context.stage_path} {why}: critic.clip has no effect"

    def start(self, stage: StageKeys, policy: Policy, start: Path | None, seed: int) -> CriticTrainer:
        """Return what trains it through a stage; see `CriticKind.start`."""
        return CriticTrainer(self, self.value_model(policy, start, seed), stage)


@plain_dataclass(frozen=True, kw_only=True)
class ValuePredictions(StepPredictions):
    """Predictions of state values.

    Attributes:
        rows: its own rows, with `Sample.values`; see `value_rows`.
        sampled: which places of each row are sampled tokens.
    """

    rows: list[Sample]
    sampled: list[Bools]


def value_rows(groups: Sequence[ScoredGroup], layout: Layout) -> tuple[list[Sample], list[Bools]]:
    """Rows of `make_samples`, one for one, with a mask of the tokens that need a value.

    That is at each sampled token, for the state before it, and at the place after each generation, for the state that
    its last token led to, in which the environment's reply is still unread. A token without meaning is added at the
    end of each row so that there is such a place; no value sees it.

    Returns:
        The rows, and which of their places are sampled tokens.
    """
    samples = bare_rows(groups, layout)
    return [_widened(sample) for sample in samples], [np.append(sample.mask, False) for sample in samples]


def bare_rows(groups: Sequence[ScoredGroup], layout: Layout) -> list[Sample]:
    """Return the rows of `make_samples` before any token has credit."""
    nothing = [
        Credit(tuple(tuple((0.0,) * g.n_tokens for g in t.generations) for t in group.trajectories)) for group in groups
    ]
    return make_samples(groups, nothing, layout)[0]


def _widened(sample: Sample) -> Sample:
    mask = np.append(sample.mask, False)
    mask[1:] |= sample.mask
    nothing = np.zeros(len(mask), np.float32)
    ids = np.append(sample.token_ids, sample.token_ids[-1])
    return Sample(ids, mask, nothing, nothing, sample.sequence, sample.group)


class CriticTrainer(CriticTrainerBase[Critic, ValueModel]):
    """Updates a value model in place; see `CriticTrainerBase`."""

    def __init__(self, settings: Critic, model: ValueModel, stage: StageKeys) -> None:
        self._stage = stage
        total = stage.steps * stage.epochs * stage.minibatches
        super().__init__(settings, model, optimizer_of(settings, model), total)

    # --- before anything is learnt from a step ---

    @torch.no_grad()
    def predict(self, groups: Sequence[ScoredGroup]) -> ValuePredictions:
        """Return what the critic expects of the states of a step; dropout is off."""
        begun = time.perf_counter()
        rows, sampled = value_rows(groups, self._stage.layout)
        self.model.eval()
        found, here = list(rows), current()
        packs = pack(rows, self._stage.max_tokens_per_microbatch, n_least=here.n)
        shares = [[rows[i] for i in members] for members in packs[here.rank :: here.n]]
        own = [self._values(collate(share, np.ones(len(share)))).cpu().numpy() for share in shares]
        for members, flat in zip(packs, in_turn(packs, here.gather(own, "the critic's values")), strict=True):
            ends = np.cumsum([rows[i].n_policy_tokens for i in members])[:-1]
            for i, part in zip(members, np.split(flat, ends), strict=True):
                found[i] = replace(rows[i], values=placed(part, rows[i].mask))
        values = list(_values_of(found, sampled, groups, bootstrap=self.settings.bootstrap))
        return ValuePredictions(rows=found, sampled=sampled, values=values, time_s=time.perf_counter() - begun)

    def _values(self, batch: PackedBatch) -> torch.Tensor:
        device = self.model.head.weight.device
        select = batch.select.to(device)
        out = packed_forward(self.model, batch.token_ids.to(device), batch.lengths.tolist(), select)
        return out[:, 0]

    # --- after ---

    def updates(self, seen: ValuePredictions, samples: Sequence[Sample], rng: Generator, step: int) -> Updates:
        """Make as many passes and minibatches as the policy's, over all rows. Raises TrainingError without returns."""
        stage = self._stage
        if any(s.returns is None for s in samples):
            raise TrainingError(
                "the critic has no training targets",
                where="critic",
                got=f"{type(stage.advantage).__name__} gave credit without returns",
                expected="Credit.returns_GNT of every group",
                hint="an estimator with needs_values = True must return Credit.returns_GNT",
            )
        self.model.holds_backbone = self.model.shared and self.is_warming(step)
        budget, n_least = stage.max_tokens_per_microbatch, current().n
        rows = _with_returns(seen, samples, bootstrap=self.settings.bootstrap)
        for _ in range(stage.epochs if rows else 0):
            for batches in pack_minibatches(rows, stage.minibatches, _MEAN, budget, rng, n_least=n_least):
                yield self._update(batches)

    def compare(self, seen: ValuePredictions, samples: Sequence[Sample]) -> dict[str, float]:
        """Metrics of values against returns over all sampled tokens."""
        own = [s.mask & ~_demonstrated(s)[:-1] for s in samples]
        values = [row.values[:-1][m] for row, m in zip(seen.rows, own, strict=True) if row.values is not None]
        returns = [s.returns[m] for s, m in zip(samples, own, strict=True) if s.returns is not None]
        if not any(map(len, values)):
            return {}
        return value_metrics(*(torch.from_numpy(np.concatenate(arrays)) for arrays in (values, returns)))

    def _update(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        self.model.train()
        self._stepper.optimizer.zero_grad(set_to_none=True)
        loss, clipped, here = 0.0, 0.0, current()
        for batch in batches[here.rank :: here.n]:
            now = self._values(batch)
            given = (batch.values, batch.returns, batch.weights)
            old, returns, weights = (x.to(now.device) for x in given if x is not None)
            output = value_loss(now, old, returns, weights, self.settings.clip)
            output.loss.backward()  # type: ignore[no-untyped-call]
            loss += float(output.loss.detach())
            clipped += float((weights * output.clipped).sum())
        groups = self._stepper.optimizer.param_groups
        add_gradients((p for group in groups for p in group["params"]), "the critic's gradients")
        loss, clipped = map(sum, zip(*here.gather((loss, clipped), "the critic's loss"), strict=True))
        norm = self._stepper.step()
        self.model.eval()
        figures = {"loss": loss, "clipped_share": clipped, "grad_norm": norm, "lr": self._stepper.lr}
        return {f"critic/{name}": value for name, value in figures.items()}


def _by_trajectory(rows: Sequence[Sample], parts: Sequence[Floats]) -> dict[int, Floats]:
    """Join what the rows of each trajectory have, in order."""
    found: dict[int, list[Floats]] = {}
    for row, part in zip(rows, parts, strict=True):
        found.setdefault(row.sequence, []).append(part)
    return {number: np.concatenate(arrays) for number, arrays in found.items()}


def _values_of(
    rows: Sequence[Sample], sampled: Sequence[Bools], groups: Sequence[ScoredGroup], *, bootstrap: bool
) -> Iterator[Values]:
    """Yield each group's values from those of the rows, by generation, and of truncated states."""
    values = [np.zeros(0, np.float32) if row.values is None else row.values for row in rows]
    tokens = _by_trajectory(rows, [v[s] for v, s in zip(values, sampled, strict=True)])
    last = {row.sequence: float(v[-1]) for row, v in zip(rows, values, strict=True)}
    number = 0
    for group in groups:
        values_GNT, bootstrap_values_G = [], []
        for trajectory in group.trajectories:
            counts = [g.n_tokens for g in trajectory.generations]
            flat = tokens.get(number, np.zeros(0, np.float32)).tolist()
            ends = np.cumsum([0, *counts]).tolist()
            values_GNT.append(tuple(tuple(flat[a:b]) for a, b in itertools.pairwise(ends)))
            bootstrap_values_G.append(last.get(number, 0.0) if bootstrap and trajectory.outcome in _CUT else 0.0)
            number += 1
        yield Values(tuple(values_GNT), tuple(bootstrap_values_G))


def _with_returns(seen: ValuePredictions, samples: Sequence[Sample], *, bootstrap: bool) -> list[Sample]:
    """Critic rows with their value targets; the mask is False where there is none.

    At a sampled token that is its return; after a generation it is the return of the next token that the trajectory
    sampled, before which nothing is earned. After the last one it is unknown, or 0 and never asked for. Without
    bootstrap nobody asks for a value after a generation. What a demonstration earned says nothing of the policy: rows
    of which nothing is left are left out.
    """
    returns = [s.returns[s.mask] for s in samples if s.returns is not None]
    whole = _by_trajectory(samples, returns)
    n_before: dict[int, int] = {}
    rows = []
    for row, is_sampled, sample in zip(seen.rows, seen.sampled, samples, strict=True):
        known = whole[row.sequence]
        first = n_before.get(row.sequence, 0)
        number_L = first + np.cumsum(is_sampled) - is_sampled  # of the token there, or of the next one
        n_before[row.sequence] = first + int(is_sampled.sum())
        mask = row.mask & (number_L < len(known)) if bootstrap else is_sampled
        mask &= ~_demonstrated(sample)
        wanted = np.zeros(len(row), np.float32)
        wanted[mask] = known[number_L[mask]]
        rows.append(replace(row.masked(mask), returns=wanted))
    return [row for row in rows if row.mask.any()]


def _demonstrated(sample: Sample) -> Bools:
    """Mask of a critic's row: tokens not written by the policy, and the token after each."""
    off = np.zeros(len(sample) + 1, np.bool_)
    if sample.off_policy is not None:
        off[:-1] |= sample.off_policy
        off[1:] |= sample.off_policy
    return off
