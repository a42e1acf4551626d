"""Training on the tokens of highest entropy, on a real model: with every correction, in any packing and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rlhf.training.backends.torch as trainer_module
from rlhf.batching.filters import Filters
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.grpo import GRPO
from rlhf.losses.importance_correction import Bypass, Correction, Criterion, Masked, Rejection, Truncated
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.loop import update
from rlhf.training.old_logprobs import prepare
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training.tiny import collect, credit, parameters, policy

SETTINGS = AdamW(lr=0.1, eps=1e-2, max_grad_norm=None)
SURE = Filters(high_entropy_share=0.3)
CORRECTIONS: dict[str, Correction] = {
    "truncated": Truncated(max_weight=1.05),
    "masked": Masked(level="geometric", min_weight=0.9),
    "rejection": Rejection(criteria=(Criterion(statistic="k3", over="token", at_most=1e-9),)),
    "bypass": Bypass(),
}


@pytest.fixture(scope="module")
def groups() -> Any:
    made = collect(policy())
    return made, credit(made, GRPO())


def one_step(samples: list[Sample], *, shares: bool = False, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    stage = PolicyGradient(optimizer=SETTINGS, filters=SURE, **settings)
    made = policy()
    made.model.double()
    values = update(stage, TorchTrainer(made, SETTINGS, 9), samples, np.random.default_rng(0), shares)
    return parameters(made.model), values


@pytest.mark.parametrize("name", CORRECTIONS)
def test_neither_micro_batches_nor_layout_change_a_step(groups: Any, name: str) -> None:
    folded, unfolded = (make_samples(*groups, layout)[0] for layout in ("trajectory", "generation"))
    how = {"correction": CORRECTIONS[name], "epochs": 2, "minibatches": 2}
    expected, values = one_step(folded, **how)
    assert (expected - parameters(policy().model)).abs().max() > 1e-3
    for samples in (folded, unfolded):
        found, same = one_step(samples, max_tokens_per_microbatch=max(map(len, folded)), **how)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert same["batch/n_low_entropy_tokens"] == values["batch/n_low_entropy_tokens"] > 0
        n_tokens = same["batch/n_policy_tokens"] + same["batch/n_low_entropy_tokens"]
        assert n_tokens == sum(s.n_policy_tokens for s in samples), "what is masked is not counted"


def test_the_tokens_are_those_of_the_definition(groups: Any) -> None:
    samples, _ = make_samples(*groups)
    made = policy()
    rows, values, rest = prepare(PolicyGradient(filters=SURE), TorchTrainer(made, SETTINGS, 1), samples,
                                 shares_policy=True)  # fmt: skip
    entropies = []
    for s in samples:
        with torch.no_grad():
            logits = made.model(torch.from_numpy(s.token_ids.copy())[None], use_cache=False).logits[0]
        log_p = logits.float().log_softmax(-1)[np.flatnonzero(s.mask) - 1]
        entropies.append((-(log_p.exp() * log_p).sum(-1)).numpy())
    threshold = np.quantile(np.concatenate(entropies), 0.7)
    expected = {s.sequence: np.flatnonzero(s.mask)[h >= threshold] for s, h in zip(samples, entropies, strict=True)}
    found = {row.sequence: np.flatnonzero(row.mask) for row in rows}
    assert rest is None and {k: v.tolist() for k, v in expected.items() if len(v)} == {
        k: v.tolist() for k, v in found.items()
    }
    n_tokens = sum(map(len, entropies))
    n_kept = sum(map(len, found.values()))
    assert n_kept == pytest.approx(0.3 * n_tokens, abs=1)
    assert values == {"batch/n_low_entropy_tokens": n_tokens - n_kept}


def test_it_costs_one_pass_at_most(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = make_samples(*groups)
    passes: list[bool] = []
    whole = trainer_module.packed_forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        passes.append(torch.is_grad_enabled())
        return whole(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "packed_forward", forward)
    for settings, shares in (({}, True), ({}, False), ({"correction": Truncated(level="sequence")}, False)):
        passes.clear()
        one_step(samples, shares=shares, **settings)
        assert passes == [False, True], (settings, shares)
