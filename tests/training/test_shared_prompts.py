"""Prompts that rows have in common are computed once, and nothing that is learnt can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Layout, make_samples
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.inference.embedded import attention
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Lora, Policy
from tests.training import tiny


class Embedded:
    """Counts the tokens that a policy computes."""

    def __init__(self, made: Policy) -> None:
        self.n_tokens = 0
        made.model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.n_tokens += inputs[0].numel()


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_gradients_and_log_probs_are_those_of_separate_rows(
    layout: Layout, lora: Lora | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = tiny.collect(tiny.policy())
    samples, _ = make_samples(groups, compute_advantages(GRPO(), groups), layout)
    found = []
    for shortest in (1, 10**9):
        monkeypatch.setattr(attention, "SHORTEST_SHARED", shortest)
        made = tiny.policy(lora=lora)
        trainer = TorchTrainer(made, AdamW(max_grad_norm=None), 1)
        scores = np.concatenate(trainer.compute_logprobs(samples, temperature=1.0, max_tokens=200))
        embedded = Embedded(made)
        [batches] = pack_minibatches(samples, 1, Reduction(), 200)
        trainer.update(batches, PPOClip(entropy_coef=0.1))
        found.append((embedded.n_tokens, scores, tiny.gradient(made.model)))
    (n_shared, scores, gradient), (n_tokens, separate_scores, separate_gradient) = found
    assert n_shared < n_tokens == sum(map(len, samples))
    np.testing.assert_allclose(scores, separate_scores, atol=1e-5)
    torch.testing.assert_close(gradient, separate_gradient, atol=1e-5, rtol=1e-5)
