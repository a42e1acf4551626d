"""Long memory: what is said and asked, what counts as an answer, what is promised, and what its oracle does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.check import check_environment
from environments.contrib.long_memory import LongMemory, LongMemoryEpisode, Question, Story
from environments.core.procedural import draw_for
from rlhf.errors import EnvError
from rlhf.recipe.builder import build_part
from tests.environments.worlds import figures, is_shown, page, play, transcript

HERE = Path(__file__).parent

STORY = Story(
    said=("Mia is in Rome.", "Mia is now in Oslo."),
    questions=(
        Question("where is Mia?", "Oslo", ("Oslo", "Rome")),
        Question("how many are in Rome?", "0", ("0", "1")),
    ),
)


def read(*actions: str) -> list[tuple[str, float, bool]]:
    """Reply, reward and validity of each action."""
    episode = LongMemoryEpisode(STORY)
    results = [episode.act(action) for action in actions]
    return [(result.reply, result.reward, result.valid) for result in results]


def test_a_whole_reading() -> None:
    episode = LongMemoryEpisode(STORY)
    assert episode.opening.reply == "Read on, and answer the questions at the end. Mia is in Rome."
    assert episode.opening.admissible_actions == ("next",)
    results = [episode.act(action) for action in ("next", "next", "Oslo", "0")]
    assert [result.reply for result in results] == [
        "Mia is now in Oslo.",
        "Question 1 of 2: where is Mia?",
        "Question 2 of 2: how many are in Rome?",
        "The end.",
    ]
    assert [result.reward for result in results] == [0, 0, 0.5, 0.5]
    assert [result.admissible_actions for result in results] == [("next",), ("Oslo", "Rome"), ("0", "1"), ()]
    assert [result.success for result in results] == [None, None, None, True]
    assert [result.terminated for result in results] == [False, False, False, True]


@pytest.mark.parametrize(
    ("answer", "reward", "valid"),
    [
        ("Oslo", 0.5, True), ("oslo.", 0.5, True), ("Mia is in Oslo now", 0.5, True), ("Rome", 0, True),
        ("Oslo or Rome", 0, False), ("nowhere", 0, False), ("", 0, False), ("Oslo" * 60, 0, False),
    ],
)  # fmt: skip
def test_an_answer_may_stand_in_a_sentence_but_not_beside_another(answer: str, reward: float, valid: bool) -> None:
    assert read("next", "next", answer)[2] == ("Question 2 of 2: how many are in Rome?", reward, valid)


def test_what_is_not_understood_turns_the_page_all_the_same() -> None:
    assert read("dance", "OK.") == [("Mia is now in Oslo.", 0, False), ("Question 1 of 2: where is Mia?", 0, True)]


def test_one_wrong_answer_is_no_success() -> None:
    episode = LongMemoryEpisode(STORY)
    *_, last = (episode.act(action) for action in ("next", "next", "Rome", "0"))
    assert (last.success, episode.score, episode.way_out()) == (False, 0.5, None)
    with pytest.raises(EnvError, match="the episode is over"):
        episode.act("next")


def solved(said: list[str], question: str) -> str:
    """The answer, from the lines alone: another way than the one under test."""
    at, label_of = {}, {}
    for line in said:
        for name, place in re.findall(r"(\w+) is (?:now )?in (\w+)\.", line):
            at[name] = place
        for colour, label in re.findall(r"A (\w+) \w+ is a (\w+)\.", line):
            label_of[colour] = label
    if found := re.match(r"where is (\w+)\?", question):
        return at[found[1]]
    if found := re.match(r"how many are in (\w+)\?", question):
        return str(Counter(at.values())[found[1]])
    return label_of[question.split()[3]]


worlds = st.builds(
    LongMemory,
    n_facts=st.integers(6, 12),
    n_changes=st.integers(2, 9),
    n_places=st.integers(3, 9),
    n_labels=st.integers(2, 8),
    n_examples=st.integers(1, 8),
    n_questions=st.integers(1, 8),
    distance=st.integers(0, 5),
    per_turn=st.integers(1, 4),
)


@given(world=worlds, seed=st.integers(0, 29_999_999))
@settings(max_examples=60)
def test_every_answer_follows_from_what_was_said(world: LongMemory, seed: int) -> None:
    story = draw_for("long_memory", seed, world.draw)
    assert len(story.said) + len(story.questions) == world.max_steps
    for question in story.questions:
        assert question.answer == solved(list(story.said), question.text)
        assert question.answer in question.choices and list(question.choices) == sorted(question.choices)
    assert len({question.text for question in story.questions}) == len(story.questions)
    for line in story.said[len(story.said) - world.distance :]:
        assert not re.search(r" in [A-Z]| is a ", line)
    for text in (question.text for question in story.questions):
        if text.startswith("what"):  # the thing itself was never shown
            assert not any(f"A {text.removeprefix('what is a ').rstrip('?')} is" in line for line in story.said)


@given(seed=st.integers(0, 29_999_999))
@settings(max_examples=30)
def test_retrieval_asks_for_what_stayed_and_conflict_for_what_changed(seed: int) -> None:
    world = LongMemory(abilities=("retrieval", "conflict"), n_questions=2, n_facts=5, n_changes=3)
    story = draw_for("long_memory", seed, world.draw)
    told = " ".join(story.said)
    moved = [f" {question.text.split()[2].rstrip('?')} is now " in f" {told}" for question in story.questions]
    assert sorted(moved) == [False, True]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"n_facts": 1}, "raise n_facts"),
        ({"n_changes": 0}, "raise n_changes"),
        ({"abilities": ("understanding",), "n_questions": 5}, "count the people in 4 places"),
        ({"abilities": ("retrieval",), "n_questions": 4}, "nobody can move"),
    ],
)
def test_more_questions_than_there_are_things_to_ask_are_refused(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LongMemory(**keys)  # type: ignore[arg-type]


def test_the_reference_is_all_answers() -> None:
    world = LongMemory()
    [task, *_] = world.tasks("test")
    assert task.reference is not None
    assert play(world, task, ["next"] * 12 + task.reference.split("; "))[-1].success


def test_a_plan_goes_on_from_anywhere() -> None:
    world = LongMemory()
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and world.plan(task, plan[:7]) == plan[7:] and world.plan(task, plan) == ()
    assert play(world, task, ["dance", *plan[1:]])[-1].success
    assert world.plan(task, ["next"] * 13) is None  # the first question is answered with "next"


@pytest.mark.parametrize(
    "keys",
    [
        "abilities: [retrieval], n_questions: 1, n_facts: 2, n_changes: 0, n_places: 2",
        "",
        "n_facts: 12, n_changes: 8, n_places: 8, n_labels: 4, distance: 20, n_questions: 8",
    ],
)
def test_what_the_page_says_of_random_play_and_the_oracle(keys: str) -> None:
    world = build_part(
        "environment", {"kind": "long_memory", **yaml.safe_load(f"{{{keys}}}")}, "environment", base=HERE
    )
    assert figures(world, f"`{keys}`" if keys else "the defaults") in page()


def test_the_transcript_of_the_page() -> None:
    world = LongMemory()
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and is_shown(transcript(play(world, task, plan), plan))


@pytest.mark.parametrize("world", [LongMemory(), LongMemory(per_turn=3, n_facts=12, n_questions=12, n_changes=5)])
def test_all_promises_are_kept(world: LongMemory) -> None:
    report = check_environment(world, other_process=world.per_turn == 1)
    assert report.ok, str(report)
