"""Reductions: worked examples, and invariance to the order and the cutting of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.errors import DataError
from rlhf.losses.reduction import Reduction

MEANS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "per_trajectory_mean"]
NORM = "seq_mean_token_sum_norm"
ALL = [*(Reduction(kind=kind) for kind in MEANS), Reduction(kind=NORM, max_tokens=7)]
ALL.append(Reduction(kind=NORM, max_tokens=7, divide_by="constant"))
#: Token counts of the rows of each trajectory.
trajectories = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5)


def total(reduction, counts, losses, ids=None):
    """The reduced loss of rows of `counts` tokens whose tokens each have the row's loss."""
    counts = np.array(counts)
    ids = np.arange(len(counts)) if ids is None else np.array(ids)
    return float((reduction(counts, ids) * counts * np.array(losses)).sum())


@pytest.mark.parametrize(
    ("reduction", "expected"),
    # Two rows with 4 and 2 tokens, losses 1 and 4 per token.
    [
        (Reduction(kind="token_mean"), 2.0),  # (4 + 8) / 6
        (Reduction(kind="seq_mean_token_mean"), 2.5),  # (1 + 4) / 2
        (Reduction(kind="seq_mean_token_sum"), 6.0),  # (4 + 8) / 2
        (Reduction(kind=NORM, max_tokens=4, divide_by="constant"), 3.0),  # 12 / 4
        (Reduction(kind=NORM, max_tokens=4), 1.5),  # 12 / (4 · 2)
        (Reduction(kind="per_trajectory_mean"), 2.5),  # each row is a trajectory: as seq_mean_token_mean
    ],
)
def test_worked_examples(reduction, expected):
    assert total(reduction, [4, 2], [1, 4]) == pytest.approx(expected)


def test_demonstrations_of_equal_length_count_alike():
    # What ReLIFT imitates, reduced as it does: two demonstrations of two tokens, .5 and 1.5 nats each: (2 · .5 + 2 ·
    # 1.5) / 4.
    assert total(Reduction(kind="token_mean"), [2, 2], [0.5, 1.5]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    # Trajectory 0 has rows of 3 and 1 tokens, loss 1; trajectory 1 has one row of 2 tokens, loss 4.
    [
        (Reduction(kind="seq_mean_token_mean"), 2.5),  # (1 + 4) / 2
        (Reduction(kind="seq_mean_token_mean", per="row"), 2.0),  # (1 + 1 + 4) / 3: the longer trajectory counts twice
        (Reduction(kind="seq_mean_token_sum"), 6.0),  # (4 + 8) / 2
        (Reduction(kind="seq_mean_token_sum", per="row"), 4.0),  # 12 / 3
        (Reduction(kind=NORM, max_tokens=4, per="row"), 1.0),  # 12 / (4 · 3)
        (Reduction(kind="per_trajectory_mean"), 2.5),
        # Agent Lightning divides by the tokens of the trajectory and the number of rows: (4/4 · 1 + 2/2 · 4) / 3
        (Reduction(kind="per_trajectory_mean", per="row"), 5 / 3),
    ],
)
def test_rows_and_trajectories_differ(reduction, expected):
    assert total(reduction, [3, 1, 2], [1, 1, 4], ids=[0, 0, 1]) == pytest.approx(expected)


def by_definition(reduction, rows_by_trajectory, losses):
    """The same numbers from the definitions, over trajectories, without coefficients."""
    sums = [sum(counts) * loss for counts, loss in zip(rows_by_trajectory, losses, strict=True) if sum(counts)]
    lengths = [sum(counts) for counts in rows_by_trajectory if sum(counts)]
    if not lengths:
        return 0.0
    if reduction.kind == "token_mean":
        return sum(sums) / sum(lengths)
    if reduction.kind == "seq_mean_token_sum":
        return sum(sums) / len(sums)
    if reduction.kind == NORM:
        return sum(sums) / 7 / (1 if reduction.divide_by == "constant" else len(sums))
    return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums)


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: f"{r.kind}-{r.divide_by}")
@given(trajectories=trajectories, data=st.data())
def test_only_trajectories_matter_not_how_they_are_cut_or_ordered(reduction, trajectories, data):
    losses = [1.0 + i for i in range(len(trajectories))]
    rows = [(i, count) for i, counts in enumerate(trajectories) for count in counts]
    rows = data.draw(st.permutations(rows))
    ids = [10 * i for i, _ in rows]  # any numbers will do
    got = total(reduction, [count for _, count in rows], [losses[i] for i, _ in rows], ids)
    assert got == pytest.approx(by_definition(reduction, trajectories, losses))


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: f"{r.kind}-{r.divide_by}")
def test_rows_without_tokens_count_nowhere(reduction):
    with_empty = reduction(np.array([4, 0, 2]), np.array([0, 1, 2]))
    assert with_empty[1] == 0
    assert with_empty[[0, 2]] == pytest.approx(reduction(np.array([4, 2]), np.array([0, 2])))
    assert reduction(np.array([0]), np.array([0])).tolist() == [0.0]
    assert reduction(np.array([], np.int64), np.array([], np.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": NORM}, "needs max_tokens"),
        ({"kind": "token_mean", "max_tokens": 5}, "no effect"),
        ({"kind": "seq_mean_token_sum", "divide_by": "constant"}, "no effect"),
        ({"kind": "token_mean", "per": "row"}, "no effect"),
        ({"kind": NORM, "max_tokens": 0}, "greater than or equal to 1"),
        ({"kind": "token-mean"}, "token_mean"),
    ],
)
def test_impossible_settings_are_rejected(settings, says):
    with pytest.raises(ValidationError, match=says):
        Reduction(**settings)


def test_a_reduction_by_a_constant():
    # By 4 tokens and 2 trajectories: 1/8 each.
    assert Reduction(kind=NORM, max_tokens=4)(np.array([2, 1]), np.array([0, 1])).tolist() == [0.125, 0.125]


def test_arrays_that_do_not_match_raise():
    with pytest.raises(DataError, match="do not match"):
        Reduction()(np.array([1, 2]), np.array([0]))
    with pytest.raises(DataError, match="do not match"):
        Reduction()(np.array([-1]), np.array([0]))
