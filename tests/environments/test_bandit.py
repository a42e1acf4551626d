"""Bandits and matrix games: regret by hand, reference play, and exact values compared with brute force."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.contrib.bandit import Bandit, BanditEpisode, Levers, Seen
from environments.contrib.matrix_game import CHOICES, SCRIPTS, Match, MatrixGame, MatrixGameEpisode, value
from rlhf.data import Task

LEVERS = Levers(("blue", "red"), ((0.2, 0.8),), noise=7)


def test_regret_and_score_by_hand() -> None:
    # Blue loses 0.6 a pull, chance 0.3: after blue, red, red the regret is 0.6 against 0.9, a score of 1/3.
    episode = BanditEpisode(Bandit(levers=2, max_steps=3, success_threshold=0.3), LEVERS)
    results = [asyncio.run(episode.step(text)) for text in ("pull blue", "Red.", "the red lever")]
    assert [result.reward for result in results] == pytest.approx([-0.6, 0, 0])
    assert episode.score == pytest.approx(1 / 3)
    assert (results[-1].terminated, results[-1].success) == (True, True) and results[-2].success is None


def test_a_lost_pull_has_the_regret_of_the_worst_lever() -> None:
    episode = BanditEpisode(Bandit(levers=2, max_steps=2), LEVERS)
    result = asyncio.run(episode.step("pull green"))
    assert not result.valid and result.reward == pytest.approx(-0.6) and not episode.seen
    assert result.reply == "No such lever; the pull is lost. Levers: blue, red.\n1 pull left."


@pytest.mark.parametrize("payments", ["bernoulli", "gaussian"])
def test_payments_have_the_mean_of_their_lever_and_hang_on_the_pull_alone(payments: str) -> None:
    world = Bandit(levers=2, max_steps=2000, payments=payments)  # type: ignore[arg-type]
    episode, again = BanditEpisode(world, LEVERS), BanditEpisode(world, LEVERS)
    paid = [episode.do("pull red")[1] or 0.0 for _ in range(2000)]
    # Four standard errors: 4 x sqrt(0.16 / 2000) = 0.036 for coins, 4 x 0.25 / sqrt(2000) = 0.022 for amounts.
    assert statistics.mean(paid) == pytest.approx(0.8, abs=0.036 if payments == "bernoulli" else 0.022)
    for i in range(50):  # what was pulled before changes nothing
        later = again.do("pull red" if i % 2 else "pull blue")[1]
        assert i % 2 == 0 or later == paid[i]


@given(st.integers(1, 3), st.sampled_from([0.1, 0.3, 0.6]), st.integers(2, 6), st.integers(0, 10_000))
def test_the_best_lever_leads_by_the_gap(guests: int, gap: float, levers: int, seed: int) -> None:
    found = Bandit(n_contexts=guests, gap=gap, levers=levers).draw(random.Random(seed))
    for means in found.means:
        best, second, *_ = sorted(means, reverse=True)
        assert best - second == pytest.approx(gap, abs=0.0011) and min(means) >= 0.049 and best <= 0.951


#: From what was seen, how many levers there are, whose turn it is, and chance, to a lever.
Player = Callable[[Seen, int, int, random.Random], int]


def ucb(seen: Seen, n_levers: int, guest: int, rng: random.Random) -> int:
    """UCB1 (Auer et al. 2002): each lever once, then the one with the largest mean + sqrt(2 ln n / pulls of it)."""
    paid = [seen.get((guest, lever), []) for lever in range(n_levers)]
    if [] in paid:
        return paid.index([])
    n = sum(map(len, paid))
    return max(range(n_levers), key=lambda i: sum(paid[i]) / len(paid[i]) + math.sqrt(2 * math.log(n) / len(paid[i])))


def thompson(seen: Seen, n_levers: int, guest: int, rng: random.Random) -> int:
    """Thompson sampling with Beta(1, 1): the lever of the largest sampled mean; payments are cut to [0, 1]."""

    def drawn(lever: int) -> float:
        paid = [min(max(x, 0.0), 1.0) for x in seen.get((guest, lever), [])]
        return rng.betavariate(1 + sum(paid), 1 + len(paid) - sum(paid))

    return max(range(n_levers), key=drawn)


def chance(seen: Seen, n_levers: int, guest: int, rng: random.Random) -> int:
    """Any lever, each as likely."""
    return rng.randrange(n_levers)


def play(world: Bandit, task: Task, player: Player) -> BanditEpisode:
    """Let a player play a task to its end; its randomness depends on the task's seed."""
    episode, levers, rng = world.start(task), world.instance(task), random.Random(task.seed)
    while not episode.over:
        lever = player(episode.seen, world.levers, levers.guest(episode.n_pulled), rng)
        episode.do(f"pull {levers.names[lever]}")
    return episode


