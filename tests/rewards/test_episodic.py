"""A memory of episodes: what attempts are to what came out right and wrong before, within bounds."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards.contrib.answer_store import AnswerBuffer, exploit, explore, normalised
from rewards.contrib.episodic_memory import EpisodicMemory, answer_of, query_of, remembering
from rewards.models.embedding import embedded
from rlhf.data import Action, Outcome, Score, ScoredGroup, Task, Trajectory, Turn, Verdict
from rlhf.recipe.builder import build_part

TASK = Task("t")
ANSWER = np.array([1, 0], np.float32)
WORDS = st.text("ab ", max_size=4)


def attempt(query: str, *said: str, solved: bool = False, number: int = 0) -> Trajectory:
    turns = tuple(Turn(Action(text), "ok") for text in said)
    return Trajectory("t", number, query, turns, Outcome.SOLVED if solved else Outcome.FAILED)


def group(*attempts: Trajectory, **parts: list[float]) -> ScoredGroup:
    """Scored by the given parts, or by nothing."""
    scores = [
        Score({name: Verdict(values[i]) for name, values in parts.items()}, (0.0,) * len(t.turns), 0.0)
        for i, t in enumerate(attempts)
    ]
    return ScoredGroup("t", attempts, tuple(scores))


def opened(**keys: object) -> EpisodicMemory:
    """A reward whose stage is sampling."""
    reward = EpisodicMemory(**{"warmup_steps": 0, **keys})  # type: ignore[arg-type]
    reward.episodes.is_open = True
    return reward


# --- the formulas ----------------------------------------------------------------------------------------------------


def test_terms_as_worked_by_hand() -> None:
    # The mean of (.8, .6) and (1, 0) is (.9, .3): a is √(.1² + .3²) = √.1 = .316228 away.
    assert exploit(ANSWER, np.array([[0.8, 0.6], [1, 0]], np.float32)) == pytest.approx(-0.316228, abs=1e-6)
    # Cosines 0 and .6.
    assert explore(ANSWER, np.array([[0, 1], [0.6, 0.8]], np.float32)) == pytest.approx(0.4, abs=1e-6)
    assert normalised(0.4, [0.1, 0.9]) == pytest.approx(0.375)  # .3 / .8


@pytest.mark.parametrize(("value", "window"), [(0.4, []), (0.4, [0.4]), (0.9, [0.2, 0.2]), (None, [0.1, 0.9])])
def test_a_window_that_says_nothing_gives_nothing(value: float | None, window: list[float]) -> None:
    assert normalised(value, window) == 0.0


def test_what_lies_outside_of_the_window_counts_as_its_end() -> None:
    assert (normalised(2.0, [0.1, 0.9]), normalised(-1.0, [0.1, 0.9])) == (1.0, 0.0)


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from([8, 128]))
def test_vectors_have_length_one_and_are_of_the_text_alone(a: str, b: str, dim: int) -> None:
    assert np.linalg.norm(embedded(a, dim)) == pytest.approx(1, abs=1e-5)
    assert float(embedded(a, dim) @ embedded(b, dim)) <= 1 + 1e-5
    embedded.cache_clear()
    again = embedded(a, dim)
    assert again.tolist() == embedded(f"  {a.upper().lower()}\n" if a.isascii() else a, dim).tolist()


def test_vectors_are_those_of_every_process_and_alike_where_texts_are() -> None:
    # Pinned: a hash that differed between processes would make a resumed memory worthless.
    # CRC-32 of "word ab", " ab" and "ab " is 2638234589, 408339808 and 3673248232: halved, and modulo 8, that is 6, 0
    # and 4; the first is odd, so +, the others even, so −.
    assert embedded("ab", 8) == pytest.approx(np.array([-1, 0, 0, 0, -1, 0, 1, 0]) / 3**0.5)
    red, dot, door = (embedded(text, 128) for text in ("the red ball", "the red ball.", "open a door"))
    assert red @ dot > 0.8 > 0.4 > red @ door
    assert embedded("", 128) @ embedded(" \n", 128) == pytest.approx(1)  # saying nothing is not new the second time


# --- the memory ------------------------------------------------------------------------------------------------------


def test_an_attempt_is_compared_with_the_nearest_query() -> None:
    reward = opened()
    colours, numbers = "which colour is the ball", "what is seven times eight"
    reward.episodes.learn([group(attempt(colours, "red", solved=True), attempt(colours, "blue"))])
    reward.episodes.learn([group(attempt(numbers, "56", solved=True), attempt(numbers, "15", number=1))])
    near = attempt("which colour is the box", "red")
    like, unlike = reward.episodes.raw(near)
    assert like == pytest.approx(0, abs=1e-6)  # it is the one success of the colours
    assert unlike == pytest.approx(1 - float(embedded("red", 128) @ embedded("blue", 128)), abs=1e-6)
    both = EpisodicMemory(nearest=2)
    both.episodes.load_state_dict(reward.episodes.state_dict())
    mean = (embedded("red", 128) + embedded("56", 128)) / 2
    assert both.episodes.raw(near)[0] == pytest.approx(-float(np.linalg.norm(embedded("red", 128) - mean)), abs=1e-6)


def test_the_worth_of_an_attempt_is_the_weighted_sum_of_both_terms() -> None:
    reward = opened(exploit=2.0, explore=0.5)
    memory = reward.episodes
    memory.learn([group(attempt("q", "red", solved=True), attempt("q", "blue"))])
    seen = attempt("q", "red", solved=True), attempt("q", "blue"), attempt("q", "green")
    assert [reward(TASK, t).value for t in seen] == [0, 0, 0]  # the windows are empty
    memory.learn([group(*seen[:2])])
    # Now they hold what both were: exploit 0 of red and less of blue, explore 0 of blue and more of red.
    assert reward(TASK, seen[0]).value == pytest.approx(2.0 + 0.5)
    assert reward(TASK, seen[1]).value == pytest.approx(0.0)
    assert reward(TASK, seen[0]) == reward(TASK, seen[0])


def test_what_is_right_is_said_by_the_environment_or_by_a_reward() -> None:
    made = [attempt("q", "a", solved=True), attempt("q", "b", number=1)]
    by_solved, by_reward = EpisodicMemory(), EpisodicMemory(success_reward="near", correct_above=0.7)
    figures = by_solved.episodes.learn([group(*made)])
    assert (figures["episodic_successes"], figures["episodic_failures"]) == (1, 1)
    figures = by_reward.episodes.learn([group(*made, near=[0.7, 0.9])])  # .7 is not above .7
    assert by_reward.episodes.raw(attempt("q", "b"))[0] == pytest.approx(0, abs=1e-6)
    assert (figures["episodic_successes"], figures["episodic_failures"]) == (1, 1)


def test_exploiting_waits_until_the_stage_is_warm() -> None:
    reward = opened(warmup_steps=3, explore=0.0)
    steps = [group(attempt("q", "red", solved=True), attempt("q", "blue"))] * 3
    found = []
    for step in steps:
        reward.episodes.learn([step])
        found.append(reward(TASK, attempt("q", "red")).value)
    assert found == [0, 0, 1]


def test_closed_it_says_nothing_and_forgets_nothing() -> None:
    reward = opened()
    for _ in range(2):
        reward.episodes.learn([group(attempt("q", "red", solved=True), attempt("q", "blue"))])
    before = reward(TASK, attempt("q", "red")).value
    reward.episodes.is_open = False
    assert before > 0 and reward(TASK, attempt("q", "red")) == Verdict(0.0, why="nothing is remembered here")
    reward.episodes.is_open = True
    assert reward(TASK, attempt("q", "red")).value == before


def test_a_query_is_what_was_read_before_the_policy_spoke_and_an_answer_all_it_did() -> None:
    given = Trajectory("t", 0, "a room", attempt("", "north", "south").turns, Outcome.FAILED, n_given=1)
    assert (query_of(given), answer_of(given)) == ("a room\nok", "south")
    assert query_of(attempt("", "x")) == "t"


# --- bounds and resuming ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(WORDS, WORDS), max_size=30), st.integers(1, 3), st.integers(3, 7))
def test_a_shelf_keeps_within_its_bounds_and_the_newest_answers(
    said: list[tuple[str, str]], per_query: int, capacity: int
) -> None:
    shelf = AnswerBuffer(per_query, capacity, 8)
    for n, (query, answer) in enumerate(said, start=1):
        shelf.add(query, embedded(answer, 8))
        counts = shelf.state_dict()["counts"]
        assert shelf.n == sum(counts) <= min(capacity, n) and max(counts) <= per_query
        newest = [a for q, a in said[:n] if q == query][-counts[-1] :]
        assert shelf.state_dict()["answers"][-counts[-1] :].tolist() == [embedded(a, 8).tolist() for a in newest]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4), max_size=8), st.integers(0, 8)
)
def test_one_that_is_resumed_goes_on_as_it_was(steps: list[list[tuple[str, str, bool]]], n: int) -> None:
    keys = {"per_query": 2, "capacity": 5, "window": 4, "dim": 16, "nearest": 2}
    whole, begun, resumed = (opened(**keys) for _ in range(3))
    groups = [[group(*(attempt(q, a, solved=right) for q, a, right in step))] for step in steps]
    for step in groups[:n]:
        begun.episodes.learn(step)
    resumed.episodes.load_state_dict(begun.episodes.state_dict())
    figures = [whole.episodes.learn(step) for step in groups]
    assert [resumed.episodes.learn(step) for step in groups[n:]] == figures[n:]
    for query, answer in itertools.product(("a", "b a", ""), repeat=2):
        assert resumed(TASK, attempt(query, answer)) == whole(TASK, attempt(query, answer))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9), st.booleans()), min_size=1, max_size=6))
def test_it_is_between_nothing_and_both_weights(said: list[tuple[str, str, bool]]) -> None:
    reward = opened(exploit=2.0, explore=0.5, dim=8)
    made = [attempt(q, a, solved=right) for q, a, right in said]
    for _ in range(2):
        reward.episodes.learn([group(*made)])
        assert all(0 <= reward(TASK, t).value <= 2.5 for t in made)


# --- as a part -------------------------------------------------------------------------------------------------------


def test_it_is_found_within_another_reward() -> None:
    parts = {"new": {"reward": {"kind": "episodic_memory"}}, "right": {"reward": {"kind": "outcome"}}}
    combined = build_part("reward", {"kind": "combine", "parts": parts}, "rewards.total", base=None)  # type: ignore[arg-type]
    assert [path for path, _ in remembering("", {"total": combined})] == ["total.parts.new.reward"]


def test_settings_are_compared_and_sent_without_what_is_remembered() -> None:
    reward = opened()
    reward.episodes.learn([group(attempt("q", "red", solved=True))])
    assert reward == EpisodicMemory(warmup_steps=0) == pickle.loads(pickle.dumps(reward))


@pytest.mark.parametrize(
    "keys", [{"capacity": 10, "per_query": 11}, {"exploit": 0.0, "explore": 0.0}, {"window": 1}, {"explore": -1.0}]
)
def test_wrong_settings_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EpisodicMemory(**keys)  # type: ignore[arg-type]
