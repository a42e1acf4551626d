"""Steps: where they end in what was sampled, and what their probabilities come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.models.step_rows import StepRow, aggregated, step_rows, telescoped
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Trajectory, Turn
from rlhf.errors import DataError


def turn(*calls: tuple[tuple[int, ...], tuple[int, ...]]) -> Turn:
    made = tuple(Generation(Prompt(read), said, (0.0,) * len(said), Finish.STOP, 0) for read, said in calls)
    return Turn(Action("x", made), "")


def attempt(*turns: Turn, n_given: int = 0) -> Trajectory:
    return Trajectory("t", 0, "", turns, Outcome.FAILED, n_given=n_given)


def test_a_growing_context_is_one_row_read_where_each_turn_ends() -> None:
    # 1 2 | 3 4, then 5 is read and 6 said: ends at places 3 and 5.
    played = attempt(turn(((1, 2), (3, 4))), turn(((1, 2, 3, 4, 5), (6,))))
    assert step_rows(played) == [StepRow((1, 2, 3, 4, 5, 6), (3, 5), (0, 1))]


def test_a_rewritten_context_begins_another_row() -> None:
    played = attempt(turn(((1, 2), (3,))), turn(((9,), (4,))), turn(((9, 4, 8), (5,))))
    assert step_rows(played) == [StepRow((1, 2, 3), (2,), (0,)), StepRow((9, 4, 8, 5), (1, 3), (1, 2))]


def test_given_turns_are_no_steps_and_a_turn_of_two_calls_is_one() -> None:
    given_, two = turn(), turn(((1,), (2,)), ((1, 2, 3), (4,)))
    assert step_rows(attempt(given_, two, n_given=1)) == [StepRow((1, 2, 3, 4), (3,), (1,))]
    assert step_rows(attempt(given_)) == step_rows(attempt()) == []


def test_probabilities_telescope_and_aggregate_as_worked_by_hand() -> None:
    p = [0.9, 0.8, 0.3]
    assert telescoped(p) == pytest.approx([0.9, -0.1, -0.5])
    worked = {"min": 0.3, "product": 0.216, "last": 0.3, "mean": 2 / 3}
    for how, value in worked.items():
        assert aggregated(p, how) == pytest.approx(value)  # type: ignore[arg-type]
        assert aggregated([], how) == 0.0  # type: ignore[arg-type]
    assert telescoped([]) == []
    with pytest.raises(DataError):
        aggregated([1.2], "min")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_what_steps_earn_is_the_last_probability_and_each_aggregate_is_one(p: list[float]) -> None:
    assert sum(telescoped(p)) == pytest.approx(p[-1])
    low, product, mean = (aggregated(p, how) for how in ("min", "product", "mean"))
    assert 0 <= product <= low + 1e-12 and low <= mean + 1e-12 and mean <= 1 + 1e-12
