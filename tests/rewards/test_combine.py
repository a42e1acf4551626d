"""Composition: weights, schedules, gates, caps, and signals in order of importance."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards.answers.exact import ExactMatch
from rewards.answers.maths import Maths
from rewards.answers.tags import Format
from rewards.check import check_reward
from rewards.combinators.ask import ask
from rewards.combinators.combine import Combine, Part, Schedule, step_of
from rewards.contrib.ranked import Factor, Ranked, decided_at
from rewards.shaping.outcome import EnvironmentReward, Outcome
from rewards.shaping.penalties import InvalidActionPenalty, TurnCost
from rlhf.data import Outcome as End
from rlhf.data import Verdict
from rlhf.errors import RewardError
from rlhf.recipe import dump, load
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rewards.played import played, task

RECIPE = """
name: composed
policy: {kind: from_scratch}
environment: {kind: keyhole}
rewards:
  total:
    kind: combine
    parts:
      right: {reward: {kind: exact_match}}
      form: {reward: {kind: format}, weight: {start: 0.5, end: 0, steps: 100}}
      turns: {reward: {kind: turn_cost, cost: 0.1}, min_value: -0.2}
    gates: {form: 1}
    max_value: 1.2
  order:
    kind: ranked
    factors:
      - reward: {kind: outcome}
      - {reward: {kind: turn_cost}, margin_std: 0.5}
