from __future__ import annotations

import asyncio
import inspect
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards.answers.exact import ExactMatch
from rewards.check import check_reward
from rewards.shaping.outcome import EnvironmentReward, Outcome
from rewards.shaping.penalties import InvalidActionPenalty, Overlong, TurnCost
from rewards.verified import Verified, is_verifier
from rlhf.catalog import CATALOG
from rlhf.data import Action, Finish, Generation, Prompt, Task, Trajectory, Turn
from rlhf.data import Outcome as End
from rlhf.errors import RewardError
from rlhf.recipe.builder import build_part
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rewards import shipped
from tests.test_catalog import MODELS, NEEDED

TASK = Task("t", reference="Paris")
ALL = [
    Outcome(),
    EnvironmentReward(),
    InvalidActionPenalty(),
    TurnCost(),
    Overlong(max_tokens=9, buffer=5),
    ExactMatch(),
]


def trajectory(*turns, outcome=End.FAILED, attempt=0):
    return Trajectory("t", attempt, "", turns, outcome)


def turn(text="a", reward=0.0, valid=True):
    return Turn(Action(text), "b", reward=reward, valid=valid)


@pytest.mark.parametrize("outcome", [o for o in End if not o.is_infrastructure_error])
def test_outcome_is_one_value_for_solved_and_another_for_the_rest(outcome):
    got = Outcome(success=10.0, failure=-1.0)(TASK, trajectory(outcome=outcome))
    assert got.value == (10.0 if outcome is End.SOLVED else -1.0)
    assert got.why == outcome.value
    assert Outcome()(TASK, trajectory(outcome=outcome)).value == float(outcome is End.SOLVED)


def test_environment_reward_keeps_each_reward_on_its_turn():
    got = EnvironmentReward()(TASK, trajectory(turn(reward=0.5), turn(), turn(reward=2.0)))
    assert (got.value, got.per_turn) == (2.5, (0.5, 0.0, 2.0))


def test_penalties_fall_on_their_turns():
    played = trajectory(turn(), turn(valid=False), turn(valid=False), turn())
    got = InvalidActionPenalty(penalty=0.1)(TASK, played)
    assert got.per_turn == (0.0, -0.1, -0.1, 0.0)
    assert got.value == pytest.approx(-0.2)
    assert got.why == "2 invalid actions"
    cost = TurnCost(cost=0.25)(TASK, played)
    assert (cost.value, cost.per_turn) == (-1.0, (-0.25,) * 4)


@pytest.mark.parametrize(
    ("n_tokens", "value"),
    # 80 tokens are free; 90 are (90 − 80) / 20 of the way; no further down than −1
    [([0], 0.0), ([50, 30], 0.0), ([50, 40], -0.5), ([81], -0.05), ([99, 1], -1.0), ([101], -1.0), ([400], -1.0)],
)
def test_overlong_falls_over_its_buffer_and_counts_sampled_tokens_of_all_turns(n_tokens, value):
    prompt = Prompt(tuple(range(1000)))  # as long as it likes
    made = [Generation(prompt, (1,) * n, (-1.0,) * n, Finish.STOP, 0) for n in n_tokens]
    played = trajectory(*(Turn(Action("a", (g,)), "b") for g in made))
    assert Overlong(max_tokens=100, buffer=20)(TASK, played).value == pytest.approx(value)


def test_an_overlong_buffer_lies_within_the_limit():
    with pytest.raises(ValidationError, match="before the first token"):
        Overlong(max_tokens=5, buffer=6)


