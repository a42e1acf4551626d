"""The loss of a critic and explained variance: worked numbers, gradients, bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.losses.value import explained_variance, value_loss

number = st.floats(-3, 3)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def one(value, old, target, clip):
    """(loss, slope, clipped) of a single token of weight 1."""
    v = doubles(value).requires_grad_()
    out = value_loss(v, doubles(old), doubles(target), doubles(1.0), clip)
    return out.loss.item(), torch.autograd.grad(out.loss, v)[0].item(), bool(out.clipped[0])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # clip(1, .5 ± .2) = .7; max((1 − 2)², (.7 − 2)²) / 2 = 1.69 / 2, which does not depend on V
        ((1.0, 0.5, 2.0, 0.2), (0.845, 0.0, True)),
        # moved away from the return: max((1 − 0)², (.7 − 0)²) / 2, the gradient V − G = 1 stays
        ((1.0, 0.5, 0.0, 0.2), (0.5, 1.0, False)),
        # within the bounds both errors are one: ½ (.6 − 2)² = .98
        ((0.6, 0.5, 2.0, 0.2), (0.98, -1.4, False)),
        ((1.0, 0.5, 2.0, None), (0.5, -1.0, False)),
        # the value passed its return and lies on the far side of the bound: (1 − .9)² < (.7 − .9)²
        ((1.0, 0.5, 0.9, 0.2), (0.02, 0.0, True)),
    ],
)
def test_worked_numbers(arguments, expected):
    assert one(*arguments) == (pytest.approx(expected[0]), pytest.approx(expected[1]), expected[2])


@given(
    rows=st.lists(st.tuples(number, number, number, st.floats(0, 2)), min_size=1, max_size=6),
    clip=st.floats(0.05, 2),
    cut=st.integers(0, 6),
)
def test_micro_batches_add_up_and_a_bound_never_lowers_the_loss(rows, clip, cut):
    columns = [doubles(*x) for x in zip(*rows, strict=True)]
    whole = value_loss(*columns, clip=clip).loss.item()
    parts = [value_loss(*(c[part] for c in columns), clip=clip).loss for part in (slice(cut), slice(cut, None))]
    assert sum(p.item() for p in parts) == pytest.approx(whole)
    assert whole >= value_loss(*columns, clip=None).loss.item() - 1e-12


@given(value=number, old=number, target=number, clip=st.floats(0.05, 2))
@example(value=-1.2e-38, old=1.0, target=1.0, clip=1.0)  # beyond the bound by less than rounding tells
def test_the_slope_is_that_of_finite_differences_and_nothing_moves_what_is_clipped(value, old, target, clip):
    h = 1e-6
    values = [one(value + x, old, target, clip)[0] for x in (-h, 0.0, h)]
    left, right = (values[1] - values[0]) / h, (values[2] - values[1]) / h
    _, slope, clipped = one(value, old, target, clip)
    assert min(left, right) - 1e-4 <= slope <= max(left, right) + 1e-4
    if clipped:
        assert slope == 0


@given(old=st.lists(number, min_size=1, max_size=5), target=number)
def test_unmoved_values_have_the_gradient_of_the_squared_error(old, target):
    # One update per step: V = V_old, so the bound is not felt.
    v = doubles(*old).requires_grad_()
    weights = torch.full_like(v, 1 / len(old)).detach()
    returns = torch.full_like(weights, target)
    found = torch.autograd.grad(value_loss(v, v.detach().clone(), returns, weights).loss, v)[0]
    assert found.tolist() == pytest.approx([(x - target) / len(old) for x in old])


def test_a_token_without_weight_and_no_tokens_at_all_cost_nothing():
    v = doubles(5.0).requires_grad_()
    assert value_loss(v, doubles(0.0), doubles(1.0), doubles(0.0)).loss.item() == 0
    empty = torch.zeros(0, requires_grad=True)
    value_loss(empty, empty, empty, empty).loss.backward()


def test_bad_input_is_told():
    with pytest.raises(DataError, match="differ in shape"):
        value_loss(doubles(1, 2), doubles(1), doubles(1), doubles(1))
    with pytest.raises(DataError, match="must be positive"):
        value_loss(*[doubles(1)] * 4, clip=0.0)


def test_explained_variance():
    returns = doubles(0, 1, 2)
    # errors −.5, 0, .5 have variance 1/6, the returns 2/3
    assert explained_variance(doubles(0.5, 1, 1.5), returns) == pytest.approx(0.75)
    assert explained_variance(returns + 7, returns) == pytest.approx(1)
    assert explained_variance(doubles(1, 1, 1), returns) == pytest.approx(0)
    assert explained_variance(doubles(2, 1, 0), returns) == pytest.approx(-3)  # errors ±2: 8/3 over 2/3 is 4
    assert math.isnan(explained_variance(returns, doubles(1, 1, 1)))
    assert math.isnan(explained_variance(doubles(1), doubles(1)))
