"""SWEET: the worked example, what counts as the same state, and what it does without a critic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.sweet import SWEET
from rlhf.data import Values
from rlhf.errors import DataError
from tests.credit.credit_groups import group, per_token

numbers = st.floats(-2, 2, allow_nan=False)


def said(*rows):
    """Values of turns; of states it says nothing."""
    actions = tuple(tuple((x,) * n for x, n in row) for row in rows)
    return Values(tuple(tuple((0.0,) * len(t) for t in row) for row in actions), (0.0,) * len(rows), actions)


def test_worked_example():
    # Two attempts begin in the hall: A = .3 and −.1, mean .1: .2 and −.2. The cellar and the attic are met once each.
    made = group([[0.0, 1.0], [0.0, 0.0]], [["hall", "cellar"], ["hall", "attic"]], lengths_GK=[[2, 1], [1, 1]])
    values = said([(0.3, 2), (0.5, 1)], [(-0.1, 1), (-0.4, 1)])
    found = SWEET()(made, values)
    assert per_token(found) == [pytest.approx([0.2, 0.2, 0.5]), pytest.approx([-0.2, -0.4])]
    assert found.metrics["credit/n_singleton_states"] == 2.0 and found.returns_GNT is None
    assert per_token(SWEET(baseline="none")(made, values)) == [[0.3, 0.3, 0.5], [-0.1, -0.4]]


def test_turns_of_one_number_are_compared_where_states_are_unknown():
    made = group([[0.0, 1.0], [0.0]], lengths_GK=[[1, 1], [1]])
    # The first turns: mean of .4 and 0 is .2. The second turn of the first attempt has no other.
    assert per_token(SWEET()(made, said([(0.4, 1), (0.3, 1)], [(0.0, 1)]))) == [pytest.approx([0.2, 0.3]), [-0.2]]


@given(rows=st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=2, max_size=5))
def test_what_turns_in_one_state_have_in_common_does_not_count(rows):
    made = group([[0.0, 0.0]] * len(rows), lengths_GK=[[1, 1]] * len(rows))
    shifted = [[row[0] + 3.0, row[1] - 1.0] for row in rows]
    one, other = (per_token(SWEET()(made, said(*([(x, 1) for x in row] for row in r)))) for r in (rows, shifted))
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, abs=1e-9)
    for k in (0, 1):
        assert sum(row[k] for row in one) == pytest.approx(0.0, abs=1e-9)


def test_a_turn_without_tokens_is_no_candidate():
    made = group([[0.0, 1.0], [0.0, 0.0]], lengths_GK=[[0, 1], [1, 1]])
    # The only first turn with a token keeps its .4; the second turns: mean of .2 and .6.
    found = SWEET()(made, said([(0.0, 0), (0.2, 1)], [(0.4, 1), (0.6, 1)]))
    assert per_token(found) == [pytest.approx([-0.2]), pytest.approx([0.4, 0.2])]


@pytest.mark.parametrize(
    ("values", "says"),
    [(None, "needs the values of a critic"), (Values((((0.1, 0.2),),), (0.0,)), "needs the values of actions")],
)
def test_without_a_critic_of_turns_it_says_what_is_missing(values, says):
    with pytest.raises(DataError, match=says) as caught:
        SWEET()(group([[1.0]]), values)
    assert caught.value.where == "SWEET"
