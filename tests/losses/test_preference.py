"""Losses of pairs: worked numbers, gradients, and what changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.losses.preference import bradley_terry, dpo, ipo, sequence_sums, turn_means

number = st.floats(-3, 3)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_worked_numbers():
    chosen, rejected = doubles(1.2), doubles(0.3)
    # −log σ(.9) and −log σ(.4); centring .01 · (1.2 + .3)² = .0225
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([0.341154], abs=1e-6)
    assert bradley_terry(chosen, rejected, margin=0.5).tolist() == pytest.approx([0.513015], abs=1e-6)
    centred = bradley_terry(chosen, rejected, centring=0.01)
    assert centred.tolist() == pytest.approx([0.341154 + 0.0225], abs=1e-6)
    assert bradley_terry(chosen, chosen).tolist() == pytest.approx([math.log(2)])
    assert bradley_terry(doubles(1, 1), doubles(0, 0), margin=doubles(0, 1)).tolist() == pytest.approx(
        [-math.log(1 / (1 + math.exp(-1))), math.log(2)]
    )


def test_dpo_worked_numbers():
    # An expert's action has log-ratio .4, the agent's own −.2: −log σ(.1 · .6)
    arrays = doubles(-1.0), doubles(-2.2), doubles(-1.4), doubles(-2.0)
    assert dpo(*arrays).tolist() == pytest.approx([0.663597], abs=1e-6)
    # a tenth of the labels wrong: .9 · .663597 + .1 · −log σ(−.06) = .597237 + .1 · .723597
    assert dpo(*arrays, label_smoothing=0.1).tolist() == pytest.approx([0.669597], abs=1e-6)
    same = doubles(-1.0), doubles(-2.0), doubles(-1.0), doubles(-2.0)
    assert dpo(*same).tolist() == pytest.approx([math.log(2)])


def test_ipo_worked_numbers():
    # M = (−1 + 3) − (−2 + 1) = 3, wanted 1 / .2 = 5
    assert ipo(doubles(-1), doubles(-2), doubles(-3), doubles(-1)).tolist() == pytest.approx([4.0])


def test_preferences_of_whole_trajectories_by_their_turns():
    # Chosen: turns of (.1, .1) and (.2); rejected: (−.1, −.2) and (−.3)
    ratios = doubles(0.1, 0.1, 0.2, -0.1, -0.2, -0.3)
    turns, sequences = torch.tensor([0, 0, 1, 2, 2, 3]), torch.tensor([0, 0, 1, 1])
    of_turns = turn_means(ratios, turns, sequences, 2)
    assert of_turns.tolist() == pytest.approx([0.3, -0.45])
    assert bradley_terry(*(0.1 * of_turns).split(1)).tolist() == pytest.approx([0.65635], abs=1e-5)
    means = sequence_sums(ratios, sequences[turns], 2, "mean")
    assert means.tolist() == pytest.approx([0.4 / 3, -0.2])
    assert bradley_terry(*(0.1 * means).split(1)).tolist() == pytest.approx([0.676619], abs=1e-6)
    assert sequence_sums(ratios, sequences[turns], 3).tolist() == pytest.approx([0.4, -0.6, 0.0])
    assert sequence_sums(ratios[:0], turns[:0], 1, "mean").tolist() == [0.0]


LOSSES = {
    "bradley_terry": lambda c, r, rc, rr: bradley_terry(c, r, margin=0.2),
    "dpo": lambda *arrays: dpo(*arrays, beta=0.5),
    "smooth": lambda *arrays: dpo(*arrays, beta=0.5, label_smoothing=0.2),
    "ipo": lambda *arrays: ipo(*arrays, beta=0.5),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@given(pair=st.tuples(number, number, number, number))
def test_slopes_are_opposite_and_those_of_finite_differences(name, pair):
    arrays = [doubles(x).requires_grad_() for x in pair]
    loss = LOSSES[name](*arrays).sum()
    chosen, rejected, *refs = torch.autograd.grad(loss, arrays, allow_unused=True)
    assert chosen.item() == pytest.approx(-rejected.item(), abs=1e-12)
    assert all(r is None or r.item() == 0 for r in refs), "the reference is frozen"
    h = 1e-6
    around = [LOSSES[name](doubles(pair[0] + x), *map(doubles, pair[1:])).item() for x in (-h, h)]
    assert chosen.item() == pytest.approx((around[1] - around[0]) / (2 * h), abs=1e-4)


@every_loss
@given(pair=st.tuples(number, number, number, number), shift=number)
def test_only_the_margin_matters(name, pair, shift):
    moved = [doubles(x + shift) for x in pair[:2]] + [doubles(x) for x in pair[2:]]
    assert LOSSES[name](*moved).item() == pytest.approx(LOSSES[name](*map(doubles, pair)).item(), abs=1e-9)


def test_at_the_reference_the_slope_of_dpo_is_half_of_beta():
    chosen = doubles(-3.0).requires_grad_()
    loss = dpo(chosen, doubles(-4.0), doubles(-3.0), doubles(-4.0), beta=0.3).sum()
    assert torch.autograd.grad(loss, chosen)[0].item() == pytest.approx(-0.15)


def test_far_apart_pairs_stay_finite():
    for name, loss in LOSSES.items():
        for sign in (-1, 1):
            chosen = doubles(sign * 1e4).requires_grad_()
            value = loss(chosen, doubles(0), doubles(0), doubles(0)).sum()
            assert torch.isfinite(value) and torch.isfinite(torch.autograd.grad(value, chosen)[0]), name


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bradley_terry(doubles(1, 2), doubles(1)), "do not pair up"),
        (lambda: dpo(doubles(1), doubles(1), doubles(1), doubles(1, 2)), "do not pair up"),
        (lambda: bradley_terry(doubles(1), doubles(1), margin=-1.0), "cannot be negative"),
        (lambda: bradley_terry(doubles(1), doubles(1), margin=doubles(math.nan)), "cannot be negative"),
        (lambda: bradley_terry(doubles(1), doubles(1), centring=-1.0), "cannot be negative"),
        (lambda: dpo(*[doubles(1)] * 4, beta=0.0), "must be positive"),
        (lambda: dpo(*[doubles(1)] * 4, label_smoothing=0.5), "removes the preference"),
        (lambda: ipo(*[doubles(1)] * 4, beta=-1.0), "must be positive"),
    ],
)
def test_bad_input_is_told(call, says):
    with pytest.raises(DataError, match=says):
        call()
