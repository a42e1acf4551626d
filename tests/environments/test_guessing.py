"""Wordle and twenty questions: marks and answers, what is understood, and oracles that do not know the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.contrib.twenty_questions import _TABLE as TABLE
from environments.contrib.twenty_questions import THINGS, TwentyQuestions, answer, best_question, guess, read_question
from environments.contrib.wordle import Wordle, best_guess, marks, read_guess
from environments.contrib.wordle_words import WORDS


@pytest.mark.parametrize(
    ("guessed", "hidden", "answer"),
    [
        ("crane", "crane", "GGGGG"),
        ("light", "crane", "-----"),
        ("nacre", "crane", "yyyyG"),  # the letters of crane, the last in place
        ("geese", "crane", "----G"),  # one e, and that in its place: the others have none left
        ("eerie", "geese", "yG--G"),  # three e's of both: one in place, the last too, the first elsewhere
        ("allay", "llama", "yGyy-"),  # one l in place; a, l and a elsewhere, for the l, a and a that are left
    ],
)
def test_marks_by_hand(guessed: str, hidden: str, answer: str) -> None:
    assert marks(guessed, hidden) == answer


words = st.sampled_from(WORDS)


@given(words, words)
def test_marks_are_no_more_than_the_word_has_letters(guessed: str, hidden: str) -> None:
    found = marks(guessed, hidden)
    for letter in set(guessed):
        told = sum(mark != "-" for mark, g in zip(found, guessed, strict=True) if g == letter)
        assert told == min(guessed.count(letter), hidden.count(letter))
    assert all((mark == "G") == (g == h) for mark, g, h in zip(found, guessed, hidden, strict=True))


def test_words_are_five_letters_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) == 701
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("crane", "crane"), (" CRANE. ", "crane"), ("c r a n e", "crane"), ("My guess is crane", "crane"),
        ("guess: crane", "crane"), ("cranes", None), ("cr4ne", None), ("", None), ("two words", None),
    ],
)  # fmt: skip
def test_guesses_are_read_tolerantly(text: str, word: str | None) -> None:
    assert read_guess(text) == word


def test_a_guess_fits_all_answers() -> None:
    known = (("stale", marks("stale", "inner")),)
    best = best_guess(len(WORDS), known)
    assert marks("stale", best) == known[0][1]
    assert best_guess(len(WORDS), (*known, ("inner", "GGGGG"))) == "inner"


def test_the_oracle_goes_on_from_foolish_guesses_while_there_are_any_left() -> None:
    world = Wordle(n_test=20)
    for task in world.tasks("test"):
        plan = world.plan(task, ["zzzzz", "what is this"])
        assert plan is None or (plan[-1] == world.instance(task) and len(plan) <= 4)
    assert world.plan(task, ["zzzzz"] * 6) is None


# --- twenty questions ------------------------------------------------------------------------------------------------


def test_each_question_is_known_by_its_own_text_and_true_of_something() -> None:
    for question, _, _ in TABLE:
        assert read_question(question) == question
        assert 0 < sum(answer(question, thing) for thing in THINGS) < len(THINGS)
    assert len(TABLE) == 34 and len(THINGS) == 77
    assert all(read_question(guess(thing)) == thing for thing in THINGS)


def test_few_things_have_the_same_answers_to_all_questions() -> None:
    rows = [tuple(answer(question, thing) for question, _, _ in TABLE) for thing in THINGS]
    alike = [row for row in set(rows) if rows.count(row) > 1]
    assert len(alike) == 6 and max(map(rows.count, alike)) == 3  # such as saw and scissors


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("is it alive", "Is it alive?"), ("Is it a living thing?", "Is it alive?"),
        ("Does it fly?", "Can it fly?"), ("Does it have wings?", None), ("Is it a plant?", None),
        ("Is it an animal?", "Is it an animal?"), ("is it a dog?", "dog"), ("I guess the moon", "moon"), ("cat", "cat"),
        ("Is it not alive?", None), ("Is it alive or made of wood?", None), ("Is it a unicorn?", None), ("", None),
        ('{"tool": ', None),
    ],
)  # fmt: skip
def test_questions_are_understood_by_their_words(text: str, asked: str | None) -> None:
    assert read_question(text) == asked


@given(st.sets(st.sampled_from(THINGS), min_size=1, max_size=40))
def test_a_question_leaves_less(things: set[str]) -> None:
    left = tuple(sorted(things))
    asked = best_question(left)
    yes = {thing for thing in left if answer(asked, thing)}
    assert asked in left or 0 < len(yes) < len(left)


def test_sixteen_things_take_about_five_questions() -> None:
    # 3 questions that halve 16 things leave two, of which the first guess or the second is right: 4.5 at best.
    world = TwentyQuestions(n_test=50, max_steps=20)
    plans = [world.plan(task, []) or () for task in world.tasks("test")]
    assert 4.5 <= sum(map(len, plans)) / 50 < 5.6
