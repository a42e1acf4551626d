"""What every estimator of the catalogue promises, whatever its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.batching.samples import make_samples
from rlhf.credit.estimator import AdvantageEstimator, compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.data import Action, Credit, Finish, Generation, Prompt, ScoredGroup, Turn
from rlhf.errors import DataError
from tests.credit.credit_groups import (
    critic,
    estimators,
    group,
    group_of,
    outcome_group,
    per_token,
    score,
    trajectory,
    turn,
)

ESTIMATORS = estimators()
#: Estimators that no constant added to every score changes; the others use scores as they are.
NOT_CENTRED = ("hrpo", "grpo_lead", "event_order")
#: Estimators whose numbers are centred over all tokens of a step, and within a group only by chance.
CENTRED_OVER_STEP = ("reinforce_pp", "gae", "turn_gae", "bilevel_gae")
#: Estimators that weigh or raise what is centred, or use a reward as it is: their sum is whatever it is.
NOT_ZERO_SUM = ("hrpo", "grpo_lead", "hicra", "ktae", "archer", "oreal")
#: Estimators that need values to say anything of such groups at all; `test_sweet.py` asks for their sums.
CENTRED_WITH_VALUES = ("sweet",)
few = settings(max_examples=30)  # for each estimator
every = pytest.mark.parametrize("kind", ESTIMATORS)

turns = st.tuples(
    st.sampled_from([0.0, 0.1, 1.0]),  # earned
    st.sampled_from(["hall", "cellar", None]),  # state
    st.lists(st.sampled_from([3, 5, 7]), min_size=1, max_size=3),  # sampled ids
)
attempts = st.tuples(st.booleans(), st.lists(turns, min_size=1, max_size=4))
groups = st.lists(attempts, min_size=1, max_size=5)


def made_of(rows, task="maze/0"):
    return group_of(
        [[turn(state=s, ids=ids) for _, s, ids in row] for _, row in rows],
        [[r for r, _, _ in row] for _, row in rows],
        task=task,
        solved_G=[solved for solved, _ in rows],
    )


def credited(kind, made, constant=None):
    """Credit of the groups of a step, with the values of a critic for those that need one."""
    return compute_advantages(ESTIMATORS[kind], made, [critic(one, constant) for one in made])


@every
@few
@given(data=st.lists(groups, min_size=1, max_size=3))
def test_one_finite_number_per_sampled_token(kind, data):
    made = [made_of(rows, f"maze/{i}") for i, rows in enumerate(data)]
    for one, credit in zip(made, credited(kind, made), strict=True):
        credit.check(one)
        assert all(math.isfinite(x) and x >= 0 for x in credit.metrics.values())


@every
@few
@given(data=st.data())
def test_permuting_the_group_permutes_the_credit(kind, data):
    rows, other = data.draw(groups), data.draw(groups)
    order = data.draw(st.permutations(range(len(rows))))
    made = made_of(rows)
    moved = {name: tuple(getattr(made, name)[i] for i in order) for name in ("trajectories", "scores")}
    before = credited(kind, [made, made_of(other, "maze/1")])
    after = credited(kind, [replace(made, **moved), made_of(other, "maze/1")])
    assert after[0].advantages_GNT == tuple(before[0].advantages_GNT[i] for i in order)
    assert after[1].advantages_GNT == before[1].advantages_GNT


@every
@few
@given(data=st.lists(groups, min_size=1, max_size=3))
def test_permuting_the_groups_permutes_the_credit(kind, data):
    made = [made_of(rows, f"maze/{i}") for i, rows in enumerate(data)]
    before, after = credited(kind, made), credited(kind, made[::-1])
    assert [c.advantages_GNT for c in after[::-1]] == [c.advantages_GNT for c in before]
    totals = [sum(sum(c.metrics.values()) for c in credits) for credits in (before, after)]
    assert totals[0] == pytest.approx(totals[1])


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS if kind not in NOT_CENTRED])
@few
@given(
    rewards=st.lists(st.sampled_from([-1.0, -0.1, 0.0, 0.25, 0.5, 1.0, 10.0]), min_size=2, max_size=8),
    shift=st.floats(-100, 100),
)
def test_a_constant_added_to_every_score_changes_nothing(kind, rewards, shift):
    half = len(rewards) // 2
    before, after = (
        credited(kind, [outcome_group([r + c for r in part]) for part in (rewards[:half], rewards[half:])])
        for c in (0.0, shift)
    )
    for one, other in zip(before, after, strict=True):
        assert [x for row in per_token(one) for x in row] == pytest.approx(
            [x for row in per_token(other) for x in row], abs=1e-7
        )


returns = st.lists(st.sampled_from([-1.0, -0.1, 0.0, 0.25, 0.5, 1.0, 10.0]), min_size=1, max_size=6)


def answers(rows, ids=lambda i: [3 + i, 20 + i]):
    """Groups of one-turn attempts with these returns; every other one is solved, and no two say the same."""
    return [
        group_of(
            [[turn(ids=ids(i), state="hall")] for i in range(len(row))],
            [[r] for r in row],
            task=f"maze/{k}",
            solved_G=[i % 2 == 0 for i in range(len(row))],
        )
        for k, row in enumerate(rows)
    ]


def sums(credits):
    """The sum over the tokens of each group."""
    return [math.fsum(x for row in per_token(credit) for x in row) for credit in credits]


def exact(estimator):
    """An estimator that leaves out nothing for being small."""
    return replace(estimator, min_advantage=0.0) if hasattr(estimator, "min_advantage") else estimator


@pytest.mark.parametrize(
    "kind", [k for k in ESTIMATORS if k not in (*CENTRED_OVER_STEP, *NOT_ZERO_SUM, *CENTRED_WITH_VALUES)]
)
@few
@given(rows=st.lists(returns, min_size=1, max_size=3))
def test_credit_of_a_group_sums_to_zero(kind, rows):
    # Attempts of as many tokens: none counts more than another.
    assert sums(compute_advantages(exact(ESTIMATORS[kind]), answers(rows))) == pytest.approx(
        [0.0] * len(rows), abs=1e-8
    )


@pytest.mark.parametrize("kind", CENTRED_OVER_STEP)
@few
@given(data=st.lists(groups, min_size=1, max_size=3))
def test_credit_of_a_step_sums_to_zero(kind, data):
    # Attempts of any number of turns, turns of any number of tokens.
    assert math.fsum(sums(credited(kind, [made_of(rows) for rows in data]))) == pytest.approx(0, abs=1e-8)


def test_what_is_said_not_to_sum_to_zero_does_not():
    step = answers([[1.0, 0.0, 0.25], [0.5, 0.0, 0.0]], ids=lambda i: [5, 3] if i else [7, 3])
    found = {kind: sums(credited(kind, step)) for kind in ESTIMATORS}
    assert all(abs(found[kind][0]) > 0.01 for kind in (*CENTRED_OVER_STEP, *NOT_ZERO_SUM)), found


@every
def test_a_lone_attempt_has_no_signal(kind):
    # Nothing to compare it with, not even another token: the critic was equally wrong before each.
    made = answers([[0.0 if kind == "hrpo" else 0.5]])
    # To one that is told the answer it was as good as what the critic began as.
    [credit] = credited(kind, made, constant=0.0 if kind == "sweet" else 0.2)
    assert per_token(credit) == [[0.0, 0.0]]


@every
@few
@given(rows=groups, noise=st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_what_was_observed_changes_no_credit(kind, rows, noise):
    # What the environment says enters through states, scores and outcomes alone, never as tokens.
    made = made_of(rows)

    def noisy(t):
        turns = [
            replace(
                one,
                reply=f"reply {noise}",
                action=replace(
                    one.action,
                    generations=tuple(
                        replace(g, prompt=replace(g.prompt, token_ids=(*noise, *g.prompt.token_ids, *noise)))
                        for g in one.action.generations
                    ),
                ),
            )
            for one in t.turns
        ]
        return replace(t, opening=f"opening {noise}", turns=tuple(turns))

    other = replace(made, trajectories=tuple(map(noisy, made.trajectories)))
    assert credited(kind, [other]) == credited(kind, [made])


@every
def test_equal_scores_of_equal_attempts_give_exactly_zero(kind):
    # .1 + .2 differs from .3 in the last bit: rounding must not become a signal. The length differs nowhere.
    made = [outcome_group([0.1 + 0.2, 0.3, 0.3], task="maze/0"), outcome_group([0.3, 0.3], task="maze/1")]
    if kind == "hrpo":  # its rewards of steps are not compared with anything
        made = [replace(one, scores=tuple(score([0.0]) for _ in one.scores)) for one in made]
    for credit in credited(kind, made, constant=0.2):
        assert not any(x for row in per_token(credit) for x in row)


@every
def test_a_step_without_groups_and_a_group_without_trajectories_count_nowhere(kind):
    assert credited(kind, []) == []
    [credit] = credited(kind, [ScoredGroup("task", (), ())])
    assert credit.advantages_GNT == ()
    assert not any(credit.metrics.values())


@every
def test_trajectories_without_turns_are_compared_but_get_no_tokens(kind):
    some = ScoredGroup("task", (trajectory([]), trajectory([turn(3)])), (score([]), score([1.0])))
    none = ScoredGroup("other", (trajectory([], task="other"),), (score([]),))
    for one, credit in zip([some, none], credited(kind, [some, none]), strict=True):
        credit.check(one)
        assert credit.advantages_GNT[0] == ()


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_raises(kind, bad):
    with pytest.raises(DataError, match="not finite"):
        credited(kind, [outcome_group([1.0, 0.0]), outcome_group([1.0, bad])])


@every
def test_called_with_a_group_it_takes_the_group_for_the_step(kind):
    made = group([[0.0, 1.0], [0.5], [0.1, 0.0, 0.0]], [["hall", "cellar"], ["hall"], ["hall", "hall", None]])
    assert ESTIMATORS[kind](made, critic(made)) == credited(kind, [made])[0]


def growing(ids_K):
    """Turns whose prompts extend each other."""
    seen, turns = (1, 2), []
    for ids in ids_K:
        generation = Generation(Prompt(seen, stop_ids=(0,)), tuple(ids), (-0.5,) * len(ids), Finish.STOP, 0)
        turns.append(Turn(Action("act", (generation,)), "reply", state_key=str(len(ids))))
        seen += (*ids, 9)
    return turns


@every
@few
@given(data=st.data())
def test_both_layouts_give_every_token_the_same_number(kind, data):
    ids = st.lists(st.lists(st.sampled_from([3, 5, 7]), min_size=1, max_size=3), min_size=1, max_size=4)
    rows = data.draw(st.lists(st.tuples(st.booleans(), ids), min_size=1, max_size=4))
    rewards = [[data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in ids_K] for _, ids_K in rows]
    made = [group_of([growing(ids_K) for _, ids_K in rows], rewards, solved_G=[solved for solved, _ in rows])]
    credits = credited(kind, made)
    trains = credits[0].train_mask_G or (True,) * len(rows)
    n_calls = [len(ids_K) for (_, ids_K), own in zip(rows, trains, strict=True) if own]
    expected = [np.array(row, np.float32) for row in per_token(credits[0])]
    for layout in ("trajectory", "generation"):
        samples, _ = make_samples(made, credits, layout)
        assert len(samples) == (len(n_calls) if layout == "trajectory" else sum(n_calls))
        for i, numbers in enumerate(expected):
            found = [s.advantages[s.mask] for s in samples if s.sequence == i]
            assert np.array_equal(np.concatenate(found), numbers) if trains[i] else not found and not numbers.any()


def test_credit_of_counts_what_an_estimator_returns():
    class Lazy(GRPO):
        def over_batch(self, groups: list[ScoredGroup]) -> list[Credit]:
            return []

    assert isinstance(Lazy(), AdvantageEstimator)
    with pytest.raises(DataError, match="credit does not match the groups") as caught:
        compute_advantages(Lazy(), [outcome_group([1.0, 0.0])])
    assert "0 credits" in str(caught.value) and "Lazy.over_batch" in str(caught.value)
