"""Losses over the tokens of whole trajectories, and over rows of others, on a real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlhf.training.backends.torch as trainer_module
from agents.chat import ChatAgent
from agents.memory.window import Window
from rlhf.batching.pack import collate, pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.errors import DataError
from rlhf.losses.contrib.luffy import LUFFY
from rlhf.losses.contrib.rover import ROVER
from rlhf.losses.contrib.shiq import ShiQ
from rlhf.losses.importance_correction import Criterion, Rejection, Truncated
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.hooks.replay import Replay
from rlhf.training.old_logprobs import prepare
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.update import update
from tests.training.tiny import collect, credit, parameters, policy

SETTINGS = AdamW(lr=0.1, eps=1e-2, max_grad_norm=None)
LOSSES: dict[str, Any] = {"shiq": ShiQ(beta=0.5), "rover": ROVER()}
TWO: dict[str, Any] = {"epochs": 2}


@pytest.fixture(scope="module")
def rows() -> list[Sample]:
    """Trajectories whose prompts are rewritten: each generation is a row of its own."""
    made = collect(policy(), agent=ChatAgent(system="", memory=Window(turns=0)))
    samples, counters = make_samples(made, credit(made, DrGRPO()))
    assert counters["batch/n_rewritten_prompts"] > 0
    return samples


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of another policy."""
    folder = tmp_path_factory.mktemp("reference")
    policy(seed=1).save(folder / "policy")
    return folder


def one_step(
    samples: list[Sample], loss: Any, reference: Path, *, shares: bool = True, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Parameters and figures after one step of a fresh policy."""
    stage = PolicyGradient(optimizer=SETTINGS, loss=loss, **settings)
    made = policy()
    made.model.double()  # so that what differs is the method: three updates multiply the rounding of float32
    made.keep_reference(reference)
    values = update(stage, TorchTrainer(made, SETTINGS, 9), samples, np.random.default_rng(0), shares)
    return parameters(made.model), values


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shares", [True, False], ids=["shared", "corrected"])
@pytest.mark.parametrize("updates", [{}, {"epochs": 2, "minibatches": 2}], ids=["one", "four"])
def test_micro_batches_that_cut_trajectories_change_nothing(
    rows: list[Sample], reference: Path, name: str, shares: bool, updates: dict[str, int]
) -> None:
    expected, values = one_step(rows, LOSSES[name], reference, shares=shares, **updates)
    assert (expected - parameters(policy().model)).abs().max() > 1e-3
    for budget in (max(map(len, rows)), 2 * max(map(len, rows))):
        found, same = one_step(
            rows, LOSSES[name], reference, shares=shares, max_tokens_per_microbatch=budget, **updates
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert same["loss/policy"] == pytest.approx(values["loss/policy"], rel=1e-5)


def test_what_it_costs(rows: list[Sample], reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, passes = trainer_module.packed_forward, []

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        passes.append(torch.is_grad_enabled())
        return whole(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "packed_forward", forward)
    narrow = {"max_tokens_per_microbatch": max(map(len, rows))}
    for loss, settings, n_with, n_without in (
        (ShiQ(), {}, 1, 1),  # one pass of policy and reference each
        (ROVER(), {}, 1, 0),  # the means of the old policy are those of the only update
        (ROVER(), TWO, 2, 1),  # and are computed once before several
    ):
        passes.clear()
        one_step(rows, loss, reference, **settings)
        assert (passes.count(True), passes.count(False)) == (n_with, n_without), loss
    passes.clear()
    one_step(rows, ShiQ(), reference, **narrow)  # cut trajectories: everything once more without gradient
    n_batches = passes.count(True)
    assert n_batches > 1 and passes.count(False) == 3 * n_batches


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_what_is_read_is_that_of_the_definition(
    rows: list[Sample], reference: Path, lora: Lora | None, tmp_path: Path
) -> None:
    made = policy(lora=lora)
    if lora is not None:
        made.save(tmp_path / "policy")
        reference = tmp_path
    made.keep_reference(reference)
    trainer = TorchTrainer(made, SETTINGS, 1)
    batch = collate(rows[:1], np.ones(1))
    ids, temperature = torch.from_numpy(rows[0].token_ids.copy()), 0.7
    with torch.no_grad():
        found = trainer.read(
            made.model, batch, {"entropy", "log_normalizers", "mean_logprobs"}, temperature=temperature
        )
        logits = made.model(ids[None], use_cache=False).logits[0][batch.select] / temperature
    log_p = logits.log_softmax(-1)
    expected = {
        "log_normalizers": logits.logsumexp(-1),
        "mean_logprobs": log_p.mean(-1),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
        "logprobs": log_p.gather(-1, batch.targets[:, None])[:, 0],
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), values, atol=1e-4, rtol=1e-4)
    assert trainer.read(made.model, batch, (), temperature=1.0).log_normalizers is None


def test_the_means_of_the_old_policy_are_those_before_the_first_update(rows: list[Sample]) -> None:
    trainer = TorchTrainer(policy(), SETTINGS, 9)
    once, _, _ = prepare(PolicyGradient(loss=ROVER()), trainer, rows, shares_policy=True)
    assert all(s.old_mean_logprobs is None for s in once)
    replayed, _, _ = prepare(PolicyGradient(loss=ROVER(), replay=Replay()), trainer, rows, shares_policy=True)
    assert all(s.old_mean_logprobs is not None for s in replayed), "what is replayed later is old then"
    several = PolicyGradient(loss=ROVER(), epochs=2, temperature=0.7)
    kept, _, _ = prepare(several, trainer, rows, shares_policy=True)
    batch = collate(rows, np.ones(len(rows)))
    with torch.no_grad():
        means = trainer.read(trainer.policy.model, batch, {"mean_logprobs"}, temperature=0.7).mean_logprobs
    assert means is not None
    found = np.concatenate([s.old_mean_logprobs[s.mask] for s in kept if s.old_mean_logprobs is not None])
    np.testing.assert_allclose(found, means.numpy(), atol=1e-4)
    assert all(s.old_logprobs is None for s in kept), "an engine that shares the weights is trusted"


def test_one_update_of_rover_is_the_policy_gradient_at_twice_the_rate(rows: list[Sample], reference: Path) -> None:
    # Q and the next values are 0: l = A², its gradient −2 A ∇log π; SGD would double, Adam with a large ε nearly does.
    made, twice = policy(), policy()
    [batches] = pack_minibatches(rows, 1, Reduction(), 100_000)
    slow = AdamW(lr=1e-30, max_grad_norm=None)
    norm = TorchTrainer(made, slow, 1).update(batches, PPOClip())["optimizer/grad_norm"]
    found = TorchTrainer(twice, slow, 1).update(batches, ROVER())["optimizer/grad_norm"]
    assert found == pytest.approx(2 * norm, rel=1e-3)


# --- tokens that the policy did not write ----------------------------------------------------------------------------


def by_another(sample: Sample, advantage: float = 1.0) -> Sample:
    """A demonstration: its tokens are another's, and what it is worth is given."""
    return replace(
        sample,
        sequence=99,
        sampler_logprobs=np.zeros_like(sample.sampler_logprobs),
        advantages=np.where(sample.mask, np.float32(advantage), np.float32(0)),
        off_policy=sample.mask.copy(),
    )


def logprob_of(made: Policy, sample: Sample) -> float:
    return float(TorchTrainer(made, SETTINGS, 1).compute_logprobs([sample], temperature=1.0, max_tokens=4096)[0].mean())


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "corrected"])
def test_luffy_learns_what_another_shows_beside_its_own_attempts(rows: list[Sample], shares: bool) -> None:
    made = policy()
    shown = by_another(rows[0])
    before = logprob_of(made, shown)
    stage = PolicyGradient(loss=LUFFY(), optimizer=AdamW(lr=1e-2), epochs=10)
    values = update(
        stage, TorchTrainer(made, stage.optimizer, 10), [*rows[1:], shown], np.random.default_rng(0), shares
    )
    assert logprob_of(made, shown) > before + 0.5
    n_tokens = sum(s.n_policy_tokens for s in rows)
    assert values["loss/off_policy_share"] == pytest.approx(shown.n_policy_tokens / n_tokens)
    assert values["loss/sampler_logprob_diff_max"] < 1e-3, "what the engine did not sample does not count against it"


