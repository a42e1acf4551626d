"""Rows of some roles alone: what others sampled is read and not trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf.batching.samples import check_roles, make_samples
from rlhf.data import Finish, Generation
from rlhf.errors import DataError
from tests.batching.batch_parts import constant_credit, generation, group, trajectory

#: A subgoal is named, pursued twice in the same conversation; the prompts extend each other.
PLAN = replace(generation([1, 2], [3], -0.25), role="plan")
ACTS = (generation([1, 2, 3, 9], [4, 5], -0.75), generation([1, 2, 3, 9, 4, 5, 9], [6], -0.5))


def rows(roles: tuple[str, ...] | None, *generations: Generation):  # type: ignore[no-untyped-def]
    made = group(trajectory(*generations))
    return make_samples([made], [constant_credit(made, [2.0])], "trajectory", roles)


def test_a_row_has_the_tokens_of_all_and_trains_those_of_the_role() -> None:
    [row], counters = rows(("",), PLAN, *ACTS)
    assert row.token_ids.tolist() == [1, 2, 3, 9, 4, 5, 9, 6]
    assert row.mask.tolist() == [False, False, False, False, True, True, False, True]
    assert row.advantages.tolist() == [0, 0, 0, 0, 2, 2, 0, 2]
    assert counters["batch/n_policy_tokens"] == 3 and counters["batch/n_rewritten_prompts"] == 0


def test_what_follows_the_role_is_left_out() -> None:
    [row], counters = rows(("plan",), PLAN, *ACTS)
    assert row.token_ids.tolist() == [1, 2, 3] and row.mask.tolist() == [False, False, True]
    assert counters["batch/n_tokens"] == 3


def test_all_roles_are_as_none_given() -> None:
    [one], [other] = (rows(roles, PLAN, *ACTS)[0] for roles in (("", "plan", "memory"), None))
    assert (one.mask == other.mask).all() and (one.advantages == other.advantages).all()


def test_an_attempt_without_the_role_has_no_row_and_keeps_its_number() -> None:
    made = group(trajectory(*ACTS), trajectory(PLAN, *ACTS))
    samples, counters = make_samples([made], [constant_credit(made, [1.0, -1.0])], "trajectory", ("plan",))
    assert [s.sequence for s in samples] == [1] and counters["batch/n_trajectories_without_tokens"] == 1


def test_roles_that_nobody_has_are_an_error_that_names_those_there_are() -> None:
    made = [group(trajectory(PLAN, *ACTS))]
    check_roles(made, ("plan", "player 0"))
    with pytest.raises(DataError) as caught:
        check_roles(made, ("player 0",))
    assert caught.value.where == "train_roles" and "'', 'plan'" in str(caught.value)


def test_an_attempt_that_sampled_nothing_is_no_error() -> None:
    assert rows(("plan",))[0] == []
    check_roles([group(trajectory())], ("plan",))
    empty = Generation(generation([1], [2]).prompt, (), (), Finish.LENGTH, 0, role="plan")
    assert rows(("plan",), empty)[0] == []