def test_a_penalised_group_scores_as_worked_by_hand():
    # Four attempts solved, lost, lost, solved; the second has one invalid action: 1, 0 − 0.1, 0, 1.
    ends = [End.SOLVED, End.FAILED, End.FAILED, End.SOLVED]
    played = [trajectory(turn(valid=i != 1), outcome=end, attempt=i) for i, end in enumerate(ends)]
    rewards = {"outcome": Outcome(), "invalid": InvalidActionPenalty(penalty=0.1)}
    weighted = {name: WeightedReward(name, 1.0, reward) for name, reward in rewards.items()}
    group = asyncio.run(score_group(TASK, played, weighted))
    assert [s.total for s in group.scores] == pytest.approx([1.0, -0.1, 0.0, 1.0])


def test_weights_are_factors_of_what_real_rewards_say_of_a_real_attempt():
    world, agent = shipped.built("environment", shipped.SEARCH), shipped.built("agent", shipped.CHAT)
    task = shipped.first_task(world)
    search, answer = world.plan(task, ())
    played = shipped.attempt(world, agent, [search, "well?", answer])
    kinds = {"right": ("format_outcome", 1.0), "search": ("search_efficiency", 0.5), "cost": ("turn_cost", 2.0)}
    rewards = {
        name: WeightedReward(name, weight, shipped.built("reward", {"kind": kind}))
        for name, (kind, weight) in kinds.items()
    }
    [score] = asyncio.run(score_group(task, [played], rewards)).scores
    # Right, and one reply is no action of the world: 1 - .2; -1 at weight .5; three turns of .01 at weight 2.
    assert score.total == pytest.approx(0.8 - 0.5 - 0.06)


@pytest.mark.parametrize(
    ("answer", "value"),
    [("Paris", 1), (" paris.\n", 1), ("ＰＡＲＩＳ", 1), ("the city of Paris", 0), ("", 0), ("Par is", 0)],
)
def test_exact_match_compares_normalised_text(answer, value):
    assert ExactMatch()(TASK, trajectory(turn("London"), turn(answer))).value == value


def test_exact_match_can_be_told_to_look_closely():
    assert ExactMatch(ignore_case=False).judge("paris", "Paris").value == 0
    assert ExactMatch(ignore_end_marks=False).judge("Paris.", "Paris").value == 0
    assert ExactMatch().judge("?", "!").value == 0  # marks alone are not nothing


def test_exact_match_without_a_reference_is_an_error_and_without_an_action_a_zero():
    with pytest.raises(RewardError, match="no reference"):
        ExactMatch()(Task("t"), trajectory(turn()))
    assert ExactMatch()(TASK, trajectory()).value == 0.0


@given(st.text(), st.text())
def test_exact_match_never_raises(answer, reference):
    assert ExactMatch().judge(answer, reference).value == ExactMatch().judge(reference, answer).value
    assert ExactMatch().judge(answer, answer).value == float(ExactMatch().normal(answer) != "")


@pytest.mark.parametrize("reward", ALL, ids=lambda r: type(r).__name__)
@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), max_size=6))
def test_per_turn_values_match_the_turns_and_sum_to_the_value(reward, turns):
    got = reward(TASK, trajectory(*(turn(reward=r, valid=v) for r, v in turns)))
    assert got.per_turn is None or len(got.per_turn) == len(turns)
    assert got.per_turn is None or sum(got.per_turn) == pytest.approx(got.value)


# ExactMatch is not among them: it refuses a task without a reference, and the checker makes up such tasks.
@pytest.mark.parametrize("reward", ALL[:-1], ids=lambda r: type(r).__name__)
def test_rewards_keep_their_promises(reward):
    played = [(TASK, trajectory(turn("Paris", 1.0), outcome=End.SOLVED)), (TASK, trajectory(turn(valid=False)))]
    report = check_reward(reward, played)
    assert report.ok, str(report)
    assert pickle.loads(pickle.dumps(reward)) == reward


# --- every reward of the catalogue -----------------------------------------------------------------------------------

