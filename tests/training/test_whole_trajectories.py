"""Losses over whole trajectories on a real model: micro-batches and layouts do not show, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rlhf.training.backends.torch as trainer_module
from agents.chat import ChatAgent
from agents.memory.window import Window
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.inference.embedded import attention
from rlhf.losses.contrib.a_lol import ALoL
from rlhf.losses.contrib.rebel import REBEL
from rlhf.losses.gspo import GSPO
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.loop import update
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training.tiny import collect, credit, parameters, policy

SETTINGS = AdamW(lr=0.1, eps=1e-2, max_grad_norm=None)
#: Bounds so wide that they do not decide.
LOSSES: dict[str, Any] = {
    "gspo": GSPO(clip_low=0.3, clip_high=0.3),
    "a_lol": ALoL(clip_low=1.0, clip_high=float("inf")),
    "rebel": REBEL(eta=0.1),
}


@pytest.fixture(scope="module")
def groups() -> Any:
    """Trajectories whose prompts are rewritten: each generation is a row of its own."""
    made = collect(policy(), agent=ChatAgent(system="", memory=Window(turns=0)))
    return made, credit(made, DrGRPO())


def rows_of(groups: Any) -> list[Sample]:
    samples, counters = make_samples(*groups)
    assert counters["batch/n_rewritten_prompts"] > 0
    return samples


def one_step(samples: list[Sample], loss: Any, *, shares: bool = True, **settings: Any) -> torch.Tensor:
    """Parameters after one step of a fresh policy."""
    reduction = Reduction(kind=loss.reductions[0])
    stage = PolicyGradient(optimizer=SETTINGS, loss=loss, reduction=reduction, **settings)
    made = policy()
    made.model.double()  # so that what differs is the method: three updates multiply the rounding of float32
    update(stage, TorchTrainer(made, SETTINGS, 9), samples, np.random.default_rng(0), shares)
    return parameters(made.model)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("updates", [{"epochs": 3}, {"epochs": 2, "minibatches": 2}], ids=["three", "four"])
def test_micro_batches_that_cut_trajectories_change_nothing(
    groups: Any, name: str, updates: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is shared differs between micro-batches and rounds otherwise, which some of these losses raise a hundredfold.
    monkeypatch.setattr(attention, "SHORTEST_SHARED", 10**9)
    samples = rows_of(groups)
    expected = one_step(samples, LOSSES[name], **updates)
    assert (expected - parameters(policy().model)).abs().max() > 1e-3
    longest = max(map(len, samples))
    for budget in (longest, 2 * longest):
        found = one_step(samples, LOSSES[name], max_tokens_per_microbatch=budget, **updates)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_what_it_costs(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = rows_of(groups)
    whole = trainer_module.packed_forward
    passes: list[bool] = []

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        passes.append(torch.is_grad_enabled())
        return whole(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "packed_forward", forward)
    narrow = {"max_tokens_per_microbatch": max(map(len, samples))}
    # One micro-batch holds everything: nothing more. Cut ones: a pass without gradient over all of them, first.
    one_step(samples, LOSSES["gspo"])
    assert passes == [True]
    passes.clear()
    one_step(samples, LOSSES["gspo"], **narrow)
    assert len(passes) > 2 and passes == sorted(passes) and sum(passes) == len(passes) / 2
    # Where the old log-probs are found in the update, the ratios are 1 and nothing has to be computed to know it.
    passes.clear()
    one_step(samples, LOSSES["gspo"], shares=False, **narrow)
    assert all(passes)
    # A loss over groups: trajectories that are whole are not enough.
    folded, _ = make_samples(*groups_that_grow())
    passes.clear()
    for name, n_kinds in (("gspo", 1), ("rebel", 2)):
        passes.clear()
        one_step(folded, LOSSES[name], max_tokens_per_microbatch=max(map(len, folded)))
        assert len(set(passes)) == n_kinds


def groups_that_grow() -> Any:
    made = collect(policy())
    return made, credit(made, DrGRPO())
