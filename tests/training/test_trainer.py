"""The trainer: micro-batches add up, the reference and the temperature enter, a broken gradient does no harm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.pack import PackedBatch, pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.grpo import GRPO
from rlhf.errors import TrainingError
from rlhf.losses.policy_loss import LossOutput
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from rlhf.training.backends.optimizer import MAX_SKIPPED, AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.update import update
from tests.training.alike import assert_alike
from tests.training.tiny import collect, credit, gradient, parameters, policy

#: An ε this large makes the step of Adam a smooth function of the gradient, so that rounding stays rounding.
SMOOTH = AdamW(lr=0.1, eps=1e-2, max_grad_norm=None)


def samples_of(made_by: Policy, **how: Any) -> list[Sample]:
    groups = collect(made_by, **how)
    samples, _ = make_samples(groups, credit(groups, GRPO()))
    assert any(s.advantages.any() for s in samples)
    return samples


def packed(samples: list[Sample], max_tokens: int = 100_000, reduction: Reduction | None = None) -> list[PackedBatch]:
    [batches] = pack_minibatches(samples, 1, reduction or Reduction(), max_tokens)
    return batches


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean"])
def test_micro_batches_change_memory_and_not_the_update(lora: Lora | None, kind: Any) -> None:
    samples = samples_of(policy(lora=lora))
    longest = max(map(len, samples))
    updated, metrics = [], []
    for budget, n_batches in ((longest, range(3, 7)), (100_000, range(1, 2))):
        fresh = policy(lora=lora)
        begin = parameters(fresh.model)
        batches = packed(samples, budget, Reduction(kind=kind))
        assert len(batches) in n_batches
        metrics.append(TorchTrainer(fresh, SMOOTH, 1).update(batches, PPOClip(entropy_coef=0.01)))
        updated.append(parameters(fresh.model))
        assert (updated[-1] - begin).abs().max() > 1e-3
    torch.testing.assert_close(updated[0], updated[1], atol=1e-6, rtol=0)
    assert_alike(metrics[0], metrics[1], atol=1e-5, rtol=1e-6)


def test_what_the_engine_sampled_has_the_trainers_log_probs() -> None:
    # Temperature 0.7 is part of the distribution that was sampled from, so the trainer divides by it too.
    made_by = policy()
    [batch] = packed(samples_of(made_by, temperature=0.7))
    trainer = TorchTrainer(made_by, AdamW(), 1)
    with torch.no_grad():
        same = trainer.read(made_by.model, batch, (), temperature=0.7).logprobs
        other = trainer.read(made_by.model, batch, (), temperature=1.0).logprobs
    torch.testing.assert_close(same, batch.sampler_logprobs, atol=1e-4, rtol=0)
    assert (other - batch.sampler_logprobs).abs().mean() > 0.05
    values = trainer.update([batch], PPOClip(), temperature=0.7)
    assert values["loss/sampler_logprob_diff_max"] < 1e-4 and values["loss/ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_entropy_is_that_of_the_whole_distribution() -> None:
    made_by = policy()
    [batch] = packed(samples_of(made_by))
    trainer = TorchTrainer(made_by, AdamW(), 1)
    with torch.no_grad():
        found = trainer.read(made_by.model, batch, {"entropy"}, temperature=1.0)
        logp, entropy = found.logprobs, found.entropy
    assert entropy is not None and entropy.shape == logp.shape
    n_vocab = len(made_by.tokenizer)
    assert (entropy > 0).all() and (entropy < np.log(n_vocab)).all()
    # The mean of −log p over tokens sampled from p estimates the entropy: some hundred tokens, so within 0.5 nats.
    assert float(entropy.mean()) == pytest.approx(float(-logp.mean()), abs=0.5)


def test_imitation_lowers_the_loss_that_it_logs() -> None:
    made_by = policy()
    samples = [replace(s, advantages=s.mask.astype(np.float32)) for s in samples_of(made_by)]
    batches = packed(samples)
    trainer = TorchTrainer(made_by, AdamW(lr=1e-2, max_grad_norm=None), 30)
    with torch.no_grad():
        expected = -float(trainer.read(made_by.model, batches[0], (), temperature=1.0).logprobs.mean())
    losses = [trainer.sft_update(batches)["supervised/loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < 0.7 * losses[0]


def test_imitation_weighs_tokens_by_their_advantages() -> None:
    # Weight 0 (an action that was not understood) and weight 0.5 (an observation) against the definition.
    made_by = policy()
    whole = samples_of(made_by)[0]
    weights = np.where(np.arange(len(whole)) % 3 == 0, 0.0, np.where(np.arange(len(whole)) % 3 == 1, 0.5, 1.0))
    everything = np.arange(len(whole)) > 0
    sample = replace(
        whole, mask=everything, advantages=np.where(everything, weights, 0).astype(np.float32),
        sampler_logprobs=np.zeros(len(whole), np.float32),
    )  # fmt: skip
    TorchTrainer(made_by, SMOOTH, 1).sft_update(packed([sample]))
    found = gradient(made_by.model)
    again = policy()
    ids = torch.from_numpy(whole.token_ids.copy())
    logp = again.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    (-(torch.from_numpy(sample.advantages[1:].copy()) * logp).sum() / (len(ids) - 1)).backward()
    torch.testing.assert_close(found, gradient(again.model), atol=1e-5, rtol=1e-4)


# --- the frozen reference ---------------------------------------------------------------------------------------------


def with_reference(lora: Lora | None, folder: Path) -> Policy:
    made = policy(lora=lora)
    made.save(folder / "policy")
    made.keep_reference(folder)
    return made


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_a_kl_term_pulls_back_to_where_the_stage_began(tmp_path: Path, lora: Lora | None) -> None:
    made_by = with_reference(lora, tmp_path)
    samples = samples_of(made_by)
    silent = packed([replace(s, advantages=np.zeros_like(s.advantages)) for s in samples])
    measure = PPOClip(kl="k3", kl_coef=0.0)
    first = TorchTrainer(made_by, AdamW(lr=1e-2), 1).update(packed(samples), measure)
    assert first["loss/kl_ref"] == pytest.approx(0, abs=1e-6), "policy and reference are the same at first"
    trainer = TorchTrainer(made_by, AdamW(lr=1e-2), 20)
    for _ in range(3):
        trainer.update(packed(samples), Reinforce())
    away = trainer.update(silent, measure)["loss/kl_ref"]
    assert away > 1e-3, "the policy has moved and the reference has not"
    pull = TorchTrainer(made_by, AdamW(lr=3e-3), 40)
    for _ in range(40):
        pull.update(silent, PPOClip(kl="k2", kl_coef=1.0))
    assert pull.update(silent, measure)["loss/kl_ref"] < 0.3 * away


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_the_kl_term_is_that_of_the_definition(tmp_path: Path, lora: Lora | None) -> None:
    made_by = with_reference(lora, tmp_path)
    [batch] = packed(samples_of(made_by))
    trainer = TorchTrainer(made_by, AdamW(lr=1e-3), 9)
    with torch.no_grad():
        start = trainer.read(made_by.model, batch, (), temperature=1.3).logprobs
    for _ in range(3):
        trainer.update([batch], Reinforce())
    with torch.no_grad():
        now = trainer.read(made_by.model, batch, (), temperature=1.3).logprobs
    d = now - start
    assert 0.01 < d.abs().max() < 2, "the policy has moved, and the bounds of k3 do not bind"
    values = trainer.update([batch], PPOClip(kl="k3", kl_coef=0.5), temperature=1.3)
    assert values["loss/kl_ref"] == pytest.approx(float((torch.exp(-d) - 1 + d).mean()), rel=1e-3)


# --- gradients that are not finite ------------------------------------------------------------------------------------


def broken(batch: PackedBatch) -> PackedBatch:
    return replace(batch, weights=torch.full_like(batch.weights, torch.inf))


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda output: None, "NoneType"),
        (lambda output: output.loss, "Tensor"),
        (lambda output: LossOutput(output.loss.detach()), "LossOutput with a tensor of shape [] without a gradient"),
        (lambda output: LossOutput(output.loss[None]), "LossOutput with a tensor of shape [1]"),
        (lambda output: LossOutput(1.0), "LossOutput with float"),
    ],
)
def test_what_a_loss_returns_and_cannot_be_learnt_from_is_refused(returned: Any, got: str) -> None:
    class Own(Reinforce):
        def __call__(self, inputs: Any) -> Any:
            return returned(super().__call__(inputs))

    made = policy()
    with pytest.raises(TrainingError, match="a loss returned a value without a gradient") as caught:
        TorchTrainer(made, SMOOTH, 1).update(packed(samples_of(made)), Own())
    assert caught.value.where == "Own" and caught.value.got == got


def test_an_update_without_a_finite_gradient_is_left_out_and_counted() -> None:
    made_by = policy()
    [batch] = packed(samples_of(made_by))
    trainer = TorchTrainer(made_by, AdamW(lr=1e-2), 10)
    begin = parameters(made_by.model)
    values = trainer.update([broken(batch)], Reinforce())
    assert torch.equal(parameters(made_by.model), begin)
    assert (trainer.n_updates, trainer.n_skipped) == (0, 1) and not np.isfinite(values["optimizer/grad_norm"])
    assert np.isfinite(trainer.update([batch], Reinforce())["optimizer/grad_norm"])
    assert (trainer.n_updates, trainer.n_skipped) == (1, 1)
    assert not torch.equal(parameters(made_by.model), begin) and torch.isfinite(parameters(made_by.model)).all()


def test_many_broken_gradients_in_a_row_stop_the_training() -> None:
    made_by = policy()
    [batch] = packed(samples_of(made_by))
    trainer = TorchTrainer(made_by, AdamW(lr=1e-2), 10)
    for _ in range(MAX_SKIPPED - 1):
        trainer.update([broken(batch)], Reinforce())
    trainer.update([batch], Reinforce())  # a good one in between begins the count anew
    begin = parameters(made_by.model)
    for _ in range(MAX_SKIPPED - 1):
        trainer.update([broken(batch)], Reinforce())
    with pytest.raises(TrainingError, match=f"{MAX_SKIPPED} updates in a row") as error:
        trainer.update([broken(batch)], Reinforce())
    assert "optimizer.lr" in error.value.hint
    assert torch.equal(parameters(made_by.model), begin)
    assert (trainer.n_updates, trainer.n_skipped) == (1, 2 * MAX_SKIPPED - 1)


def test_the_logged_rate_and_norm_are_those_of_the_update() -> None:
    made_by = policy()
    [batch] = packed(samples_of(made_by))
    trainer = TorchTrainer(made_by, AdamW(lr=1.0, warmup_steps=3, max_grad_norm=0.01), 10)
    rates, norms = [], []
    for _ in range(4):
        values = trainer.update([batch], Reinforce())
        rates.append(values["optimizer/lr"])
        norms.append(values["optimizer/grad_norm"])
        assert float(gradient(made_by.model).norm()) == pytest.approx(0.01, rel=1e-3), "clipped after it is measured"
    assert rates == [0.25, 0.5, 0.75, 1.0] and min(norms) > 0.01


def test_the_logged_rate_of_a_step_is_that_of_its_last_update() -> None:
    made_by = policy()
    trainer = TorchTrainer(made_by, AdamW(lr=1.0, warmup_steps=3), 10)
    stage = PolicyGradient(epochs=2, minibatches=2)
    values = update(stage, trainer, samples_of(made_by), np.random.default_rng(0), True)
    assert (values["optimizer/n_updates"], values["optimizer/lr"]) == (4, 1.0)
