"""Two-level credit: options, what they earn, and whom each level compares, from worked numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.archer import ArCHer
from rlhf.credit.contrib.bilevel_gae import BiLevelGAE
from rlhf.credit.contrib.hgpo import HGPO
from rlhf.credit.contrib.hrpo import HRPO
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.credit.contrib.turn_rloo import TurnRLOO
from rlhf.credit.contrib.two_level import PLAN, TwoLevel, options_of
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.estimator import EstimatorCapabilities, compute_advantages, critic_of, turn_discount, with_nested
from rlhf.credit.gae import GAE
from rlhf.credit.gigpo import GiGPO
from rlhf.credit.grpo import GRPO
from rlhf.credit.turn_gae import TurnGAE
from rlhf.data import Generation, Score, ScoredGroup, Values, Verdict
from rlhf.errors import DataError
from rlhf.metrics import METRICS
from rlhf.rollout.branching import Branch, Fork, split_generations
from tests.credit.credit_groups import call, group_of, turn_of

#: A turn: (its calls in order, `p:...` naming a subgoal and `.` acting; its reward; the state it began in).
Told = tuple[list[str], float, str | None]


def said(text: str) -> Generation:
    """A call: two tokens where it names a subgoal, one where it acts."""
    return call((5, 7), PLAN) if text.startswith("p:") else call((6,))


def group(*attempts: list[Told]) -> ScoredGroup:
    turns_GK = []
    for told in attempts:
        named_K = [[c[2:] for c in calls if c.startswith("p:")] for calls, _, _ in told]
        notes_K = [{"subgoal": named[-1]} if named else {} for named in named_K]
        turns_GK.append(
            [turn_of(list(map(said, calls)), s, **n) for (calls, _, s), n in zip(told, notes_K, strict=True)]
        )
    return group_of(turns_GK, [[reward for _, reward, _ in told] for told in attempts])


#: Attempt A pursues the key for two turns and the door for one; B needs one turn for each.
A: list[Told] = [(["p:key", "."], 0.0, "x"), (["."], 1.0, "y"), (["p:door", "."], 2.0, "z")]
B: list[Told] = [(["p:key", "."], 0.0, "x"), ([".", "p:door", "."], 1.0, "w")]


def test_a_turn_belongs_to_the_option_that_acted_in_it() -> None:
    options = options_of(group(A, B))
    assert [(o.owner, o.subgoal, o.plan, o.own, o.turns) for o in options] == [
        (0, "key", (0,), (1, 2), range(0, 2)),
        (0, "door", (3,), (4,), range(2, 3)),
        # B's second turn begins with the executor's word that the key is found: a call of the first option.
        (1, "key", (0,), (1, 2), range(0, 1)),
        (1, "door", (3,), (4,), range(1, 2)),
    ]
    assert [o.state_key for o in options] == ["x", "z", "x", "w"]


def test_the_high_level_compares_discounted_returns_of_options() -> None:
    # γ = ½. A: 0 + ½·1 and ¼·2, in all 1; B: 0 and ½·1, in all ½. Mean ¾, deviation √(2·¼²) = .353553.
    credit = TwoLevel(planner=GRPO(), executor=None, gamma=0.5)(group(A, B))
    credit.check(group(A, B))
    assert credit.advantages_GNT[0][0] == pytest.approx((0.707105, 0.707105), abs=1e-6)
    assert credit.advantages_GNT[1][3] == pytest.approx((-0.707105, -0.707105), abs=1e-6)
    assert credit.advantages_GNT[0][1] == (0.0,), "the executor is not trained"
    assert credit.metrics["credit/n_options"] == 4


@pytest.mark.parametrize(
    ("compare", "expected", "n_alone"),
    [
        # Returns within the options: A 0 + 1 = 1 and 2; B 0 and 1. All together: less their mean 1.
        ("all", [[0.0, 0.0, 1.0], [-1.0, -1.0, 0.0]], 0),
        # The two keys have mean ½, the two doors 1½.
        ("subgoal", [[0.5, 0.5, 0.5], [-0.5, -0.5, -0.5]], 0),
        # The doors begin in different states: each is alone.
        ("state", [[0.5, 0.5, 0.0], [-0.5, -0.5, 0.0]], 2),
    ],
)
def test_the_low_level_compares_options_with_their_like(compare: Any, expected: Any, n_alone: int) -> None:
    credit = TwoLevel(planner=None, executor=DrGRPO(), compare=compare, horizon="option")(group(A, B))
    got = [[row[0] for n, row in enumerate(rows) if n not in (0, 3)] for rows in credit.advantages_GNT]
    assert got == [pytest.approx(row) for row in expected]
    assert all(x == 0.0 for rows in credit.advantages_GNT for n in (0, 3) for x in rows[n])
    assert credit.metrics["credit/n_singleton_options"] == n_alone


def test_a_longer_horizon_judges_an_option_by_what_followed_too() -> None:
    # A's key earns 0 + 1 and the door's 2 after it, in all 3; B's 0 and 1. The doors have nothing after them: 2 and 1.
    credit = TwoLevel(planner=None, executor=DrGRPO())(group(A, B))
    got = [[row[0] for n, row in enumerate(rows) if n not in (0, 3)] for rows in credit.advantages_GNT]
    assert got == [pytest.approx([1.0, 1.0, 0.5]), pytest.approx([-1.0, -1.0, -0.5])]
    # With a critic: 3 − 2 and 3 − 3 in the first option, which ends with the episode; 2 − 5 in the second.
    values = Values((((1.0, 0.0), (2.0,), (3.0,), (4.0, 0.0), (5.0,)),), (0.0,))
    [credit] = compute_advantages(
        TwoLevel(planner=None, executor=GAE(gamma=1, lam=1, whiten=False)), [group(A)], [values]
    )
    assert [credit.advantages_GNT[0][n][0] for n in (1, 2, 4)] == pytest.approx([1.0, 0.0, -3.0])


#: Two executors whose subgoal is reached: one says so, and the door's takes two turns; the other acts on.
ENDS: list[Told] = [(["p:key", "."], 0.0, "x"), ([".", "p:door", "."], 0.0, "y"), (["."], 1.0, "z")]
ACTS_ON: list[Told] = [(["p:key", "."], 0.0, "x"), (["."], 0.0, "y"), (["."], 1.0, "z")]


@pytest.mark.parametrize("executor", [GiGPO(gamma=0.5), HGPO(gamma=0.5), TaskNormalised(inner=GiGPO(gamma=0.5))])
def test_ending_a_subgoal_is_worth_no_more_than_acting_on(executor: Any) -> None:
    # γ = ½: both earn 1 two turns after x, one after y, so ¼ and ½, and 1 in all.
    credit = TwoLevel(planner=None, executor=executor)(group(ENDS, ACTS_ON))
    assert {x for rows in credit.advantages_GNT for row in rows for x in row} == {0.0}


def test_what_follows_an_option_is_discounted_by_the_executor() -> None:
    # γ = ½. A's key: 0 + ½·1 + ¼·2 = 1 and 1 + ½·2 = 2; the door's 2. B's key ends in the turn of the door: ½·1 and 1.
    executor = TurnGAE(gamma=0.5, lam=1, whiten=False)
    made = group(A, B)
    values = Values(tuple(tuple((0.0,) * g.n_tokens for g in t.generations) for t in made.trajectories), (0.0, 0.0))
    [credit] = compute_advantages(TwoLevel(planner=None, executor=executor), [made], [values])
    got = [[row[0] for n, row in enumerate(rows) if n not in (0, 3)] for rows in credit.advantages_GNT]
    assert got == [pytest.approx([1.0, 2.0, 2.0]), pytest.approx([0.5, 1.0, 1.0])]


def test_its_counters_are_metrics_of_both_levels() -> None:
    metrics = TwoLevel()(group(A, B)).metrics
    assert metrics["credit/n_groups"] == 3, "one of the planner, and one for each subgoal"
    assert all(name in METRICS for name in metrics)


def test_subgoals_are_compared_as_they_read() -> None:
    other: list[Told] = [(["p: KEY ", "."], 0.0, "x"), (["p:door", "."], 1.0, "w")]
    credit = TwoLevel(planner=None, executor=DrGRPO())(group(A, other))
    assert credit.advantages_GNT[1][1] == (-1.0,), "0 and the 1 that follows, against 1 and 2: 3"


def test_without_plans_it_is_the_low_estimator() -> None:
    flat = group([(["."], 1.0, None), (["."], 0.0, None)], [(["."], 0.0, None)])
    credit = TwoLevel()(flat)
    assert credit.advantages_GNT == GRPO()(flat).advantages_GNT
    assert credit.metrics["credit/n_options"] == 2


def test_actions_before_the_first_plan_are_an_option_whose_reward_goes_to_it() -> None:
    late: list[Told] = [(["."], 4.0, "x"), (["p:key", "."], 1.0, "y")]
    both = group(late, [(["p:key", "."], 0.0, "x")])
    credit = TwoLevel(planner=DrGRPO(), executor=None)(both)
    assert credit.advantages_GNT[0][1] == (2.5, 2.5), "5 in all, against a mean of 2½"
    assert TwoLevel(planner=None, executor=DrGRPO())(both).advantages_GNT[0][0] == (0.0,), (
        "it has nothing to be compared with"
    )


def test_a_named_reward_is_what_the_executor_is_trained_on() -> None:
    made = group(A, B)
    scores = tuple(
        Score({"near": Verdict(sum(v), per_turn=v)}, s.turns, s.total)
        for s, v in zip(made.scores, ((1.0, 1.0, 0.0), (0.0, 0.0)), strict=True)
    )
    named = replace(made, scores=scores)
    credit = TwoLevel(planner=DrGRPO(), executor=DrGRPO(), executor_reward="near", horizon="option")(named)
    assert credit.advantages_GNT[0][1] == (1.0,) and credit.advantages_GNT[0][4] == (0.0,)
    assert credit.advantages_GNT[0][0] == TwoLevel(planner=DrGRPO(), executor=None)(made).advantages_GNT[0][0]
    with pytest.raises(DataError, match="has no values per turn"):
        TwoLevel(executor_reward="far")(named)


def test_a_critic_serves_both_levels_and_an_option_is_cut_where_the_next_is_planned() -> None:
    one = group(A)
    v = (((1.0, 0.0), (2.0,), (3.0,), (4.0, 0.0), (5.0,)),)
    values = Values(v, (0.0,))
    low = GAE(gamma=1, lam=1, whiten=False)
    made = TwoLevel(planner=TurnGAE(gamma=1, lam=1, whiten=False), executor=low, horizon="option")
    [credit] = compute_advantages(made, [one], [values])
    credit.check(one)
    # High: options earn 1 and 2; 1 + 2 − 1 = 2 for the first, 2 − 4 = −2 for the second.
    assert credit.advantages_GNT[0][0] == pytest.approx((2.0, 2.0))
    assert credit.advantages_GNT[0][3] == pytest.approx((-2.0, -2.0))
    # Low: the key's option is cut in the state worth 4: 0 + 1 + 4 − 2 = 3, then 1 + 4 − 3 = 2; the door's ends: 2 − 5.
    assert [credit.advantages_GNT[0][n][0] for n in (1, 2, 4)] == pytest.approx([3.0, 2.0, -3.0])
    assert credit.returns_GNT is not None
    assert [row[0] for row in credit.returns_GNT[0]] == pytest.approx([3.0, 5.0, 5.0, 2.0, 2.0])
    with pytest.raises(DataError, match="needs the values of a critic"):
        made(one)


turns = st.tuples(
    st.lists(st.sampled_from(["p:a", "p:b", ".", "."]), max_size=3),
    st.floats(-3, 3),
    st.sampled_from(["x", "y", None]),
)


@given(st.lists(st.lists(turns, min_size=1, max_size=6), min_size=1, max_size=5), st.floats(0.1, 1))
def test_every_token_gets_a_number_and_options_part_the_turns(told: list[list[Told]], gamma: float) -> None:
    made = group(*told)
    for compare in ("subgoal", "state", "all"):
        TwoLevel(gamma=gamma, compare=compare)(made).check(made)
    for i, trajectory in enumerate(made.trajectories):
        own = [o for o in options_of(made) if o.owner == i]
        assert [t for o in own for t in o.turns] == list(range(len(trajectory.turns)))
        numbers = sorted(n for o in own for n in (*o.own, *o.plan))
        assert numbers == list(range(len(trajectory.generations)))


#: Turns in which the executor has the last word.
acted = st.tuples(
    st.sampled_from([["."], ["p:a", "."], [".", "p:b", "."], [".", "p:a", ".", "p:b", "."]]), *[st.floats(-3, 3)]
)


@given(st.lists(st.lists(acted, min_size=1, max_size=6), min_size=1, max_size=4), st.floats(0, 1))
def test_an_executors_turn_has_the_return_of_the_undivided_episode(told: list[list[Any]], gamma: float) -> None:
    made = group(*([(*turn, None) for turn in attempt] for attempt in told))
    rows = tuple(tuple((0.0,) * g.n_tokens for g in t.generations) for t in made.trajectories)
    values = [Values(rows, (0.0,) * len(rows))]
    executor = TurnGAE(gamma=gamma, lam=1, whiten=False)  # of a critic that says 0: the return itself
    [flat] = compute_advantages(executor, [made], values)
    [levels] = compute_advantages(TwoLevel(planner=None, executor=executor), [made], values)
    for trajectory, expected, got in zip(made.trajectories, flat.advantages_GNT, levels.advantages_GNT, strict=True):
        for generation, its, own in zip(trajectory.generations, expected, got, strict=True):
            assert own == pytest.approx((0.0,) * len(own) if generation.role == PLAN else its)


def test_one_subgoal_that_never_ends_is_credited_as_the_episode_is() -> None:
    other: list[Told] = [(["p:key", "."], 0.0, "x"), (["."], 0.0, "w"), (["."], 0.0, "y")]
    made = group(ACTS_ON, other)
    executor = GiGPO(statistics="trajectory")
    got = TwoLevel(planner=None, executor=executor)(made).advantages_GNT
    flat = executor(made).advantages_GNT
    assert [rows[1:] for rows in got] == [rows[1:] for rows in flat]


def test_a_level_names_the_critic_of_both() -> None:
    assert TwoLevel(executor=ArCHer()).needs_critic == "archer" and TwoLevel().needs_critic is None
    assert (
        critic_of(TwoLevel(planner=ArCHer(), executor=None)) == "archer" and critic_of(TwoLevel(executor=GAE())) is None
    )
    with pytest.raises(ValueError, match="different critics, archer and a value model"):
        TwoLevel(planner=ArCHer(), executor=GAE())


def test_something_has_to_be_trained() -> None:
    with pytest.raises(ValueError, match="nothing would be trained"):
        TwoLevel(planner=None, executor=None)


def test_a_turn_that_names_two_subgoals_has_an_option_for_each() -> None:
    # The key is found at once: 'done' is all that is said to it, and it is compared with keys, not with doors.
    both = turn_of(list(map(said, ["p:key", ".", "p:door", "."])), subgoal="key\ndoor")
    options = options_of(group_of([[both]], [[1.0]]))
    assert [(o.subgoal, o.plan, o.own, o.turns) for o in options] == [
        ("key", (0,), (1,), range(0, 0)),
        ("door", (2,), (3,), range(0, 1)),
    ]


def cut_in_pieces(whole: ScoredGroup, attempt: int, call: int) -> ScoredGroup:
    """The group after another attempt has left this one within a call of its first turn, after one token."""
    found, _ = split_generations(whole.trajectories, [Branch(attempt, (), fork=Fork(call, 1))])
    return replace(whole, trajectories=tuple(found))


def test_a_plan_in_pieces_names_one_subgoal() -> None:
    both = turn_of(list(map(said, ["p:key", ".", "p:door", "."])), subgoal="key\ndoor")
    first = cut_in_pieces(group_of([[both]], [[1.0]]), 0, 0)
    assert [(o.subgoal, o.plan, o.own, o.turns) for o in options_of(first)] == [
        ("key", (0, 1), (2,), range(0, 0)),
        ("door", (3,), (4,), range(0, 1)),
    ]
    # Both levels say of the pieces what they say of the whole call.
    whole = group(A, B)
    for settings in ({}, {"planner": TurnRLOO(), "compare": "all"}, {"planner": None, "horizon": "option"}):
        flat = TwoLevel(**settings)(whole).advantages_GNT
        head, tail, *others = TwoLevel(**settings)(cut_in_pieces(whole, 0, 0)).advantages_GNT[0]
        assert (head + tail, *others) == flat[0]


def test_to_a_critic_a_plan_in_pieces_is_worth_what_comes_after_it() -> None:
    pieces = cut_in_pieces(group(A), 0, 0)
    values = Values((((1.0,), (0.5,), (2.0,), (3.0,), (4.0, 0.5), (5.0,)),), (0.0,))
    low = TwoLevel(planner=None, executor=GAE(gamma=1, lam=1, whiten=False), horizon="option")
    [credit] = compute_advantages(low, [pieces], [values])
    assert credit.returns_GNT == (((2.0,), (2.0,), (5.0,), (5.0,), (5.0, 5.0), (2.0,)),)


def test_a_level_without_a_critic_does_not_draw_the_values_of_its_tokens_to_zero() -> None:
    values = Values((((1.0, 0.5), (2.0,), (3.0,), (4.0, 0.5), (5.0,)),), (0.0,))
    gae = GAE(gamma=1, lam=1, whiten=False)
    [low] = compute_advantages(TwoLevel(planner=DrGRPO(), executor=gae, horizon="option"), [group(A)], [values])
    # A plan is worth what comes after it. The key is cut in 4: 0 + 1 + 4 and 1 + 4; the door earns 2.
    assert low.returns_GNT == (((2.0, 2.0), (5.0,), (5.0,), (5.0, 5.0), (2.0,)),)
    [high] = compute_advantages(TwoLevel(planner=gae, executor=None), [group(A)], [values])
    assert high.returns_GNT is not None and [high.returns_GNT[0][n] for n in (1, 2, 4)] == [(2.0,), (3.0,), (5.0,)]


def test_estimators_declare_which_discount_is_per_turn() -> None:
    assert turn_discount(BiLevelGAE(gamma=0.5, turn_gamma=0.9)) == 0.9 and turn_discount(HGPO()) == 0.95
    assert turn_discount(GAE(gamma=0.5)) == 1.0 == turn_discount(GRPO()), "per token, and none"


def test_its_smallest_group_is_that_of_the_level_that_needs_more() -> None:
    assert TwoLevel().min_group == 2
    assert TwoLevel(planner=None, executor=TurnGAE()).min_group == TurnGAE().min_group


@pytest.mark.parametrize("level", ["planner", "executor"])
def test_an_estimator_may_read_the_turns_of_a_reward(level: str) -> None:
    turns = [turn_of([call((5,), PLAN), call((6, 7))], f"k{t}", subgoal=f"s{t}") for t in range(2)]
    group = group_of([turns, turns], [[0.0, 0.0], [0.0, 1.0]])
    settings: Any = {"planner": None, "executor": None, level: HRPO(reward="steps")}
    found = compute_advantages(TwoLevel(**settings), [group])[0].advantages_GNT
    assert len(found) == 2 and found[0] != found[1]


def test_the_rewards_whose_turns_are_read_are_named() -> None:
    made = TwoLevel(planner=HRPO(reward="steps"), executor=GRPO(), executor_reward="cost")
    named = [EstimatorCapabilities(part).turn_reward for part in with_nested(made)]
    assert named == ["cost", "steps", None]
