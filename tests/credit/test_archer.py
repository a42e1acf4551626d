"""ArCHer: the worked example, and what it does without a critic of turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.archer import ArCHer
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.credit.estimator import compute_advantages
from rlhf.data import Values
from rlhf.errors import DataError
from tests.credit.credit_groups import critic, group, per_token

numbers = st.floats(-2, 2, allow_nan=False)


def test_worked_example():
    # Turns of two tokens and of one. The lower of two Q-values (.7, .65) less the lower of two values (.5, .55): .65 −
    # .5 = .15. In the second turn (.2, .3) and (.4, .45): .2 − .4 = −.2. What was earned is not looked at.
    made = group([[5.0, 1.0]], lengths_GK=[[2, 1]])
    lower = [min(pair) for pair in ((0.7, 0.65), (0.5, 0.55), (0.2, 0.3), (0.4, 0.45))]
    values = Values((((lower[1],) * 2, (lower[3],)),), (0.0,), (((lower[0],) * 2, (lower[2],)),))
    credit = ArCHer()(made, values)
    assert per_token(credit) == [[pytest.approx(0.15), pytest.approx(0.15), pytest.approx(-0.2)]]
    assert credit.returns_GNT is None and credit.metrics == {"credit/n_groups": 1.0}


@given(rows=st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3), min_size=1, max_size=4))
def test_every_token_has_its_difference(rows):
    made = group([[0.0] * len(rows)], lengths_GK=[[len(row) for row in rows]])
    q, v = (tuple(tuple(pair[i] for pair in row) for row in rows) for i in (0, 1))
    [found] = per_token(ArCHer()(made, Values((v,), (0.0,), (q,))))
    assert found == [a - b for row in rows for a, b in row]


def test_within_a_wrapper_it_still_gets_the_values_of_actions():
    made = [group([[1.0, 0.0]]), group([[0.5]], task="other")]
    wrapper = TaskNormalised(inner=ArCHer())
    assert wrapper.needs_values and wrapper.min_group == 1
    assert [
        x for c in compute_advantages(wrapper, made, [critic(one) for one in made]) for row in per_token(c) for x in row
    ]


@pytest.mark.parametrize(
    ("values", "says"),
    [(None, "needs the values of a critic"), (Values((((0.1, 0.2),),), (0.0,)), "needs the values of actions")],
)
def test_without_values_of_actions_it_says_what_is_missing(values, says):
    with pytest.raises(DataError, match=says) as caught:
        ArCHer()(group([[1.0]]), values)
    assert caught.value.where == "ArCHer"


@pytest.mark.parametrize(("actions", "says"), [((((0.1,),),), "do not match"), ((((0.1, math.nan),),), "not finite")])
def test_values_of_actions_that_do_not_belong_to_the_group_are_refused(actions, says):
    made = group([[1.0]])
    with pytest.raises(DataError, match=says):
        compute_advantages(ArCHer(), [made], [Values((((0.1, 0.2),),), (0.0,), actions)])