CATALOGUE = {
    kind: build_part("reward", {"kind": kind, **NEEDED.get(("reward", kind), {})}, kind, base=Path())
    for kind in CATALOG["reward"]
    if kind not in MODELS  # a model has no bounds that are known beforehand: tests/training/test_reward_model.py
}
#: What rewards ask tasks for.
INFO = {"key_steps": ["a", ["1", "one"]], "steps": [{"call": "look", "query": "1 2"}]}
#: The least and the most of an episode of `K` turns that earned `r`; of all others, 0 and 1.
BOUNDS = {
    "environment": lambda r: (sum(r), sum(r)),
    "invalid_action": lambda r: (-0.1 * len(r), 0),
    "turn_cost": lambda r: (-0.01 * len(r), 0),
    "overlong": lambda r: (-1, 0),
    "budget": lambda r: (-1, 0),
    "repetition": lambda r: (-1, 0),
    "patch_similarity": lambda r: (-1, 1),
    "search_efficiency": lambda r: (-1, 1.6),
    "tool_use": lambda r: (-1, 1.1),
    "cost_aware": lambda r: (-1, 1),
    "page_action": lambda r: (0, 2002),
    "budgeted": lambda r: (0, 4),
}
#: Any code point, of which a good part are those that break parsers.
strange = st.one_of(st.text(max_size=20), st.text(alphabet='{}[]()\\"%.9eE+-\x00\u202e\u0663½ \n', max_size=20))
said = st.tuples(strange, st.one_of(st.none(), strange), st.floats(-9, 9), st.booleans(), st.integers(0, 150))


def attempts_of(rows):
    """Attempts whose policy and environment said these things."""
    prompt = Prompt((1,))
    return [
        trajectory(
            *(
                Turn(
                    Action(text, (Generation(prompt, (3,) * n, (-1.0,) * n, Finish.STOP, 0),), error=error),
                    text[::-1],
                    reward=reward,
                    valid=valid,
                )
                for text, error, reward, valid, n in turns
            ),
            outcome=outcome,
            attempt=i,
        )
        for i, (turns, outcome) in enumerate(rows)
    ]


def judged(reward, task, attempts):
    """The verdict on each attempt, of rewards of one and of rewards of a group."""
    if hasattr(reward, "over_group"):
        given = reward.over_group(task, attempts)
        return list(asyncio.run(given) if inspect.iscoroutine(given) else given)
    called = Verified(reward) if is_verifier(reward) else reward

    async def all_of_them():
        found = [called(task, attempt) for attempt in attempts]
        return [await verdict if inspect.isawaitable(verdict) else verdict for verdict in found]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("kind", CATALOGUE)
@given(
    rows=st.lists(
        st.tuples(st.lists(said, max_size=3), st.sampled_from([o for o in End if not o.is_infrastructure_error])),
        max_size=4,
    ),
    reference=strange,
)
def test_whatever_was_said_a_reward_is_bounded_and_says_the_same_again(kind, rows, reference):
    reward, attempts = CATALOGUE[kind], attempts_of(rows)
    # Where a reference has to be of one form, it is of that form.
    task = Task("t", reference=next((of for _, of in getattr(reward, "examples", ())), reference), info=INFO)
    found = judged(reward, task, attempts)
    assert len(found) == len(attempts)
    for verdict, attempt in zip(found, attempts, strict=True):
        low, high = BOUNDS.get(kind, lambda r: (0, 1))([t.reward for t in attempt.turns])
        assert low - 1e-9 <= verdict.value <= high + 1e-9
        assert verdict.per_turn is None or sum(verdict.per_turn) == pytest.approx(verdict.value)
    # Again, by another object, on other objects.
    again = judged(pickle.loads(pickle.dumps(reward)), replace(task), attempts_of(rows))
    assert [(v.value, v.per_turn, v.why) for v in again] == [(v.value, v.per_turn, v.why) for v in found]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Outcome(succes=1.0),
        lambda: Outcome(success=float("nan")),
        lambda: InvalidActionPenalty(penalty=-0.1),
        lambda: TurnCost(cost="much"),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(ValidationError):
        make()