def test_what_the_page_says_of_reference_play() -> None:
    sizes = {"n_test": 100}
    for world, wanted in (
        (Bandit(**sizes), (0.24, 0.36, -0.01)),
        (Bandit(payments="gaussian", **sizes), (0.23, 0.34, 0.00)),
        (Bandit(payments="gaussian", n_contexts=3, **sizes), (0.14, 0.15, -0.00)),
        (Bandit(max_steps=100, **sizes), (0.50, 0.74, -0.01)),
    ):
        tasks = world.tasks("test")
        found = [statistics.mean(play(world, task, p).score for task in tasks) for p in (ucb, thompson, chance)]
        assert found == pytest.approx(wanted, abs=0.006)


def test_the_oracle_pulls_the_best_lever_of_each_guest() -> None:
    world = Bandit(n_contexts=3, n_test=5, max_steps=12)
    for task in world.tasks("test"):
        plan, episode = world.plan(task, []), world.start(task)
        assert plan is not None and len(plan) == 12
        for text in plan:
            episode.do(text)
        assert episode.regret == 0 and episode.score == 1
        assert world.plan(task, ["nothing"] * 10) is None  # ten of twelve pulls lost: below any score that counts


# --- matrix games ----------------------------------------------------------------------------------------------------

DILEMMA = ((3, 0), (5, 1))
ROSHAMBO = tuple(tuple((0, 1, -1)[(mine - other) % 3] for other in range(3)) for mine in range(3))


def plays(match: Match, choices: tuple[int, ...]) -> int:
    """What choices earn, round by round: another way than the induction under test."""
    state, earned = match.first, 0
    for mine in choices:
        earned += match.pays[mine][match.script.chooses(state, len(match.pays))]
        state = match.script.after(state, len(match.pays), mine)
    return earned


@pytest.mark.parametrize(
    ("opponent", "best"),
    # In five rounds: defect against who never answers; cooperate till the last against who does; three times 5 and
    # twice 1 against who alternates; pavlov returns to friendliness after being defected on twice, so 5 1 5 1 5.
    [
        ("always_friendly", 25), ("never_friendly", 5), ("tit_for_tat", 17), ("grim", 17), ("alternating", 17),
        ("pavlov", 17),
    ],
)  # fmt: skip
def test_best_play_by_hand(opponent: str, best: int) -> None:
    assert (
        value(
            Match("prisoners_dilemma", DILEMMA, opponent, 0),
            SCRIPTS["prisoners_dilemma"][opponent].first,
            5,
            worst=False,
        )
        == best
    )


@pytest.mark.parametrize("game", CHOICES)
def test_values_are_those_of_all_ways_to_play(game: str) -> None:
    pays = ROSHAMBO if len(CHOICES[game]) == 3 else DILEMMA
    for opponent in SCRIPTS[game]:
        match = Match(game, pays, opponent, 1)  # type: ignore[arg-type]
        earned = [plays(match, choices) for choices in product(range(len(pays)), repeat=5)]
        assert value(match, match.first, 5, worst=False) == max(earned)
        assert value(match, match.first, 5, worst=True) == min(earned)


@given(st.sampled_from(sorted(CHOICES)), st.integers(0, 10_000), st.lists(st.integers(0, 2), min_size=6, max_size=6))
@settings(max_examples=60)
def test_regret_is_what_was_missed(game: str, seed: int, choices: list[int]) -> None:
    world = MatrixGame(game=game, max_steps=6)  # type: ignore[arg-type]
    match = world.draw(random.Random(seed))
    episode, mine = MatrixGameEpisode(world, match), [choice % len(match.pays) for choice in choices]
    earned = sum(episode.do(CHOICES[game][choice])[1] for choice in mine)
    best = value(match, match.first, 6, worst=False)
    assert episode.regret == pytest.approx(best - earned) and earned == plays(match, tuple(mine))
    assert -1e-9 <= episode.score <= 1 + 1e-9


def test_a_round_by_hand() -> None:
    episode = MatrixGameEpisode(MatrixGame(max_steps=2), Match("prisoners_dilemma", DILEMMA, "tit_for_tat", 0))
    first = asyncio.run(episode.step("I cooperate"))
    assert first.reply == "You cooperate, the other cooperate: you earn 3. 1 round left."
    # Not understood: with one round left cooperating earns 3 and defecting 5, so the former is chosen.
    last = asyncio.run(episode.step("hm"))
    assert not last.valid and last.reply.startswith("Not understood, so the worst is chosen for you. You cooperate")
    # The best is 3 + 5, the worst 5 + 0 (defect, then cooperate against the answer): a regret of 2 in 3.
    assert last.reward == -2 and episode.score == pytest.approx(1 / 3) and last.success is False


def test_payments_make_the_game() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        (reward, sucker), (temptation, punishment) = MatrixGame().draw(rng).pays
        assert temptation > reward > punishment > sucker
        (stag, alone), (hare, both) = MatrixGame(game="stag_hunt").draw(rng).pays
        assert stag > hare >= both > alone
    with pytest.raises(ValueError, match="has no opponent 'copies'"):
        MatrixGame(opponents=("copies",))
