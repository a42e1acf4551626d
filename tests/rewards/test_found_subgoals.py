"""Subgoals that are found: worked numbers, a brute force, when they pay, and what is found where one is known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.games.key_door import Keyhole
from rewards.contrib.found_subgoals import FoundSubgoals, difference, events_of, path_of
from rewards.shaping.outcome import Outcome as Solved
from rlhf.data import Action, Outcome, ScoredGroup, Task, Trajectory, Turn
from rlhf.rollout.scoring import WeightedReward, score_group

TASK, WORLD = Task("t"), Keyhole()


def attempt(*replies: str, solved: bool = False, number: int = 0) -> Trajectory:
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    return Trajectory("t", number, "", tuple(Turn(Action("go"), reply) for reply in replies), outcome)


async def walked(task: Task, actions: Sequence[str]) -> Trajectory:
    episode, turns, solved = WORLD.start(task), [], False
    for action in actions:
        done = await episode.step(action)
        turns.append(Turn(Action(action), done.reply))
        solved = bool(done.success)
    return Trajectory("t", 0, "", tuple(turns), Outcome.SOLVED if solved else Outcome.FAILED)


def scored(*attempts: Trajectory) -> ScoredGroup:
    return asyncio.run(score_group(TASK, attempts, {"r": WeightedReward("r", 1.0, Solved())}))


def test_differences_worked_by_hand() -> None:
    paths = [(frozenset("kd"), True), (frozenset("k"), True), (frozenset("dw"), False)]
    assert [difference(paths, event) for event in "kdwx"] == [1.0, -0.5, -1.0, 0.0]
    assert difference(paths[:2], "k") == 0  # nothing has failed yet


@given(st.lists(st.tuples(st.frozensets(st.sampled_from("abcd"), max_size=4), st.booleans()), max_size=20))
def test_what_is_found_is_what_a_count_of_all_events_finds(paths: list[tuple[frozenset[str], bool]]) -> None:
    settings = FoundSubgoals(max_subgoals=2, min_difference=0.25, min_solved=2)
    found = settings.episodes
    found.learn([scored(*[attempt(*sorted(e), *(["end"] if s else []), solved=s) for e, s in paths])] if paths else [])
    solved, failed = ([e for e, s in paths if s is which] for which in (True, False))
    wanted: list[str] = []
    if min(len(solved), len(failed)) >= 2:
        of = {}
        for event in "abcd":
            n = [sum(event in e for e in side) for side in (solved, failed)]
            if sum(n) >= 2 and (gap := Fraction(n[0], len(solved)) - Fraction(n[1], len(failed))) >= Fraction(1, 4):
                of[event] = (-gap, -sum(n), event)
        wanted = sorted(of, key=lambda event: of[event])[:2]
    assert list(found.subgoals) == wanted


def test_each_is_paid_once_where_it_is_reached_and_only_while_attempts_are_trained_on() -> None:
    reward = FoundSubgoals(min_solved=2, bonus=1.0)
    way = ("You have the key. A hall.", "The door is here.\nA hall.", "The door opens.")
    reward.episodes.learn([scored(*[attempt(*way, solved=True), attempt("A hall.", "A wall.")] * 2)])
    assert reward.episodes.subgoals == ("The door is here.", "You have the key.")  # not the end, not the hall
    again = attempt("A hall.", "You have the key.", "You have the key.", "The door is here.")
    assert reward(TASK, again).value == 0
    reward.episodes.is_open = True
    assert reward(TASK, again).per_turn == (0.0, 0.5, 0.0, 0.5) and reward(TASK, attempt("A wall.")).value == 0
    other = FoundSubgoals(min_solved=2, bonus=1.0)
    other.episodes.load_state_dict(reward.episodes.state_dict())
    assert other.episodes.subgoals == reward.episodes.subgoals and other == reward
    reward.episodes.clear()
    assert reward.episodes.subgoals == ()


def test_the_key_is_found_where_doors_are_locked() -> None:
    rng, attempts = random.Random(0), []
    for number, task in enumerate(WORLD.tasks("train")[:60]):
        lost = [rng.choice(["go west", "go north", "wait"]) for _ in range(8)]
        attempts.append(asyncio.run(walked(task, WORLD.plan(task, ()) if number % 2 else lost)))
    reward = FoundSubgoals(max_subgoals=3)
    assert reward.episodes.learn([scored(*attempts)]) == {"found_subgoals": 3.0}
    assert reward.episodes.subgoals[0] == "The key is here."
    paths = [path_of(t) for t in attempts]
    assert difference(paths, "The key is here.") == pytest.approx(1.0, abs=0.2)
    assert events_of("A hall. Ways: east.\n\nA wall") == {"A hall.", "Ways: east.", "A wall"}