stages: [{kind: policy_gradient}]
"""


def value(part, trajectory, reference="Paris"):
    return asyncio.run(ask(part, task(reference), trajectory)).value


def fixed(number):
    """A reward of that value."""
    return lambda task, trajectory: number


def test_a_sum_by_hand():
    # 1 · 1 + .5 · −.2, the −.4 being clipped
    part = Combine(parts={"a": Part(reward=fixed(1)), "b": Part(reward=fixed(-0.4), weight=0.5, min_value=-0.2)})
    assert value(part, played("x")) == pytest.approx(0.9)
    assert value(Combine(parts=part.parts, max_value=0.5), played("x")) == 0.5
    assert value(Combine(parts=part.parts, min_value=1), played("x")) == 1


def test_a_gate_closes_the_sum():
    parts = {"right": Part(reward=ExactMatch()), "form": Part(reward=fixed(0.5), weight=0)}
    assert value(Combine(parts=parts, gates={"form": 0.5}), played("Paris")) == 1
    shut = Combine(parts=parts, gates={"form": 0.6}, gated_score=-1)
    assert value(shut, played("Paris")) == -1
    why = asyncio.run(shut(task("Paris"), played("Paris"))).why
    assert "form closed" in why and "right 1" in why


@pytest.mark.parametrize(
    ("shape", "step", "number"),
    # linear: 1 − 25/100; cosine: 1 − (1 − cos(π/4))/2
    [("linear", 0, 1), ("linear", 35, 0.75), ("linear", 999, 0), ("cosine", 35, 0.8535534), ("cosine", 60, 0.5)],
)
def test_a_weight_follows_the_steps_of_the_policy(shape, step, number):
    schedule = Schedule(start=1, end=0, steps=100, begin=10, shape=shape)
    part = Combine(parts={"a": Part(reward=fixed(2), weight=schedule)})
    assert schedule.at(step) == pytest.approx(number)
    assert value(part, played("x", version=step)) == pytest.approx(2 * number)
    assert value(part, played()) == 2  # nothing was sampled: step 0


def test_the_step_of_an_attempt_is_that_of_its_newest_token():
    [turn] = played("x", n_tokens=[4], version=3).turns
    newer = replace(turn.action.generations[0], version_spans=((3, 1), (7, 3)))
    attempt = replace(played("x"), turns=(replace(turn, action=replace(turn.action, generations=(newer,))),))
    assert step_of(attempt) == 7


def test_values_of_turns_stay_on_their_turns():
    penalty = Part(reward=InvalidActionPenalty(penalty=0.1), weight=2)
    cost = Part(reward=TurnCost(cost=0.25), min_value=-0.5)
    part = Combine(parts={"solved": Part(reward=fixed(1)), "invalid": penalty, "turns": cost})
    found = asyncio.run(part(task("x"), played("a", "b", "c")))
    # three turns cost −.75, clipped at −.5: the .25 and the 1 count on the last turn
    assert found.value == pytest.approx(0.5)
    assert found.per_turn == pytest.approx((-0.25, -0.25, 1.0))
    assert asyncio.run(part(task("x"), played())).per_turn is None


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4),
    st.floats(-5, 5),
    st.floats(0, 5),
    st.integers(0, 4),
)
def test_a_combined_value_is_within_its_caps_and_spread_over_its_turns(values, low, width, n_turns):
    parts = {str(i): Part(reward=TurnCost() if i % 2 else fixed(v), weight=v) for i, v in enumerate(values)}
    part = Combine(parts=parts, min_value=low, max_value=low + width)
    found = asyncio.run(part(task("x"), played(*["a"] * n_turns)))
    assert low <= found.value <= low + width
    assert found.per_turn is None or math.isclose(sum(found.per_turn), found.value, rel_tol=1e-6, abs_tol=1e-6)


def test_parts_may_be_verifiers_async_or_combined_themselves():
    @dataclass(frozen=True)
    class Async:
        async def __call__(self, task, trajectory):
            return Verdict(0.5)

    inner = Combine(parts={"right": Part(reward=Maths()), "a": Part(reward=Async())})
    part = Combine(parts={"inner": Part(reward=inner, weight=2), "exact": Part(reward=ExactMatch())})
    assert value(part, played(r"\boxed{1/2}"), reference="0.5") == pytest.approx(3)  # 2 · (1 + .5) + 0
    report = check_reward(part)
    assert report.ok, str(report)


def test_what_a_part_does_wrong_is_an_error():
    with pytest.raises(RewardError, match="no finite number"):
        value(Combine(parts={"a": Part(reward=fixed(math.nan))}), played("x"))
    group = asyncio.run(
        score_group(
            task("x"), [played("x")], {"a": WeightedReward("a", 1, Combine(parts={"a": Part(reward=fixed("yes"))}))}
        )
    )
    assert not group.scores and "no finite number" in group.failures[0].message


CHEAPEST = Combine(parts={"turns": Part(reward=TurnCost(cost=0.1))}, min_value=-0.5)
AT_MOST_ONE = Combine(parts={"earned": Part(reward=EnvironmentReward())}, max_value=1.0)
SOLVED_BEHIND_GATE = Combine(
    parts={"earned": Part(reward=EnvironmentReward(), weight=0.0), "solved": Part(reward=Outcome())},
    gates={"earned": 0.5},
)


@pytest.mark.parametrize(
    ("reward", "given", "own", "expected"),
    [
        (CHEAPEST, [0.0] * 10, [0.0] * 2, -0.2),
        (CHEAPEST, [0.0] * 10, [0.0] * 6, -0.5),
        (AT_MOST_ONE, [0.8], [0.5], 0.5),
        (AT_MOST_ONE, [1.0, 1.0], [0.1], 0.1),
        (AT_MOST_ONE, [0.8], [1.5], 1.0),
        (SOLVED_BEHIND_GATE, [0.8], [0.0], 0.0),
        (SOLVED_BEHIND_GATE, [0.0], [0.8], 1.0),
        (Combine(parts={"inner": Part(reward=CHEAPEST, weight=2.0)}), [0.0] * 10, [0.0] * 2, -0.4),
    ],
)  # fmt: skip
def test_bounds_and_gates_look_at_the_turns_of_the_policy(
    reward: Combine, given: list[float], own: list[float], expected: float
) -> None:
    attempt = played(*["go"] * len(given + own), outcome=End.SOLVED)
    turns = [replace(turn, reward=earned) for turn, earned in zip(attempt.turns, given + own, strict=True)]
    attempt = replace(attempt, turns=tuple(turns), n_given=len(given))
    group = asyncio.run(score_group(task(), (attempt,), {"total": WeightedReward("total", 1.0, reward)}))
    [score] = group.scores
    assert score.total == pytest.approx(expected) and not any(score.turns[: len(given)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Combine(parts={}), "at least one"),
        (lambda: Combine(parts={"a": Part(reward=Outcome())}, gates={"b": 1}), "no part 'b'; there are a"),
        (lambda: Part(reward=Outcome(), min_value=1, max_value=0), "more than max_value"),
        (lambda: Ranked(factors=()), "at least one"),
        (lambda: Schedule(start=0, end=1, steps=0), "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


# --- in order of importance -------------------------------------------------------------------------------------------


def test_the_first_factor_that_tells_apart_decides():
    assert decided_at((0.5, 0.9), (0.52, 0.1), (0.05, 0.05)) == 1  # .02 is a tie; .8 is not
    assert decided_at((0.5, 0.9), (0.6, 0.1), (0.05, 0.05)) == 0
    assert decided_at((0.5,), (0.5,), (0.0,)) == -1
    part = Ranked(factors=(Factor(reward=Outcome(), margin=0.05), Factor(reward=Outcome(), margin=0.05)))
    # a and b tie on the first; a beats b on the second; c beats both on the first
    rows = [(0.5, 0.9), (0.52, 0.1), (0.9, 0.0)]
    assert [v.value for v in part.compare(rows)] == [0.5, 0.0, 1.0]
    faded = Ranked(factors=part.factors, decay=0.5)
    # a: +.5 at level 1, −1 at level 0: ½ + (−.5/2)/2
    assert [v.value for v in faded.compare(rows)] == pytest.approx([0.375, 0.125, 1.0])
    assert [v.value for v in part.compare(rows[:1])] == [0.5]
    assert part.compare([]) == []


def test_margins_may_be_shares_of_the_deviation():
    # 0, 1, 5 deviate by √(14/3) = 2.16 from their mean 2; half of that is 1.08, so 0 and 1 tie
    part = Ranked(factors=(Factor(reward=Outcome(), margin_std=0.5),))
    assert [v.value for v in part.compare([(0,), (1,), (5,)])] == [0.25, 0.25, 1.0]


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=6), st.floats(0.1, 1))
def test_comparisons_cancel(rows, decay):
    part = Ranked(factors=(Factor(reward=Outcome()), Factor(reward=Outcome(), margin=1)), decay=decay)
    values = [v.value for v in part.compare(rows)]
    assert all(0 <= v <= 1 for v in values)
    assert sum(values) == pytest.approx(len(rows) / 2)  # what one wins the other loses


def test_a_group_is_ranked_by_its_rewards():
    part = Ranked(factors=(Factor(reward=ExactMatch()), Factor(reward=TurnCost())))
    group = [played("a", "Paris"), played("Paris", attempt=1), played("Rome", attempt=2)]
    found = asyncio.run(part.over_group(task("Paris"), group))
    assert [v.value for v in found] == [0.5, 1.0, 0.0]  # right before wrong, then short before long
    report = check_reward(Ranked(factors=(Factor(reward=Outcome()),)))
    assert report.ok, str(report)


def test_all_of_it_in_a_recipe(tmp_path):
    (tmp_path / "composed.yaml").write_text(RECIPE)
    recipe = load(tmp_path / "composed.yaml")
    total = recipe.rewards["total"].reward
    assert isinstance(total, Combine) and isinstance(total.parts["form"].reward, Format)
    assert total.parts["form"].weight == Schedule(start=0.5, end=0, steps=100)
    (tmp_path / "again.yaml").write_text(dump(recipe))
    again = load(tmp_path / "again.yaml")
    assert again.rewards == recipe.rewards
