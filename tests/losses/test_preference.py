"""Bradley-Terry and sums over turns: worked numbers, gradients, and what changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.losses.preference import bradley_terry, sequence_sums, turn_means

number = st.floats(-3, 3)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_worked_numbers():
    chosen, rejected = doubles(1.2), doubles(0.3)
    # −log σ(.9); centring .01 · (1.2 + .3)² = .0225
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([0.341154], abs=1e-6)
    centred = bradley_terry(chosen, rejected, centring=0.01)
    assert centred.tolist() == pytest.approx([0.341154 + 0.0225], abs=1e-6)
    assert bradley_terry(chosen, chosen).tolist() == pytest.approx([math.log(2)])


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


@given(pair=st.tuples(number, number))
def test_slopes_are_opposite_and_those_of_finite_differences(pair):
    arrays = [doubles(x).requires_grad_() for x in pair]
    chosen, rejected = torch.autograd.grad(bradley_terry(*arrays).sum(), arrays)
    assert chosen.item() == pytest.approx(-rejected.item(), abs=1e-12)
    h = 1e-6
    around = [bradley_terry(doubles(pair[0] + x), doubles(pair[1])).item() for x in (-h, h)]
    assert chosen.item() == pytest.approx((around[1] - around[0]) / (2 * h), abs=1e-4)


@given(pair=st.tuples(number, number), shift=number)
def test_only_the_margin_matters(pair, shift):
    moved = bradley_terry(*(doubles(x + shift) for x in pair))
    assert moved.item() == pytest.approx(bradley_terry(*map(doubles, pair)).item(), abs=1e-9)


def test_far_apart_pairs_stay_finite():
    for sign in (-1, 1):
        chosen = doubles(sign * 1e4).requires_grad_()
        value = bradley_terry(chosen, doubles(0)).sum()
        assert torch.isfinite(value) and torch.isfinite(torch.autograd.grad(value, chosen)[0])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bradley_terry(doubles(1, 2), doubles(1)), "chosen and rejected log-probs differ in shape"),
        (lambda: bradley_terry(doubles(1), doubles(1), centring=-1.0), "cannot be negative"),
    ],
)
def test_bad_input_is_told(call, says):
    with pytest.raises(DataError, match=says):
        call()
