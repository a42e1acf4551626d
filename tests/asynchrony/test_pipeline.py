"""The state machine of asynchronous training: the bound on staleness, coverage, and the ledger, under any schedule."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.asynchrony.pipeline import Ledger, Pipeline, Rules
from rlhf.errors import CheckpointError, DeliveryError, TrainingError
from tests.asynchrony.schedules import Schedule, played


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    staleness = draw(st.integers(0, 4))
    order = draw(st.sampled_from(["in_order", "first_finished"]))
    return Rules(
        n_per_step=draw(st.integers(1, 5)),
        n_steps=draw(st.integers(1, 8)),
        staleness=staleness,
        depth=draw(st.integers(0, staleness)),
        order=order,
        is_fixed=order == "in_order" and draw(st.booleans()),
    )


def holds(rules: Rules, seed: int, drains: bool) -> Schedule:
    """Play a schedule, and look at what was trained."""
    made = played(rules, seed, drains=drains)
    flat = [ordinal for batch in made.trained for ordinal in batch]
    assert sorted(flat) == list(range(rules.n_steps * rules.n_per_step)), "an ordinal was skipped, or came twice"
    assert made.oldest_age <= rules.staleness
    if rules.order == "in_order":
        assert flat == sorted(flat) and made.oldest_age <= rules.depth
    ledger = made.pipeline.ledger
    assert ledger.generated == ledger.trained + ledger.failed and not ledger.stored and not ledger.running
    if rules.is_fixed:
        for ordinal, versions in made.played_by.items():
            assert versions == {max(0, ordinal // rules.n_per_step - rules.depth)}
    return made


schedules = given(rules(), st.integers(0, 2**32), st.booleans())


@schedules
@settings(max_examples=200)
def test_bound_coverage_and_ledger_hold_under_random_schedules(rules: Rules, seed: int, drains: bool) -> None:
    holds(rules, seed, drains)


@pytest.mark.extended
@schedules
@settings(max_examples=10_000)
def test_bound_coverage_and_ledger_hold_under_ten_thousand_random_schedules(
    rules: Rules, seed: int, drains: bool
) -> None:
    holds(rules, seed, drains)


def test_random_schedules_reach_the_bound_and_hold_deaths_and_cuts() -> None:
    made = [
        holds(Rules(2, 8, s, s, order), seed, False)
        for s in (1, 2, 3)
        for order in ("in_order", "first_finished")
        for seed in range(20)
    ]  # type: ignore[arg-type]
    assert {m.oldest_age for m in made} == {1, 2, 3} and sum(m.n_cuts for m in made) > 20 < sum(
        m.n_deaths for m in made
    )


class Eager(Pipeline):
    """Lets one group too many begin."""

    @property
    def _limit(self) -> int:
        return min(super()._limit + 1, self.rules.n_steps * self.rules.n_per_step)


class Greedy(Pipeline):
    """Trains what finished first, however long others wait."""

    def _next(self) -> tuple[int, ...] | None:
        n = self.rules.n_per_step
        return tuple(sorted(list(self.store)[:n])) if len(self.store) >= n else None


@pytest.mark.parametrize(("kind", "order"), [(Eager, "in_order"), (Greedy, "first_finished")])
def test_a_rule_that_is_too_lax_is_found_out(kind: type[Pipeline], order: Any) -> None:
    with pytest.raises(TrainingError, match="too old to train on") as caught:
        for seed in range(300):
            played(Rules(2, 8, 1, 1, order), seed, kind=kind)
    assert caught.value.got in ("age 2", "age 3")


def begun(rules: Rules, n: int, server: int = 0) -> Pipeline:
    """A pipeline of one server in which `n` groups run."""
    made = Pipeline(rules)
    made.join("server", server)
    assert [made.begin() for _ in range(n)] == list(range(n))
    return made


def finish(made: Pipeline, *ordinals: int) -> None:
    for ordinal in ordinals:
        made.sampled(ordinal, made.version, 3)
        made.finish(ordinal, {made.version: 3})


def test_admission_counts_what_began_and_not_what_finished() -> None:
    # (t + depth + 1) · B = (0 + 1 + 1) · 2 = 4 may begin before version 1 is installed, however many finish.
    made = begun(Rules(2, 9), 4)
    assert made.begin() is None
    finish(made, 0, 1)
    assert made.begin() is None
    made.train((0, 1))
    assert made.begin() is None, "trained, but not installed"
    made.install("server", 1)
    assert [made.begin() for _ in range(3)] == [4, 5, None]


def test_admission_waits_for_the_last_server() -> None:
    made = begun(Rules(1, 9), 2)
    made.join("other", 0)
    finish(made, 0)
    made.train((0,))
    made.install("server", 1)
    assert made.version == 0 and made.begin() is None
    made.install("other", 1)
    assert made.begin() == 2


def test_a_depth_below_the_bound_plays_fewer_steps_ahead() -> None:
    assert begun(Rules(2, 9, staleness=4, depth=1), 4).begin() is None
    assert begun(Rules(2, 9, staleness=4, depth=4), 10).begin() is None


def test_nothing_begins_behind_the_last_step() -> None:
    assert begun(Rules(2, 2, 4, 4), 4).begin() is None


def test_a_slow_group_does_not_change_the_batch_in_order() -> None:
    made = begun(Rules(2, 9), 4)
    finish(made, 1, 2, 3)
    assert made.batch() is None and made.waited_for() == [0]
    finish(made, 0)
    assert made.batch() == (0, 1)


def test_first_finished_overtakes_until_a_group_is_due() -> None:
    # S = 1, B = 2: 0 is slow. Step 0 trains 1 and 2; at step 1, of those of version 0, 0 and 3 are due.
    made = begun(Rules(2, 9, order="first_finished"), 4)
    made.sampled(0, 0, 1)
    finish(made, 1, 2, 3)
    assert made.batch() == (1, 2)
    made.train((1, 2))
    made.install("server", 1)
    assert [made.begin(), made.begin()] == [4, 5]
    finish(made, 4, 5)
    assert made.batch() is None, "0 would be too old one step later"
    finish(made, 0)
    assert made.batch() == (0, 3)


def test_a_worker_that_dies_gives_its_groups_back_under_their_ordinals() -> None:
    made = begun(Rules(2, 9), 4)
    made.sampled(2, 0, 7)
    made.is_held = True
    for ordinal in (0, 2):
        made.give_back(ordinal)
    assert made.ledger.failed == 7 and not made.is_drained
    assert [made.begin() for _ in range(3)] == [0, 2, None]


def test_the_ledger_tells_failed_attempts_from_those_that_count() -> None:
    made = begun(Rules(1, 9), 2)
    made.sampled(0, 0, 10)
    made.sampled(1, 0, 4)
    made.finish(0, {0: 7})
    found = made.ledger
    assert (found.generated, found.trained, found.stored, found.running, found.failed) == (14, 0, 7, 4, 3)
    assert made.train((0,)) == {0: 7}
    assert made.ledger.trained == 7 and made.ledger.stored == 0


def test_tokens_are_aged_by_the_version_that_sampled_each() -> None:
    made = begun(Rules(1, 9), 2)
    finish(made, 0)
    made.train((0,))
    made.sampled(1, 0, 5)
    made.install("server", 1)
    made.sampled(1, 1, 2)
    made.finish(1, {0: 5, 1: 2})
    assert made.age(1) == 1 and made.train((1,)) == {1: 5, 0: 2}


def test_a_server_with_old_weights_is_found_out() -> None:
    made = begun(Rules(1, 9), 1)
    finish(made, 0)
    made.train((0,))
    made.install("server", 1)
    assert made.begin() == 1
    with pytest.raises(DeliveryError, match="kept old weights"):
        made.sampled(1, 0, 3)
    with pytest.raises(DeliveryError, match="was not sent"):
        made.install("server", 0)
    with pytest.raises(DeliveryError, match="a server joined with weights of another step"):
        made.join("late", 0)


def test_attempts_cannot_hold_tokens_that_were_not_sampled() -> None:
    made = begun(Rules(1, 9), 1)
    made.sampled(0, 0, 3)
    with pytest.raises(TrainingError, match="no server sampled"):
        made.finish(0, {0: 4})


def test_a_step_trains_its_own_groups() -> None:
    made = begun(Rules(1, 9), 2)
    finish(made, 0, 1)
    with pytest.raises(TrainingError, match="other groups than its own"):
        made.train((1,))


def test_deterministic_weight_updates_install_when_all_that_may_begin_has_finished() -> None:
    made = begun(Rules(2, 9, is_fixed=True), 3)
    finish(made, 0, 1)
    made.train((0, 1))
    finish(made, 2)
    assert not made.may_install, "3 has not begun"
    assert made.begin() == 3
    with pytest.raises(DeliveryError, match="weight_update is deterministic"):
        made.install("server", 1)
    finish(made, 3)
    made.install("server", 1)


def test_a_cut_stores_what_finished_and_begins_again_what_ran() -> None:
    made = begun(Rules(2, 9), 4)
    finish(made, 0, 3)
    made.sampled(2, 0, 5)
    again = Pipeline.restored(made.rules, made.state())
    again.join("server", 0)
    assert list(again.store) == [0, 3] and again.ledger.failed == 5 and again.ledger.generated == 11
    assert [again.begin() for _ in range(3)] == [1, 2, None]


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"n_per_step": 3}, "n_per_step"), ({"staleness": 0, "depth": 0}, "asynchrony.staleness")],
)
def test_a_cut_is_not_restored_under_other_rules(changes: dict[str, int], names: str) -> None:
    made = begun(Rules(2, 9), 4)
    with pytest.raises(CheckpointError, match=names):
        Pipeline.restored(Rules(**{"n_per_step": 2, "n_steps": 9, **changes}), made.state())


def test_a_hundred_thousand_groups_leave_nothing_behind() -> None:
    n, size = 100_000, 32
    made = Pipeline(Rules(size, n // size, 2, 2))
    made.join("server", 0)
    while (batch := made.batch()) is not None or made.step < made.rules.n_steps:
        if batch is not None:
            made.train(batch)
            made.install("server", made.step)
        while (ordinal := made.begin()) is not None:
            made.sampled(ordinal, made.version, 100)
            made.sampled(ordinal, made.version, 100)
            made.finish(ordinal, {made.version: 200})
    assert made.ledger == Ledger(generated=200 * n, trained=200 * n)
    assert not made.running and not made.store and not made.returned
    assert len(pickle.dumps(made.state())) < 2_000, "the state grows with the groups that were trained"