def test_other_losses_refuse_tokens_of_another(rows: list[Sample]) -> None:
    [batches] = pack_minibatches([by_another(rows[0])], 1, Reduction(), 4096)
    with pytest.raises(DataError, match=r"PPOClip(.|\n)*luffy"):
        TorchTrainer(policy(), SETTINGS, 1).update(batches, PPOClip())


@pytest.mark.parametrize("correction", [Truncated(max_weight=1.05), Rejection(criteria=(Criterion(at_most=1e-12),))])
@pytest.mark.parametrize("updates", [{}, TWO], ids=["one", "two"])
def test_a_correction_is_for_what_the_engine_sampled(
    rows: list[Sample], reference: Path, correction: Any, updates: dict[str, Any]
) -> None:
    # With nobody else's rows the same figures; and where a rejection leaves nothing else, the demonstration remains.
    shown = by_another(rows[0])
    how: dict[str, Any] = {"shares": False, "correction": correction, **updates}
    _, alone = one_step(rows[1:], LUFFY(), reference, **how)
    moved, mixed = one_step([*rows[1:], shown], LUFFY(), reference, **how)
    for name in (n for n in alone if "/sampler_" in n):
        assert mixed[name] == pytest.approx(alone[name], rel=1e-6, abs=1e-9), name
    assert (moved - parameters(policy().model)).abs().max() > 1e-4
    [kept] = [s for s in prepare(PolicyGradient(loss=LUFFY(), correction=correction, epochs=2),
                                 TorchTrainer(policy(), SETTINGS, 1), [*rows[1:], shown], shares_policy=False)[0]
              if s.sequence == 99]  # fmt: skip
    assert kept.correction is not None and kept.correction[kept.mask].tolist() == [1.0] * shown.n_policy_tokens
    assert kept.n_policy_tokens == shown.n_policy_tokens
