"""An engine that is off, on a real model: what a step costs, that packing does not show, and the true gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import rlhf.training.backends.torch as trainer_module
from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.grpo import GRPO
from rlhf.errors import TrainingError
from rlhf.inference.embedded.model_probe import has_dropout
from rlhf.losses.importance_correction import Bypass, Clipped, Correction, Criterion, Masked, Rejection, Truncated
from rlhf.losses.mismatch import CorrectionOutput
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.loop import update
from rlhf.training.old_logprobs import prepare
from rlhf.training.policy.lora import Lora
from rlhf.training.policy.model import Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training.tiny import collect, credit, gradient, parameters, policy

#: An ε this large makes the step of Adam a smooth function of the gradient, so that rounding stays rounding.
SMOOTH = AdamW(lr=0.1, eps=1e-2, max_grad_norm=None)
OFF = 0.02
CORRECTIONS: dict[str, Correction] = {
    "truncated": Truncated(max_weight=1.05),
    "sequence": Truncated(level="sequence", batch_normalize=True),
    "clipped": Clipped(level="geometric", min_weight=0.97, max_weight=1.03),
    "masked": Masked(min_weight=0.95, max_weight=1.05, opsm_delta=1e-4),
    "rejection": Rejection(criteria=(Criterion(statistic="k3", over="token", at_most=1e-3),)),
    "rejection of trajectories": Rejection(criteria=(Criterion(over="mean", at_least=0.98, at_most=1.1),)),
}


def another(made: Policy, size: float = OFF, seed: int = 7) -> Policy:
    """The policy as an engine with coarser numbers has it: every parameter off by about `size` of itself."""
    other = copy.deepcopy(made)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1 + size * torch.randn(p.shape, generator=generator))
    return other


def groups_of(sampled_by: Policy) -> Any:
    groups = collect(sampled_by)
    return groups, credit(groups, GRPO())


@pytest.fixture(scope="module")
def off() -> Any:
    """Groups whose tokens were sampled by an engine that is off, and their credit."""
    return groups_of(another(policy()))


def rows_of(made: Any, layout: Any = "trajectory") -> list[Sample]:
    samples, _ = make_samples(*made, layout)
    assert any(s.advantages.any() for s in samples)
    return samples


def one_step(samples: list[Sample], *, shares: bool = False, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Parameters after one step of a fresh policy, and what was logged."""
    stage = PolicyGradient(optimizer=SMOOTH, **settings)
    made = policy()
    values = update(stage, TorchTrainer(made, SMOOTH, 9), samples, np.random.default_rng(0), shares)
    return parameters(made.model), values


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each forward pass inside had a gradient."""
    passes: list[bool] = []
    whole = trainer_module.packed_forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        passes.append(torch.is_grad_enabled())
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "packed_forward", forward)
        yield passes


def test_what_a_step_costs(off: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = rows_of(off)
    for settings, shares, expected in (
        ({}, False, [True]),  # one update: the old log-probs are found in it
        ({"epochs": 2}, False, [False, True, True]),  # several: one pass before the first
        ({"correction": Truncated(level="sequence")}, False, [False, True]),  # a trajectory may lie in several batches
        ({"epochs": 2, "correction": Bypass()}, False, [True, True]),
        ({"epochs": 2}, True, [True, True]),
        ({"correction": Rejection()}, True, [True]),
    ):
        with counted(monkeypatch) as passes:
            one_step(samples, shares=shares, **settings)
        assert passes == expected, (settings, shares)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("updates", [{}, {"epochs": 2, "minibatches": 2}], ids=["one", "four"])
def test_neither_micro_batches_nor_layout_change_a_step(off: Any, name: str, updates: dict[str, int]) -> None:
    folded, unfolded = rows_of(off), rows_of(off, "generation")
    assert len(unfolded) > len(folded)
    how = {"correction": CORRECTIONS[name], **updates}
    expected, metrics = one_step(folded, **how)
    assert (expected - parameters(policy().model)).abs().max() > 1e-3
    for samples, budget in ((folded, max(map(len, folded))), (unfolded, 100_000), (unfolded, max(map(len, folded)))):
        found, same = one_step(samples, max_tokens_per_microbatch=budget, **how)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        for key in (k for k in metrics if k.startswith("loss/sampler_")):
            assert same[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-5), key
    assert metrics["loss/sampler_logprob_diff_mean"] > 0.01 and metrics["loss/sampler_ess"] < 0.9999


def test_one_update_and_a_pass_before_it_come_to_the_same(off: Any) -> None:
    class Whole(Truncated):
        per_token = False  # type: ignore[assignment]

    samples = rows_of(off)
    within, values = one_step(samples, correction=Truncated(max_weight=1.05))
    before, same = one_step(samples, correction=Whole(max_weight=1.05))
    torch.testing.assert_close(within, before, atol=1e-6, rtol=0)
    assert same == pytest.approx(values, rel=1e-3, abs=1e-6)


def test_an_engine_that_shares_the_weights_is_trusted_to_the_bit() -> None:
    # As if there were no correction: the update by hand, with the engine's log-probs for the old ones.
    samples = rows_of(groups_of(policy()))
    for correction in (Truncated(), Rejection(), Bypass()):
        found, values = one_step(samples, shares=True, correction=correction)
        made = policy()
        [batches] = pack_minibatches(samples, 1, Reduction(), 16384, np.random.default_rng(0))
        assert all(b.old_logprobs is None for b in batches)
        by_hand = TorchTrainer(made, SMOOTH, 9).update(batches, PPOClip())
        assert torch.equal(found, parameters(made.model))
        assert {k: values[k] for k in by_hand} == by_hand
        assert values["loss/sampler_logprob_diff_max"] < 1e-4 and values["loss/sampler_ess"] == pytest.approx(
            1, abs=1e-6
        )
        assert "loss/sampler_weight_mean" not in values


def test_an_engine_that_agrees_needs_no_correction() -> None:
    samples = rows_of(groups_of(policy()))
    plain, _ = one_step(samples, shares=True, epochs=2)
    for name, correction in {**CORRECTIONS, "default": Truncated()}.items():
        if getattr(correction, "opsm_delta", None) is None:  # its δ is of the size of rounding
            found, values = one_step(samples, epochs=2, correction=correction)
            torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)
            assert values["loss/sampler_ess"] == pytest.approx(1, abs=1e-6), name
            assert values["loss/sampler_weight_mean"] == pytest.approx(1, abs=1e-4)


def test_what_is_logged_is_of_the_weights_that_sampled(off: Any) -> None:
    # Whatever the updates do afterwards; and the policy's own movement is in the ratio, which begins at 1.
    samples = rows_of(off)
    _, one = one_step(samples)
    _, many = one_step(samples, epochs=3)
    for name in one:
        if name.startswith("loss/sampler_"):
            assert many[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    assert one["loss/ratio_max"] == 1 and one["loss/approx_kl"] == 0
    assert many["loss/ratio_max"] > 1.01
    _, bypassed = one_step(samples, correction=Bypass())
    assert bypassed["loss/ratio_max"] > 1.01
    assert bypassed["loss/sampler_kl_k3"] == pytest.approx(one["loss/sampler_kl_k3"], rel=1e-3)


def test_a_step_of_which_nothing_is_left_makes_no_update(off: Any) -> None:
    none = Rejection(criteria=(Criterion(statistic="k3", over="max", at_most=1e-12),))
    found, values = one_step(rows_of(off), correction=none)
    assert torch.equal(found, parameters(policy().model))
    assert values["optimizer/n_updates"] == 0 and values["loss/sampler_dropped_share"] == 1


def test_a_correction_that_raises_is_named(off: Any) -> None:
    class Broken:
        def __init__(self, per_token: bool) -> None:
            self.per_token = per_token

        def __call__(self, inputs: Any) -> CorrectionOutput:
            raise KeyError("no luck")

    for per_token in (True, False):
        with pytest.raises(TrainingError, match="the correction of trainer and engine") as caught:
            one_step(rows_of(off), correction=Broken(per_token))
        assert "no luck" in caught.value.got


def test_dropout_does_not_enter_the_old_log_probs(off: Any) -> None:
    made = policy()
    made.model.train()
    for module in made.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    samples = rows_of(off)
    trainer = TorchTrainer(made, SMOOTH, 9)
    stage = PolicyGradient(epochs=2)
    rows, _, rest = prepare(stage, trainer, samples, shares_policy=False)
    plain = TorchTrainer(policy(), SMOOTH, 9).compute_logprobs(samples, temperature=1.0, max_tokens=16384)
    assert rest is None
    for row, expected in zip(rows, plain, strict=True):
        assert row.old_logprobs is not None
        np.testing.assert_allclose(row.old_logprobs[row.mask], expected, atol=1e-5)


def test_attention_that_drops_out_is_compared_with_the_engine_too(off: Any) -> None:
    made = policy()
    assert not has_dropout(made.model)
    for module in made.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert has_dropout(made.model)
    rows, _, rest = prepare(PolicyGradient(), TorchTrainer(made, SMOOTH, 9), rows_of(off), shares_policy=False)
    assert rest is None and all(row.old_logprobs is not None for row in rows), "not in the pass that drops out"


def test_adapters_that_drop_out_are_compared_with_the_engine_as_a_whole() -> None:
    made = policy(lora=Lora(rank=4, dropout=0.5))
    generator = torch.Generator().manual_seed(1)
    for name, p in made.model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.5, generator=generator)
    samples = rows_of(groups_of(made))
    values = update(
        PolicyGradient(optimizer=SMOOTH), TorchTrainer(made, SMOOTH, 9), samples, np.random.default_rng(0), False
    )
    assert values["loss/sampler_logprob_diff_max"] < 1e-4, "an engine that agrees"
    assert values["loss/ratio_max"] > 1.001, "dropout acts in the update"


# --- the gradient against the true one -------------------------------------------------------------------------------

N_PROMPTS = 2


def logits_of(made: Policy, prompt: torch.Tensor) -> torch.Tensor:
    return made.model(prompt[None], use_cache=False).logits[0, -1].float()


def prompts(made: Policy) -> torch.Tensor:
    return torch.randint(0, len(made.tokenizer), (N_PROMPTS, 5), generator=torch.Generator().manual_seed(1))


def rewards(made: Policy) -> torch.Tensor:
    return torch.rand((N_PROMPTS, made.model.config.vocab_size), generator=torch.Generator().manual_seed(2))


def true_gradient(made: Policy) -> torch.Tensor:
    """−∇ Σ over the prompts of E_π r, by the definition: every token there is, with its probability."""
    made.model.zero_grad()
    values = [(logits_of(made, q).softmax(-1) * r).sum() for q, r in zip(prompts(made), rewards(made), strict=True)]
    (-torch.stack(values).sum() / N_PROMPTS).backward()  # type: ignore[no-untyped-call]
    return gradient(made.model)


def enumerated(made: Policy, engine: Policy) -> list[Sample]:
    """Every token that the engine could sample after each prompt, one row each.

    A row's advantage is multiplied by how often the engine samples it, so that the sum over the rows is the exact
    expectation under the engine of what it would be over samples.
    """
    found = []
    for q, r in zip(prompts(made), rewards(made), strict=True):
        with torch.no_grad():
            log_mu = logits_of(engine, q).log_softmax(-1)
            baseline = (logits_of(made, q).softmax(-1) * r).sum()
        ids = q.numpy()
        for token, (logprob, value) in enumerate(zip(log_mu.tolist(), (r - baseline).tolist(), strict=True)):
            last = np.zeros(len(ids) + 1, np.float32)
            last[-1] = 1
            share = float(np.exp(logprob)) * len(log_mu)
            advantages = last * np.float32(share * value)
            found.append(Sample(np.append(ids, token), last > 0, last * np.float32(logprob), advantages, len(found), 0))
    return found


def found_gradient(made: Policy, samples: list[Sample], correction: Correction, loss: Any) -> torch.Tensor:
    """Gradient of one update as a step makes it, without the update."""
    trainer = TorchTrainer(made, AdamW(lr=1e-30, max_grad_norm=None), 1)
    stage = PolicyGradient(correction=correction, loss=loss)
    rows, _, rest = prepare(stage, trainer, samples, shares_policy=False)
    [batches] = pack_minibatches(rows, 1, Reduction(), 4096)
    trainer.update(batches, loss, correction=rest)
    return gradient(made.model)


@pytest.mark.parametrize("loss", [Reinforce(), PPOClip()], ids=["reinforce", "ppo_clip"])
def test_over_some_steps_the_corrected_gradient_is_nearer_to_the_true_one(loss: Any) -> None:
    made = policy(head_dim=32)
    stage = PolicyGradient(loss=loss, optimizer=AdamW(lr=3e-3))
    trainer = TorchTrainer(made, stage.optimizer, 5)
    for step in range(5):
        samples = enumerated(made, another(made, size=0.15, seed=step))
        truth = true_gradient(made)
        distances = {
            name: float((found_gradient(copy.deepcopy(made), samples, correction, loss) - truth).norm() / truth.norm())
            for name, correction in (
                ("uncorrected", Bypass()),  # REINFORCE; the clipped loss corrects by its ratio, until that is clipped
                ("exact", Truncated(max_weight=1e6)),
                ("truncated", Truncated()),
                ("clipped", Clipped()),
            )
        }
        assert distances["uncorrected"] > 0.05
        assert distances["exact"] < 1e-3
        assert distances["truncated"] < 0.5 * distances["uncorrected"]
        assert distances["clipped"] < distances["uncorrected"]
        before = parameters(made.model)
        values = update(stage, trainer, samples, np.random.default_rng(step), False)
        assert (parameters(made.model) - before).abs().max() > 1e-4
        assert values["loss/sampler_logprob_diff_mean"] > 0.05 and values["loss/sampler_clipped_share"] > 0


def test_clean_rows_are_what_the_definition_wants() -> None:
    # With an engine that agrees, nothing needs correcting: the enumeration itself is right.
    made = policy()
    samples = enumerated(made, made)
    for correction in (Bypass(), Truncated()):
        found = found_gradient(copy.deepcopy(made), samples, correction, Reinforce())
        torch.testing.assert_close(found, true_gradient(made), atol=1e-6, rtol=1e-3)
