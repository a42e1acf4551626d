"""Replay: which trajectories are drawn, and how often; each stays whole, and its old log-probs stay its own."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.grpo import GRPO
from rlhf.losses.importance_correction import Truncated
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.hooks.replay import Replay, ReplayBuffer
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.update import update
from tests.training.tiny import collect, credit, policy

#: So that a step of Adam moves the policy far enough to be seen in a ratio.
FAST = AdamW(lr=0.05)


def row(advantage: float, sequence: int, n: int = 3, **changes: Any) -> Sample:
    """A prompt token and `n` sampled ones."""
    mask = np.arange(n + 1) > 0
    logprobs, advantages = (np.where(mask, x, 0).astype(np.float32) for x in (-1.0 - sequence, advantage))
    return replace(Sample(np.arange(n + 1), mask, logprobs, advantages, sequence, sequence), **changes)


def rows(*advantages: float) -> list[Sample]:
    return [row(a, i) for i, a in enumerate(advantages)]


def finished(buffer: ReplayBuffer, samples: list[Sample], seed: int = 0) -> list[Sample]:
    """The rows that a step trains on, which is then over."""
    found, _ = buffer.extend_samples(samples, np.random.default_rng(seed))
    buffer.learn()
    return found


def test_trajectories_are_drawn_by_the_size_of_their_advantage() -> None:
    # |A| / Σ |A| of .2, 0 and −.8: 800 of 1000 draws, deviation √(1000 · .8 · .2) = 12.6.
    buffer = ReplayBuffer(Replay(), 2)
    finished(buffer, rows(0.2, 0.0, -0.8))
    drawn: Counter[float] = Counter()
    for seed in range(1000):
        [again], figures = buffer.extend_samples([], np.random.default_rng(seed))
        drawn[round(float(again.advantages.min() + again.advantages.max()), 6)] += 1
        assert figures == {"replay/n_replayed": 1.0, "replay/n_kept": 2.0, "replay/age_mean": 1.0}
    assert set(drawn) == {0.2, -0.8} and abs(drawn[-0.8] - 800) < 65


def test_the_size_of_an_advantage_is_the_mean_over_the_tokens_of_all_rows() -> None:
    # (3 · .2 + 1 · 1) / 4 = .4
    buffer = ReplayBuffer(Replay(), 2)
    finished(buffer, [row(-0.2, 0), row(1.0, 0, n=1)])
    assert [t.weight for t in buffer.kept] == pytest.approx([0.4])


@pytest.mark.parametrize(
    ("n_full", "n_fresh", "max_share", "n"),
    [(8, 8, 1.0, 0), (8, 6, 1.0, 2), (8, 0, 1.0, 4), (8, 0, 0.25, 2), (8, 2, 0.3, 2), (4, 8, 1.0, 0), (8, 7, 0.1, 0)],
)
def test_a_step_is_filled_up_to_its_share(n_full: int, n_fresh: int, max_share: float, n: int) -> None:
    buffer = ReplayBuffer(Replay(max_share=max_share), n_full)
    finished(buffer, rows(1.0, -1.0, 0.5, -0.5))
    found, figures = buffer.extend_samples(rows(*[1.0] * n_fresh), np.random.default_rng(0))
    assert figures["replay/n_replayed"] == n
    assert len({s.sequence for s in found}) == len({s.group for s in found}) == n_fresh + n


def test_what_is_old_is_forgotten_and_the_oldest_goes_first() -> None:
    buffer = ReplayBuffer(Replay(max_age=2, capacity=3), 4)
    finished(buffer, rows(1.0, 2.0))
    assert [t.step for t in buffer.kept] == [0, 0]
    finished(buffer, rows(3.0, 4.0))
    assert [t.step for t in buffer.kept] == [0, 1, 1]  # three at most
    finished(buffer, [])
    assert [t.step for t in buffer.kept] == [1, 1]  # that of step 0 would be 3 steps old
    finished(buffer, [])
    assert buffer.kept == []


def test_what_is_replayed_is_not_kept_again() -> None:
    buffer = ReplayBuffer(Replay(max_age=1, max_share=1.0), 4)
    finished(buffer, rows(1.0, 2.0))
    assert len(finished(buffer, [])) == 2
    assert finished(buffer, []) == []


def test_a_step_that_is_not_finished_changes_nothing() -> None:
    buffer = ReplayBuffer(Replay(), 4)
    finished(buffer, rows(1.0))
    before = buffer.state_dict()
    buffer.extend_samples(rows(2.0, 3.0), np.random.default_rng(0))
    assert str(buffer.state_dict()) == str(before)


def test_what_another_wrote_is_not_replayed() -> None:
    mask = np.arange(4) > 0
    buffer = ReplayBuffer(Replay(), 4)
    finished(buffer, [row(1.0, 0, off_policy=mask), row(1.0, 1, off_policy=np.zeros(4, bool))])
    assert len(buffer.kept) == 1


def same(a: Sample, b: Sample) -> bool:
    """Whether everything is equal to the bit."""
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(
        x is y is None or (np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype) for x, y in pairs
    )


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 0.5, -1.0]), st.integers(1, 2)), max_size=4), min_size=1, max_size=5
    ),
    max_age=st.integers(1, 3),
)
def test_trajectories_stay_whole_and_a_stored_buffer_draws_the_same(
    steps: list[list[tuple[float, int]]], max_age: int
) -> None:
    """Each trajectory is recognised by its log-probs, and has as many rows as its advantage says."""
    first = ReplayBuffer(Replay(max_age=max_age, max_share=1.0), 6)
    for number, step in enumerate(steps):
        made = [
            row(
                a,
                i,
                sampler_logprobs=np.where(np.arange(4) > 0, np.float32(-number - i / 8), np.float32(0)),
                adapter="plan" if i % 2 else "",
            )
            for i, (a, n) in enumerate(step)
            for _ in range(n)
        ]
        second = ReplayBuffer(first.settings, 6)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        found, again = finished(first, made, number), finished(second, made, number)
        assert len(found) == len(again) and all(same(a, b) for a, b in zip(found, again, strict=True))
        assert [s.adapter for s in found] == [s.adapter for s in again]
        of: dict[int, list[Sample]] = {}
        for s in found[len(made) :]:
            of.setdefault(s.sequence, []).append(s)
        for parts in of.values():
            assert len({float(p.sampler_logprobs[1]) for p in parts}) == 1 and parts[0].advantages.any()
            born, i = divmod(-float(parts[0].sampler_logprobs[1]), 1)
            assert len(parts) == steps[int(born)][int(i * 8)][1] and number - born <= max_age


# --- on a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("keys", [{}, {"epochs": 2}, {"correction": Truncated(level="sequence")}], ids=str)
def test_old_log_probs_stay_those_of_the_policy_that_sampled(shares: bool, keys: dict[str, Any]) -> None:
    stage = PolicyGradient(optimizer=FAST, tasks_per_step=2, group_size=3, replay=Replay(max_share=1.0), **keys)
    made = policy()
    groups = collect(made)
    samples, _ = make_samples(groups, credit(groups, GRPO()))
    trainer, buffer = TorchTrainer(made, FAST, 9), ReplayBuffer(Replay(max_share=1.0), 6)
    before = trainer.compute_logprobs(samples, temperature=1.0, max_tokens=999)
    update(stage, trainer, samples, np.random.default_rng(0), shares, [buffer])
    buffer.learn()
    assert trainer.n_updates == keys.get("epochs", 1)
    again, _ = buffer.extend_samples([], np.random.default_rng(1))
    by_ids = {row.token_ids.tobytes(): old for row, old in zip(samples, before, strict=True)}
    assert again
    now = trainer.compute_logprobs(again, temperature=1.0, max_tokens=999)
    for row_, moved in zip(again, now, strict=True):
        assert row_.old_logprobs is not None
        old = row_.old_logprobs[row_.mask]
        np.testing.assert_allclose(old, by_ids[row_.token_ids.tobytes()], atol=2e-5)
        assert np.abs(old - moved).max() > 1e-2  # the policy has moved since, and they have not


@pytest.mark.parametrize("shares", [True, False])
def test_the_ratio_of_replayed_tokens_is_that_to_the_policy_that_sampled(shares: bool) -> None:
    stage = PolicyGradient(optimizer=FAST, tasks_per_step=2, group_size=3, replay=Replay(max_share=1.0))
    made = policy()
    groups = collect(made)
    samples, _ = make_samples(groups, credit(groups, GRPO()))
    trainer, buffer = TorchTrainer(made, FAST, 9), ReplayBuffer(Replay(max_share=1.0), 6)
    first = update(stage, trainer, samples, np.random.default_rng(0), shares, [buffer])
    assert first["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    buffer.learn()
    again, _ = buffer.extend_samples([], np.random.default_rng(1))
    logp = trainer.compute_logprobs(again, temperature=1.0, max_tokens=999)
    ratios = np.concatenate([np.exp(x - s.old_logprobs[s.mask]) for x, s in zip(logp, again, strict=True)])  # type: ignore[index]
    second = update(stage, trainer, [], np.random.default_rng(1), shares, [buffer])
    assert second["replay/n_replayed"] == second["batch/n_trained_trajectories"] == len({s.sequence for s in again})
    assert second["loss/ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert abs(second["loss/ratio_max"] - 1) > 0.05


@pytest.mark.parametrize("shares", [True, False])
def test_fresh_and_replayed_rows_train_together(shares: bool) -> None:
    stage = PolicyGradient(optimizer=FAST, tasks_per_step=2, group_size=3, minibatches=2, replay=Replay(max_share=1.0))
    made = policy()
    groups = collect(made)
    samples, _ = make_samples(groups, credit(groups, GRPO()))
    trainer, buffer = TorchTrainer(made, FAST, 9), ReplayBuffer(Replay(max_share=1.0), 6)
    for n in (6, 2, 0):
        fresh = [s for s in samples if s.sequence < n and s.advantages.any()]
        values = update(stage, trainer, fresh, np.random.default_rng(n), shares, [buffer])
        buffer.learn()
        assert values["batch/n_trained_trajectories"] == len({s.sequence for s in fresh}) + values["replay/n_replayed"]
        n_fresh = sum(s.n_policy_tokens for s in fresh)
        assert (values["batch/n_policy_tokens"] > n_fresh) == (values["replay/n_replayed"] > 0)
    assert values["replay/n_replayed"] > 0 and values["replay/age_mean"] > 1.0
