"""Guess my city: what is told and answered, what is understood, and an oracle that does not know the town."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.check import check_environment
from environments.contrib.guess_my_city import (
    NAMES,
    TOPICS,
    GuessMyCity,
    Towns,
    best_question,
    distinct_names,
    guess,
    judge,
    read_question,
)

#: Of two topics, where it lies and the weather: A and B share the first value, B and C the second.
THREE = Towns((("Aldesk", (0, 0)), ("Belmora", (0, 1)), ("Kasvik", (1, 1)), ("Neruza", (2, 1))), "Belmora")


def test_answers_and_guesses_are_those_of_the_town() -> None:
    said = judge(THREE, "Where does it lie?", 2)
    assert said.feedback == "It lies by the sea." and not said.solved
    assert judge(THREE, "how is the climate", 2).feedback == "It is hot and dry."
    assert judge(THREE, "Is it Kasvik?", 2).feedback == "No."
    assert judge(THREE, "belmora", 2).solved
    unlisted = judge(THREE, "Is it Tarvik?", 2)
    assert unlisted.feedback == "Tarvik is not one of these towns." and unlisted.answer is None
    for text in ("", "How old is it?", "What is the weather where it lies?", '{"tool": '):  # two topics are told
        assert judge(THREE, text, 2).answer is None


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("What do people eat there?", 3), ("Is the food good?", 3), ("WHICH LANGUAGE IS SPOKEN THERE", 4),
        ("Is it Tarvik?", "Tarvik"), ("my guess is tarvik", "Tarvik"), ("Tarvik", "Tarvik"),
        ("Do you live in Tarvik?", "Tarvik"),
        ("Is it Paris?", None), ("Is it old and large?", None),
    ],
)  # fmt: skip
def test_questions_are_understood_by_their_words(text: str, asked: int | str | None) -> None:
    assert read_question(text) == asked


def test_each_question_and_name_is_understood_as_itself() -> None:
    assert [read_question(topic.question) for topic in TOPICS] == list(range(len(TOPICS)))
    assert len(NAMES) == len(set(NAMES)) == 144 and all(read_question(guess(name)) == name for name in NAMES)
    assert all(len(set(topic.values)) == len(topic.values) for topic in TOPICS)


@given(st.integers(0, 99), st.integers(2, 24))
def test_up_to_12_names_of_a_task_share_neither_beginning_nor_ending(seed: int, n: int) -> None:
    names = distinct_names(random.Random(seed), n)
    assert len(set(names)) == n and set(names) <= set(NAMES)
    beginnings = {name[: 4 if name.startswith("Quor") else 3] for name in names[:12]}
    endings = {name.removeprefix(first) for name in names[:12] for first in beginnings if name.startswith(first)}
    assert len(beginnings) == len(endings) == min(n, 12)


def test_an_answer_rules_towns_out() -> None:
    names = [name for name, _ in THREE.facts]
    assert THREE.alike(names, 0) == ["Aldesk", "Belmora"] and THREE.alike(names, 1) == ["Belmora", "Kasvik", "Neruza"]
    assert THREE.alike(names, "Kasvik") == ["Aldesk", "Belmora", "Neruza"] and THREE.alike(names, None) == names


def test_the_best_question_leaves_the_fewest_towns() -> None:
    # Where it lies splits four towns 2, 1, 1: (4 + 1 + 1) / 4 = 1.5 are expected to be left. The weather 1, 3: 2.5.
    names = [name for name, _ in THREE.facts]
    assert best_question(THREE, names, 2) == 0
    assert best_question(THREE, names[:2], 2) == "Aldesk"  # two are left: a guess


def test_towns_are_told_and_told_apart() -> None:
    world = GuessMyCity(n_test=20)
    for task in world.tasks("test"):
        towns, text = world.instance(task), world.start(task).opening.reply
        assert len({values for _, values in towns.facts}) == len(towns.facts) == 10
        assert all(f"- {name}: " in text for name, _ in towns.facts) and text.endswith("6 questions left.")
    assert "known for its" in text and "speaks" not in text  # four topics


@given(st.integers(0, 49), st.lists(st.sampled_from([*(t.question for t in TOPICS[:4]), "what?"]), max_size=3))
def test_the_oracle_goes_on_from_any_questions(number: int, taken: list[str]) -> None:
    world = GuessMyCity(n_test=50)
    task = world.tasks("test")[number]
    plan = world.plan(task, taken)
    if plan is None:  # three were wasted, and three are too few
        assert len(taken) == 3
        return
    episode = world.start(task)
    result = episode.opening
    for text in (*taken, *plan):
        result = asyncio.run(episode.step(text))
    assert result.success is True


def test_ten_towns_take_fewer_than_three_questions_and_chance_finds_few() -> None:
    world, solved = GuessMyCity(n_test=100), 0
    plans = [world.plan(task, []) or () for task in world.tasks("test")]
    # The best of four questions leaves some 2 of 10 towns: then a guess is right every other time, or one follows it.
    assert all(plans) and 2.5 <= sum(map(len, plans)) / 100 <= 2.9
    for task in world.tasks("test"):
        rng, episode = random.Random(task.seed), world.start(task)
        result = episode.opening
        while result.success is None:
            result = asyncio.run(episode.step(rng.choice(result.admissible_actions)))
        solved += result.success
    assert solved == pytest.approx(100 * (1 - (13 / 14) ** 6), abs=12)  # one of 14 actions is right, six times


def test_settings_that_cannot_tell_towns_apart_are_refused() -> None:
    assert GuessMyCity(cities=8, topics=2)
    with pytest.raises(ValueError, match="cities must be at most 8"):
        GuessMyCity(cities=9, topics=2)


def test_promises_are_kept_of_many_towns() -> None:
    world = GuessMyCity(cities=24, topics=8, max_steps=8, n_train=30, n_dev=30, n_test=30)
    report = check_environment(world, n_tasks=2, other_process=False)
    assert report.ok, str(report)
