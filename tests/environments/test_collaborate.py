"""Collaboration: what the partner says and wants, what is submitted, promises and the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.check import check_environment
from environments.contrib.collaborate import POINTS, Collaborate, CollaborateEpisode, Wish, draw
from rlhf.data import Task
from tests.environments.worlds import figures, is_shown, page, play, transcript

WISH = Wish("lamp", (("colour", "red"), ("shape", "round"), ("size", "small")), ("colour",), ("size",))


def talk(*actions: str, **keys: Any) -> tuple[CollaborateEpisode, list[str]]:
    episode = CollaborateEpisode(WISH, Collaborate(**keys))
    return episode, [episode.act(action).reply for action in actions]


def test_a_whole_conversation() -> None:
    episode, replies = talk("ask shape", "ask size", "submit red, round, huge")
    assert episode.opening.reply == "Help me with a lamp. Its colour is to be red. Open: shape, size."
    assert replies == [
        "The shape is to be round.",
        "I do not mind the size.",
        "All 3 points are as I want them.",
    ]
    assert (episode.score, episode.solved) == (1, True)


def test_what_is_wanted_is_written_into_the_reference() -> None:
    assert WISH.reference == "colour red, shape round, any size"
    world = Collaborate(n_points=2, n_free=0)
    [first, *_] = world.tasks("test")
    assert first.reference is not None and first.reference.count(", ") == 1


def test_values_can_be_noted_down_one_by_one() -> None:
    episode, replies = talk("set red", "set the shape to square", "choose round", "set tiny", "submit")
    assert replies[:3] == ["Noted: colour red.", "Noted: colour red, shape square.", "Noted: colour red, shape round."]
    assert episode.solved


@pytest.mark.parametrize(
    ("said", "n"),
    [
        ("submit", 0),
        ("submit red", 1),
        ("Submit: colour red, shape square, size small.", 2),
        ("I submit red round", 2),
        ("final answer: a small red round lamp", 3),
        ("submit red or blue, round, small", 2),  # of two values of a point the last holds
        ("submit dotted", 0),  # no point of this lamp
    ],
)
def test_a_submission_counts_its_points(said: str, n: int) -> None:
    episode, [reply] = talk(said)
    assert episode.done and episode.score == pytest.approx(n / 3) and episode.solved == (n == 3)
    assert reply == (f"{n} of 3 points are as I want them." if n < 3 else "All 3 points are as I want them.")


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("What size, and what shape do you want?", "I do not mind the size. The shape is to be round."),
        ("Shall it be square?", "The shape is to be round."),
        ("red?", "The colour is to be red."),
    ],
)
def test_questions_are_understood_by_the_points_they_name(said: str, reply: str) -> None:
    assert talk(said)[1] == [reply]


def test_a_terse_partner_answers_the_first_of_them_alone() -> None:
    assert talk("size and shape?", partner="terse")[1] == ["I do not mind the size."]


def test_what_is_known_is_worth_keeping() -> None:
    world = Collaborate()
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and world.recall(task, plan[:-1]).replace("; ", ", ") == task.reference
    assert world.recall(task, ()).count(" ") == 1  # the one point that is told


def test_patience_runs_out() -> None:
    episode, replies = talk("ask size", "dance", "ask shape", "ask shape", patience=2)
    assert replies[2:] == ["The shape is to be round.", "I have no time for more questions."]
    assert episode.way_out() == ("submit red, round, small",)
    assert talk(patience=1)[0].way_out() == ("ask shape", "submit red, round, small")


@pytest.mark.parametrize("said", ["", "hello", "set", "ask pattern", "r" * 300, "resubmit it"])
def test_what_names_nothing_is_not_understood(said: str) -> None:
    episode, [reply] = talk(said)
    assert reply == "I do not understand. Ask about colour, shape, size, or submit." and not episode.done
    assert not CollaborateEpisode(WISH, Collaborate()).act(said).valid


def test_what_was_not_submitted_counts_for_nothing() -> None:
    world = Collaborate(max_steps=4)
    task = world.tasks("test")[0]
    last = play(world, task, ["ask size"] * 4)[-1]
    assert (last.truncated, last.success, last.reward) == (True, False, 0)
    assert world.plan(task, ["submit"]) is None


def test_no_value_is_of_two_points_and_settings_have_to_agree() -> None:
    values = [value for own in POINTS.values() for value in own]
    assert len(set(values)) == len(values) == 32 and not set(values) & set(POINTS)
    with pytest.raises(ValueError, match="n_told and n_free are 5 together, and n_points 4"):
        Collaborate(n_told=4)
    with pytest.raises(ValueError, match="takes 9 steps"):
        Collaborate(n_points=8, n_told=0, max_steps=8)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 8), told=st.integers(0, 8), free=st.integers(0, 8))
def test_what_is_told_is_not_free(seed: int, n: int, told: int, free: int) -> None:
    told, free = min(told, n), min(free, n - min(told, n))
    wish = draw(random.Random(seed), n, told, free)
    assert len(wish.wanted) == n and not set(wish.told) & set(wish.free)
    assert (len(wish.told), len(wish.free)) == (told, free)
    assert all(value in POINTS[point] for point, value in wish.wanted)


@given(seed=st.integers(0, 29_999_999), n=st.integers(0, 8), rng=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_a_plan_goes_on_from_anywhere(seed: int, n: int, rng: random.Random) -> None:
    world, task = Collaborate(), Task("collaborate", seed=seed)
    episode, taken = world.start(task), list[str]()
    for _ in range(n):
        taken.append(rng.choice([action for action in episode.possible() if action != "submit"]))
        episode.act(taken[-1])
    plan = world.plan(task, taken)
    assert plan is not None and play(world, task, [*taken, *plan])[-1].success


@pytest.mark.parametrize(
    ("world", "label"),
    [
        (Collaborate(n_points=2, n_free=0), "`n_points: 2, n_free: 0`"),
        (Collaborate(), "the defaults"),
        (
            Collaborate(n_points=8, n_told=0, n_free=2, partner="terse"),
            "`n_points: 8, n_told: 0, n_free: 2, partner: terse`",
        ),
    ],
)
def test_what_the_page_says_of_random_play_and_the_oracle(world: Collaborate, label: str) -> None:
    assert figures(world, label) in page()


def test_the_transcript_of_the_page() -> None:
    world = Collaborate()
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and is_shown(transcript(play(world, task, plan), plan))


def test_all_promises_are_kept() -> None:
    for world in (Collaborate(), Collaborate(patience=2, partner="terse")):
        report = check_environment(world, other_process=world.patience is None)
        assert report.ok, str(report)
