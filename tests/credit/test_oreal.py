"""OREAL: worked numbers, the loss of its code by brute force, and what it does without signal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.ktae import KTAE
from rlhf.credit.contrib.oreal import OREAL, token_weights
from rlhf.data import ScoredGroup, Values
from rlhf.errors import DataError
from tests.credit.credit_groups import call, group, group_of, per_token, turn, turn_of


def two(lengths: tuple[int, int] = (2, 4)) -> ScoredGroup:
    """A right attempt and a wrong one."""
    return group([[1.0], [0.0]], lengths_GK=[[n] for n in lengths])


def said(*rows: list[float]) -> Values:
    """Token rewards of attempts of one turn."""
    return Values(tuple((tuple(row),) for row in rows), (0.0,) * len(rows))


def test_worked_example() -> None:
    # a = ±1, N = 6, N⁺ = 2, N⁻ = 4: 6/2 · 1 and .5 · 6/4 · −1.
    found = OREAL()(two())
    assert per_token(found) == [[3.0, 3.0], [-0.75] * 4]
    assert found.metrics["credit/n_groups"] == 1


def test_tokens_of_opponents_are_not_counted() -> None:
    right, wrong = turn(2), turn(4)
    other = replace(call((5,) * 9), opponent="step 2")
    made = group_of([[turn_of([*right.action.generations, other])], [wrong]], [[1.0], [0.0]])
    assert [row[0] for row in per_token(OREAL()(made))] == [3.0, -0.75]
    ktae = KTAE(correct_above=0)
    assert ktae(made).advantages_GNT[0][0] == ktae(group_of([[right], [wrong]], [[1.0], [0.0]])).advantages_GNT[0][0]


def test_worked_example_of_weights() -> None:
    # w = (2, −2): means 2 and 0, p = (.880797, .5), ω⁺ = (.761594, 0); of the wrong one (−2, 6): means −2 and 2.
    assert token_weights([2.0, -2.0], True) == pytest.approx([0.7615942, 0.0])
    assert token_weights([-2.0, 6.0], False) == pytest.approx([0.7615942, 0.0])
    found = per_token(OREAL(weights="critic")(two((2, 2)), said([2.0, -2.0], [-2.0, 6.0])))
    # N = 4, N⁺ = N⁻ = 2: 2 · .761594 and .5 · 2 · −.761594.
    assert found[0] == pytest.approx([1.5231884, 0.0])
    assert found[1] == pytest.approx([-0.7615942, 0.0])


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6), st.booleans())
def test_weights_are_those_of_the_paper(rewards: list[float], is_right: bool) -> None:
    for t, weight in enumerate(token_weights(rewards, is_right)):
        p = 1 / (1 + math.exp(-math.fsum(rewards[: t + 1]) / (t + 1)))
        assert weight == pytest.approx(max(2 * p - 1 if is_right else 1 - 2 * p, 0.0), abs=1e-9)


def test_rare_successes_are_cloned_hardest() -> None:
    # One of four is right: a = 1 and −1/3. N = 4, N⁺ = 1; the wrong ones count as one, N⁻ = 1, each by a third of η.
    made = group([[0.0], [1.0], [0.0], [0.0]], lengths_GK=[[1]] * 4)
    assert per_token(OREAL()(made)) == [[pytest.approx(x)] for x in (-2 / 9, 4, -2 / 9, -2 / 9)]
    # Every attempt counts: N⁻ = 3.
    every = per_token(OREAL(one_of_each=False, negative_weight=1.0)(made))
    assert every == [[pytest.approx(x)] for x in (-4 / 9, 4, -4 / 9, -4 / 9)]


def test_the_loss_is_what_the_released_code_has() -> None:
    """`token_mean` of −A log π over groups that differ: a mean for each side, of one attempt of each kind per group."""
    groups = [two((3, 2)), group([[1.0], [1.0]]), group([[0.0], [0.0], [1.0]], lengths_GK=[[4], [4], [2]], task="b")]
    rows = [per_token(credit) for credit in OREAL().over_batch(groups)]
    nll = [
        [torch.full((len(row),), 0.3 * (i + 1) + j) for j, row in enumerate(of_group)]
        for i, of_group in enumerate(rows)
    ]
    pairs = [(a, b) for of_group, losses in zip(rows, nll, strict=True) for a, b in zip(of_group, losses, strict=True)]
    ours = sum(float((torch.tensor(row) * losses).sum()) for row, losses in pairs) / (5 + 10)
    # Right ones of 3 and 2 tokens, a = 1 both; wrong ones of 2 and 4 tokens, a = −1 and −1/2: either of the last two is
    # drawn as likely.
    drawn = [
        float((nll[0][0].sum() + nll[2][2].sum()) / 5 + 0.5 * (-nll[0][1].sum() - 0.5 * nll[2][j].sum()) / 6)
        for j in (0, 1)
    ]
    assert ours == pytest.approx(sum(drawn) / 2, rel=1e-6)
    assert rows[1] == [[0.0, 0.0], [0.0, 0.0]]


def test_nothing_to_compare_gives_nothing() -> None:
    for made in (group([[1.0]]), group([[1.0], [1.0]]), ScoredGroup("task", (), ())):
        assert not any(x for row in per_token(OREAL()(made)) for x in row)


def test_weights_need_a_critic() -> None:
    assert not OREAL().needs_values and OREAL(weights="critic").needs_values
    assert OREAL(weights="critic").needs_critic == "token_rewards"
    with pytest.raises(DataError, match="needs the values of a critic"):
        OREAL(weights="critic")(two())
