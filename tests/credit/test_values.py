"""GAE over tokens, over turns and at both levels: worked examples, and what holds whatever the values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.archer import ArCHer
from rlhf.credit.contrib.bilevel_gae import BiLevelGAE
from rlhf.credit.contrib.duration_aware import DurationAware
from rlhf.credit.contrib.hicra import HICRA
from rlhf.credit.contrib.ktae import KTAE
from rlhf.credit.contrib.sweet import SWEET
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.gae import GAE
from rlhf.credit.returns import discounted_returns
from rlhf.credit.turn_gae import TurnGAE
from rlhf.data import Action, Credit, Generation, Outcome, Prompt, ScoredGroup, Values
from rlhf.errors import DataError
from tests.credit.credit_groups import critic, estimators, group, group_of, per_token, turn

KINDS = (GAE, TurnGAE, BiLevelGAE)
#: Those that need values of actions; `test_archer.py` and `test_sweet.py` test them.
OF_ACTIONS = (ArCHer, SWEET)
every = pytest.mark.parametrize("kind", KINDS)
numbers = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0])
lengths = st.lists(st.integers(0, 3), max_size=4)
gammas = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def values_of(rows, cut=0.0):
    """Values of one trajectory whose turns have one generation each."""
    return Values((tuple(map(tuple, rows)),), (cut,))


def cut_short(made: ScoredGroup, outcome: Outcome = Outcome.TURN_LIMIT) -> ScoredGroup:
    return replace(made, trajectories=tuple(replace(t, outcome=outcome) for t in made.trajectories))


def numbers_of(credit: Credit):
    """Advantages and returns of the only trajectory."""
    assert credit.returns_GNT is not None
    return [x for row in per_token(credit) for x in row], [x for row in credit.returns_GNT[0] for x in row]


def check(estimator, made, values, advantages, returns):
    found = numbers_of(replace(estimator, whiten=False)(made, values))
    assert found == (pytest.approx(advantages, abs=1e-5), pytest.approx(returns, abs=1e-5))


@st.composite
def episodes(draw):
    """A trajectory of turns of 0 to 3 tokens, with values, and a value of the state it was cut in where it was."""
    sizes = draw(lengths)
    made = group([[draw(numbers) for _ in sizes]], lengths_GK=[sizes])
    is_cut = draw(st.booleans())
    values = values_of([[draw(numbers) for _ in range(n)] for n in sizes], draw(numbers) if is_cut else 0.0)
    return (cut_short(made) if is_cut else made), values


def test_every_estimator_of_the_catalogue_that_needs_a_critic_is_tested():
    assert {type(estimator) for estimator in estimators().values() if estimator.needs_values} == {*KINDS, *OF_ACTIONS}


def test_gae_worked_example():
    # Tokens t1 t2 | observation | t3, which earns 1; γ = .9, λ = .8, γλ = .72. δ_3 = 1 − .3 = .7; δ_2 = .9 · .3 − .2 =
    # .07, A_2 = .07 + .72 · .7 = .574; δ_1 = .9 · .2 − .1 = .08, A_1 = .08 + .72 · .574 = .49328. The observation is
    # nowhere: γ acts between t2 and t3 once. Returns are A + V.
    made = group([[0, 1]], lengths_GK=[[2, 1]])
    check(
        GAE(gamma=0.9, lam=0.8), made, values_of([[0.1, 0.2], [0.3]]), [0.49328, 0.574, 0.7], [0.59328, 0.774, 1.0]
    )  # fmt: skip


def test_gae_goes_on_from_the_state_a_limit_cut_the_trajectory_in():
    # δ_3 = 0 + .9 · .5 − .3 = .15; A_2 = .07 + .72 · .15 = .178; A_1 = .08 + .72 · .178 = .20816.
    made, values = cut_short(group([[0]], lengths_GK=[[3]])), values_of([[0.1, 0.2, 0.3]], 0.5)
    check(GAE(gamma=0.9, lam=0.8), made, values, [0.20816, 0.178, 0.15], [0.30816, 0.378, 0.45])
    # The last turn and the last level go on from it too: .95 · .5 − .1 = .375; .95 · .5 − .3 = .175, then .275, .375.
    check(TurnGAE(), made, values, [0.375] * 3, [0.475] * 3)
    check(BiLevelGAE(), made, values, [0.375, 0.275, 0.175], [0.475] * 3)


def test_turn_gae_worked_example():
    # V before each turn (.4, .5, .7), the last earns 1; γ = .95, λ = .9, γλ = .855. δ_3 = .3; δ_2 = .95 · .7 − .5 =
    # .165, A_2 = .165 + .855 · .3 = .4215; δ_1 = .95 · .5 − .4 = .075, A_1 = .075 + .855 · .4215 = .435383. The values
    # within a turn (9) are not looked at, and every token of a turn has its return.
    made = group([[0, 0, 1]], lengths_GK=[[2, 1, 3]])
    values = values_of([[0.4, 9], [0.5], [0.7, 9, 9]])
    advantages = [0.435382] * 2 + [0.4215] + [0.3] * 3
    check(TurnGAE(lam=0.9), made, values, advantages, [0.835382] * 2 + [0.9215] + [1.0] * 3)


@pytest.mark.parametrize(
    ("estimator", "advantages", "returns"),
    [
        # Turn ends e1, e2 with V .3 and .6, earning .5 and 1; γ_H = .95. H_2 = 1 − .6 = .4; δ_1 = .5 + .95 · .6 − .3 =
        # .77, H_1 = .77 + .95 · .4 = 1.15. Within the turns γλ = 1: 1.15, .3 − .2 + 1.15 = 1.25, .2 − .1 + 1.25 = 1.35;
        # and .4, .6 − .5 + .4 = .5, .5 − .4 + .5 = .6.
        (BiLevelGAE(), [1.35, 1.25, 1.15, 0.6, 0.5, 0.4], [1.45, 1.45, 1.45, 1.0, 1.0, 1.0]),
        # λ = .9: H_1 = .77 + .855 · .4 = 1.112. γ = .99, γλ = .891: .297 − .2 + .891 · 1.112 = 1.087792, .198 − .1 +
        # .891 · 1.087792 = 1.067223; .594 − .5 + .3564 = .4504, .495 − .4 + .891 · .4504 = .496306.
        (
            BiLevelGAE(gamma=0.99, lam=0.9),
            [1.067223, 1.087792, 1.112, 0.496306, 0.4504, 0.4],
            [1.167223, 1.287792, 1.412, 0.896306, 0.9504, 1.0],
        ),
    ],
    ids=repr,
)
def test_bilevel_gae_worked_example(estimator, advantages, returns):
    made = group([[0.5, 1]], lengths_GK=[[3, 3]])
    check(estimator, made, values_of([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), advantages, returns)


def test_turns_that_earn_nothing_are_turns_of_their_own():
    # Three turns of one token, only the last earns: H as in turn-level GAE with V (.4, .5, .7), where turn ends guessed
    # from rewards would see one turn. An episode that earns nothing at all has three turns too: −.7, .165 − .855 · .7 =
    # −.4335, .075 − .855 · .4335 = −.295643.
    values = values_of([[0.4], [0.5], [0.7]])
    check(
        BiLevelGAE(lam=0.9), group([[0, 0, 1]], lengths_GK=[[1, 1, 1]]), values,
        [0.435382, 0.4215, 0.3], [0.835382, 0.9215, 1.0],
    )  # fmt: skip
    check(
        BiLevelGAE(lam=0.9), group([[0, 0, 0]], lengths_GK=[[1, 1, 1]]), values,
        [-0.295643, -0.4335, -0.7], [0.104357, 0.0665, 0.0],
    )  # fmt: skip


@every
@given(episode=episodes(), gamma=gammas, lam=gammas)
def test_turns_without_sampled_tokens_hand_on_their_reward_and_vanish(kind, episode, gamma, lam):
    made, values = episode
    estimator = kind(gamma=gamma, lam=lam, whiten=False)
    sizes = [len(g.token_ids) for g in made.trajectories[0].generations]
    kept, rewards, early = [], [], 0.0
    for n, row, reward in zip(sizes, values.values_GNT[0], made.scores[0].turns, strict=True):
        if n:
            kept.append(row)
            rewards.append(reward + early)
            early = 0.0
        elif kept:
            rewards[-1] += reward
        else:
            early += reward
    shorter = group([rewards], lengths_GK=[list(map(len, kept))])
    shorter = replace(
        shorter, trajectories=tuple(replace(t, outcome=made.trajectories[0].outcome) for t in shorter.trajectories)
    )
    assert numbers_of(estimator(made, values)) == numbers_of(
        estimator(shorter, values_of(kept, *values.bootstrap_values_G))
    )


@every
@given(episode=episodes(), cuts=st.data())
def test_how_often_the_policy_was_called_within_a_turn_does_not_matter(kind, episode, cuts):
    made, values = episode
    t = made.trajectories[0]
    turns, rows = [], []
    for one, row in zip(t.turns, values.values_GNT[0], strict=True):
        [whole] = one.generations
        at = cuts.draw(st.integers(0, len(row)))
        parts = [
            replace(whole, token_ids=whole.token_ids[s], logprobs=whole.logprobs[s])
            for s in (slice(at), slice(at, None))
        ]
        turns.append(replace(one, action=replace(one.action, generations=tuple(parts))))
        rows += [row[:at], row[at:]]
    cut_up = replace(made, trajectories=(replace(t, turns=tuple(turns)),))
    estimator = kind(gamma=0.9, lam=0.8, whiten=False)
    assert numbers_of(estimator(cut_up, values_of(rows, *values.bootstrap_values_G))) == numbers_of(
        estimator(made, values)
    )


@every
@given(episode=episodes(), noise=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_observations_do_not_matter(kind, episode, noise):
    made, values = episode
    t = made.trajectories[0]

    def noisy(g: Generation) -> Generation:
        return replace(g, prompt=Prompt((*noise, *g.prompt.token_ids, *noise)))

    turns = tuple(
        replace(one, reply=str(noise), action=Action(one.action.text, tuple(map(noisy, one.generations))))
        for one in t.turns
    )
    other = replace(made, trajectories=(replace(t, turns=turns, opening="else"),))
    assert kind()(other, values) == kind()(made, values)


def exact_values(kind, rewards, sizes, gamma):
    """What is still to come before each token: discounted by token for GAE, by turn for the others."""
    if kind is not GAE:
        return [[x] * n for x, n in zip(discounted_returns(rewards, gamma), sizes, strict=True)]
    falls = [x for r, n in zip(rewards, sizes, strict=True) for x in [0.0] * (n - 1) + [r]]
    found = iter(discounted_returns(falls, gamma))
    return [[next(found) for _ in range(n)] for n in sizes]


@every
@given(
    turns=st.lists(st.tuples(numbers, st.lists(numbers, min_size=1, max_size=3)), min_size=1, max_size=5),
    gamma=gammas, lam=gammas, data=st.data(),
)  # fmt: skip
def test_cutting_a_trajectory_where_the_critic_is_right_changes_nothing_before(kind, turns, gamma, lam, data):
    # From the cut on every value is exactly what is still to come, so that nothing there is a surprise. Within turns
    # bi-level GAE keeps γ = 1.
    own = {"turn_gamma": gamma} if kind is BiLevelGAE else {"gamma": gamma}
    estimator = kind(lam=lam, whiten=False, **own)
    rewards, guesses = [r for r, _ in turns], [row for _, row in turns]
    sizes = [len(row) for row in guesses]
    at = data.draw(st.integers(0, len(turns) - 1))
    after = exact_values(kind, rewards[at:], sizes[at:], gamma)
    whole, _ = numbers_of(estimator(group([rewards], lengths_GK=[sizes]), values_of(guesses[:at] + after)))
    cut = cut_short(group([rewards[:at]], lengths_GK=[sizes[:at]]))
    short, _ = numbers_of(estimator(cut, values_of(guesses[:at], after[0][0])))
    assert whole == pytest.approx(short + [0.0] * sum(sizes[at:]), abs=1e-9)


@given(episode=episodes())
def test_without_discount_and_with_full_trust_in_rewards_all_three_learn_the_same_returns(episode):
    made, values = episode
    still = numbers_of(GAE(whiten=False)(made, values))
    # What is still to come, the value of the cut included, whatever the critic said on the way.
    assert still[1] == pytest.approx(
        numbers_of(GAE(whiten=False)(made, replace(values, values_GNT=critic(made).values_GNT)))[1]
    )
    assert numbers_of(BiLevelGAE(turn_gamma=1.0, whiten=False)(made, values)) == (
        pytest.approx(still[0]), pytest.approx(still[1])
    )  # fmt: skip
    assert numbers_of(TurnGAE(gamma=1.0, whiten=False)(made, values))[1] == pytest.approx(still[1])


@given(episode=episodes(), gamma=gammas, lam=gammas)
def test_where_turns_are_single_tokens_all_three_are_the_same(episode, gamma, lam):
    made, values = episode
    rows = [row[:1] for row in values.values_GNT[0] if row]
    single = group([made.scores[0].turns[: len(rows)]], lengths_GK=[[1] * len(rows)])
    outcome = made.trajectories[0].outcome
    single = replace(single, trajectories=tuple(replace(t, outcome=outcome) for t in single.trajectories))
    first, *others = (
        numbers_of(kind(lam=lam, whiten=False, **own)(single, values_of(rows, *values.bootstrap_values_G)))
        for kind, own in ((GAE, {"gamma": gamma}), (TurnGAE, {"gamma": gamma}), (BiLevelGAE, {"turn_gamma": gamma}))
    )
    assert others == [first, first]


@every
@given(data=st.lists(episodes(), min_size=1, max_size=4))
def test_whitened_advantages_of_a_step_have_mean_0_and_deviation_1(kind, data):
    groups, values = zip(*data, strict=True)
    plain = compute_advantages(kind(whiten=False), groups, values)
    credits = compute_advantages(kind(eps=0.0), groups, values)
    white = [x for c in credits for row in per_token(c) for x in row]
    raw = [x for c in plain for row in per_token(c) for x in row]
    assert math.fsum(white) == pytest.approx(0, abs=1e-7)
    if any(white):
        assert math.fsum(x * x for x in white) / (len(white) - 1) == pytest.approx(1)
        assert credits[0].metrics["credit/n_zero_std_steps"] == 0
    else:  # nothing differs, or there is one token, or none
        assert not raw or max(raw) - min(raw) < 1e-9
        assert credits[0].metrics["credit/n_zero_std_steps"] == 1
    assert [c.returns_GNT for c in credits] == [c.returns_GNT for c in plain]


@every
def test_whitening_counts_tokens_of_all_groups(kind):
    # One token per turn, V = 0. Advantages: 1 for the task that was solved, 0 twice for the other. Mean 1/3, deviation
    # sqrt((4/9 + 1/9 + 1/9) / 2) = .577350: 1.154701, −.577350 twice.
    groups = [group([[1]], lengths_GK=[[1]], task="a"), group([[0], [0]], lengths_GK=[[1], [1]], task="b")]
    credits = compute_advantages(kind(eps=0.0), groups, [critic(one, 0.0) for one in groups])
    assert [x for c in credits for row in per_token(c) for x in row] == pytest.approx([1.154701, -0.57735, -0.57735])
    assert [c.metrics for c in credits] == [
        {"credit/n_groups": 1.0, "credit/n_zero_std_steps": 0.0}, {"credit/n_groups": 1.0}
    ]  # fmt: skip
    [alone] = compute_advantages(kind(), groups[:1], [critic(groups[0], 0.0)])
    assert per_token(alone) == [[0.0]] and alone.metrics["credit/n_zero_std_steps"] == 1


@every
def test_without_a_critic_it_says_what_is_missing(kind):
    made = group([[1.0]])
    for call in (lambda: kind()(made), lambda: compute_advantages(kind(), [made]), lambda: KTAE(inner=kind())(made)):
        with pytest.raises(DataError, match="needs the values of a critic") as caught:
            call()
        assert caught.value.where == kind.__name__ and "grpo" in caught.value.hint


WRAPPERS = (TaskNormalised, KTAE, DurationAware, lambda inner: HICRA(inner=inner, grams=((7,),)))


@every
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_hand_values_in_and_returns_out(kind, wrapper):
    first = group_of([[turn(ids=[7, 3])], [turn(ids=[5]), turn(ids=[7])]], [[1], [0, 0.5]], solved_G=[True, False])
    second = group([[0.2]], task="other")
    groups = [
        replace(first, trajectories=tuple(replace(t, duration_s=2.0 + t.attempt) for t in first.trajectories)),
        second,
    ]
    values = [critic(one) for one in groups]
    twice = wrapper(inner=TaskNormalised(inner=kind()))
    assert twice.needs_values and twice.min_group == 1
    credits, inner = compute_advantages(twice, groups, values), compute_advantages(kind(), groups, values)
    assert [c.returns_GNT for c in credits] == [c.returns_GNT for c in inner]
    for one, credit in zip(groups, credits, strict=True):
        credit.check(one)
    assert [c.advantages_GNT for c in credits] != [c.advantages_GNT for c in inner]
    assert twice(first, values[0]).returns_GNT == kind()(first, values[0]).returns_GNT


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (Values((((0.1,),),), (0.0,)), "values do not match the tokens"),
        (Values((((0.1, 0.2), ()),), (0.0,)), "values do not match the tokens"),
        (Values((), ()), "values do not match the tokens"),
        (Values((((0.1, math.nan),),), (0.0,)), "values are not finite"),
        (Values((((0.1, 0.2),),), ()), "1 finite numbers"),
        (Values((((0.1, 0.2),),), (math.inf,)), "1 finite numbers"),
        (Values((((0.1, 0.2),),), (0.3,)), "terminated trajectory"),
    ],
)
def test_values_that_do_not_belong_to_the_group_are_refused(values, says):
    made = group([[1.0]])
    with pytest.raises(DataError) as caught:
        compute_advantages(GAE(), [made], [values])
    assert says in str(caught.value) and "task" in caught.value.where
    with pytest.raises(DataError):
        values.check(made)


@pytest.mark.parametrize("outcome", [Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT])
def test_a_value_after_a_cut_is_right(outcome):
    values_of([[0.1, 0.2]], 0.3).check(cut_short(group([[1.0]]), outcome))


def test_values_are_given_for_each_group():
    made = [group([[1.0]]), group([[0.0]])]
    with pytest.raises(DataError, match="values do not match the groups") as caught:
        compute_advantages(GAE(), made, [critic(made[0])])
    assert "1 values" in str(caught.value) and "each of 2 groups" in str(caught.value)


def test_returns_that_do_not_match_the_tokens_are_found():
    made = group([[1.0]])
    good = GAE()(made, critic(made))
    good.check(made)
    with pytest.raises(DataError, match="returns of the credit do not match the tokens"):
        replace(good, returns_GNT=(((0.1,),),)).check(made)
    with pytest.raises(DataError, match="returns of the credit are not finite"):
        replace(good, returns_GNT=(((0.1, math.inf),),)).check(made)
