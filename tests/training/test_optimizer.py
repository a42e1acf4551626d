"""The schedule of the learning rate, and what of the settings reaches torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.training.backends.optimizer import AdamW, Stepper


def rates(settings: AdamW, n: int) -> list[float]:
    return [settings.lr_at(i, n) for i in range(n)]


def test_constant_after_a_linear_warm_up() -> None:
    # 3 updates of warm-up at 1/4, 2/4, 3/4 of the peak; the fourth update has all of it.
    assert rates(AdamW(lr=8.0, warmup_steps=3), 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_fall() -> None:
    # Update i of 4: 1 − i/4 of the peak; with a final share of 0.5 half of what would be lost is kept.
    assert rates(AdamW(lr=1.0, schedule="linear"), 4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(AdamW(lr=1.0, schedule="linear", min_lr_ratio=0.5), 4) == [1.0, 0.875, 0.75, 0.625]


def test_cosine_fall_after_warm_up() -> None:
    # 4 updates after one of warm-up: ½ (1 + cos(π k/4)) for k = 0..3, with cos(π/4) = √½.
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert rates(AdamW(lr=1.0, schedule="cosine", warmup_steps=1), 5) == pytest.approx(expected)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    n=st.integers(1, 40),
    share=st.floats(0, 1),
)
def test_a_rate_is_never_more_than_the_peak_and_falls_after_the_warm_up(
    schedule: str, warmup: int, n: int, share: float
) -> None:
    settings = AdamW(lr=3e-4, schedule=schedule, warmup_steps=warmup, min_lr_ratio=share)  # type: ignore[arg-type]
    found = rates(settings, n)
    assert all(0 < rate <= 3e-4 * (1 + 1e-12) for rate in found)
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)
    assert all(rate >= 3e-4 * share * (1 - 1e-12) for rate in found[warmup:])


def test_an_update_beside_the_schedule_has_the_rate_before_it_and_takes_none() -> None:
    # Four updates fall as 1, 3/4, 1/2, 1/4, wherever others are made between them; one before the first has its rate.
    weight = torch.nn.Parameter(torch.ones(1))
    settings = AdamW(lr=1.0, schedule="linear")
    stepper, made = Stepper(settings, settings.build([weight]), 4), []
    for off_schedule in (True, False, True, False, True, True, False, False, True):
        weight.grad = torch.ones(1)
        stepper.step(off_schedule=off_schedule)
        [group] = stepper.optimizer.param_groups
        made.append(group["lr"])
        assert stepper.lr == group["lr"]
    assert made == [1.0, 1.0, 1.0, 0.75, 0.75, 0.75, 0.5, 0.25, 0.25]
    assert (stepper.n_updates, stepper.n_off_schedule) == (9, 5)


def test_only_what_is_trained_reaches_the_optimizer() -> None:
    frozen, trained = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(3))
    settings = AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    optimizer = settings.build([frozen, trained])
    [group] = optimizer.param_groups
    assert group["params"] == [trained]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.9), 1e-6, 0.5)


def test_one_update_by_hand() -> None:
    # First step of Adam with bias correction: the means are g and g², so the step is lr · g / (|g| + ε) = lr · sign(g);
    # decoupled decay first takes lr · 0.5 of the weight: 1 − 0.05 − 0.1 and 1 − 0.05 + 0.1.
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW(lr=0.1, weight_decay=0.5, eps=1e-12).build([weight])
    weight.grad = torch.tensor([4.0, -0.01])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.85, 1.05], abs=1e-6)
