"""Search and answer: what is drawn and found, what is understood, files of one's own, promises and the oracle."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.check import check_environment
from environments.contrib.search_qa import (
    Library,
    Question,
    SearchQA,
    SearchQAEpisode,
    draw_library,
    draw_question,
    read_action,
    ways,
)
from rlhf.errors import EnvError
from rlhf.text_search import Index
from tests.environments.worlds import figures, is_shown, page, play, transcript

TEXTS = ("Mia Berg was born in Arden.", "Arden is a city in Vinland.", "Ben Berg was born in Belton.")
NAMES = (("Mia Berg", "Arden"), ("Arden", "Vinland"), ("Ben Berg", "Belton"))
QUESTION = Question(
    "what is the country of the birthplace of Mia Berg?", ("Mia Berg", "Arden", "Vinland"), (), "Vinland"
)


def ask(*actions: str, **keys: object) -> tuple[SearchQAEpisode, list[str]]:
    world = SearchQA(**keys)  # type: ignore[arg-type]
    episode = SearchQAEpisode(QUESTION, Library(TEXTS, NAMES, Index(TEXTS)), world)
    return episode, [episode.act(action).reply for action in actions]


def test_a_whole_search() -> None:
    episode, replies = ask("search[Mia Berg]", "search[Vinland city]", "search[moon]", "answer[vinland]")
    assert episode.opening.reply == "Question: what is the country of the birthplace of Mia Berg?"
    assert episode.opening.admissible_actions == ("answer[Mia Berg]", "search[Mia Berg]")
    assert replies == [
        # Two words of the query are in the first text and one in the third, which is shown as n_results is 2.
        "1. Mia Berg was born in Arden.\n2. Ben Berg was born in Belton.",
        "1. Arden is a city in Vinland.",
        "Nothing found.",
        "Right.",
    ]
    assert (episode.score, episode.solved, episode.done) == (1, True, True)


def test_part_marks_are_no_success() -> None:
    # "the Vinland kingdom" has two words that count, one of them right: F1 = 2 · (1/2) · 1 / (1/2 + 1) = 2/3.
    episode, replies = ask("answer[the Vinland kingdom]", metric="f1")
    assert (episode.score, episode.solved, replies) == (pytest.approx(2 / 3), False, ["Wrong."])
    assert ask("answer[the Vinland kingdom]")[0].score == 0


def test_of_equal_scores_the_earlier_comes_first_and_what_lacks_the_words_is_not_found() -> None:
    index = Index(["red ball", "blue ball", "red cup", "green hat"])
    assert index.best("ball") == [0, 1] and index.best("red") == [0, 2]
    assert index.best("Red, BALL!") == [0, 1, 2] and index.best("ball red", 1) == [0]
    assert index.best("moon") == index.best("") == Index([]).best("ball") == []


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("search[Mia Berg]", ("search", "Mia Berg")), ("Search: Mia Berg", ("search", "Mia Berg")),
        ("search for Mia", ("search", "Mia")), ("<search>Mia Berg</search>", ("search", "Mia Berg")),
        ("I see. <answer> Arden </answer>", ("answer", "Arden")), ('answer["Arden"]', ("answer", "Arden")),
        ("answer is Arden", ("answer", "Arden")), ("search[]", None), ("search", None), ("searching Mia", None),
        ("Arden", None), ("", None), ("search " + "a" * 500, None),
    ],
)  # fmt: skip
def test_actions_are_read_tolerantly(text: str, read: tuple[str, str] | None) -> None:
    assert read_action(text) == read


def test_kinds_of_questions() -> None:
    assert len(ways(1)) == 5  # two of a person, two of a company, one of a city
    assert ("person", ("employer", "seat", "country")) in ways(3) and not any(way for _, way in ways(0))
    assert [len(way) for _, way in ways(2)] == [2] * len(ways(2))


def following(texts: list[str], text: str) -> str:
    """The answer, by reading all documents: another way than the one under test."""
    forms = {
        "birthplace": r"{} was born in (\w+)\.", "employer": r"{} works for (\w+)\.", "seat": r"{} is based in (\w+)\.",
        "founder": r"{} was founded by (\w+ \w+)\.", "country": r"{} is a city in (\w+)\.",
    }  # fmt: skip
    *asked, name = text.removeprefix("what is ").rstrip("?").split(" of ")
    for word in reversed(asked):
        pattern = forms[word.removeprefix("the ")].format(re.escape(name))
        [name] = [found for told in texts for found in re.findall(pattern, told)]
    return name


@given(seed=st.integers(0, 29_999_999), hops=st.integers(1, 3), n=st.integers(12, 60))
@settings(max_examples=30, deadline=None)
def test_the_documents_tell_the_one_answer(seed: int, hops: int, n: int) -> None:
    rng = random.Random(seed)
    question = draw_question(rng, hops)
    library = draw_library(rng, question, n)
    assert len(library.texts) == n and len(set(question.chain)) == hops + 1
    assert following(list(library.texts), question.text) == question.answer == question.chain[-1]


def test_a_plan_goes_on_from_anywhere_that_is_not_lost() -> None:
    world = SearchQA(hops=3)
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and world.plan(task, plan[:2]) == plan[2:] and world.plan(task, plan) == ()
    assert world.recall(task, ()) == "" and world.recall(task, plan).endswith(str(task.reference))
    assert world.recall(task, plan[:2]).count("; ") == 1
    assert world.plan(task, ["answer[nobody]"]) is None and world.plan(task, ["search[x]"] * 6) is None
    assert play(world, task, ["search[x]"] * 8)[-1].truncated


# --- files of one's own ----------------------------------------------------------------------------------------------


def written(folder: Path, name: str, lines: list[object]) -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_corpus_and_questions_of_ones_own(tmp_path: Path) -> None:
    corpus = written(tmp_path, "corpus.jsonl", [{"title": "Arden", "text": "A city in Vinland."}, {"text": "A hat."}])
    questions = written(
        tmp_path,
        "questions.jsonl",
        [
            {"question": "Where is Arden?", "answer": ["Vinland", "in Vinland"], "split": "test"},
            {"question": "Where is the hat?", "answer": "here", "split": "train"},
            {"question": "What is a hat?", "answer": "[sic] a thing", "split": "dev"},
        ],
    )
    world = SearchQA(corpus=corpus, questions=questions)
    assert world.plan(world.tasks("dev")[0], ()) == ("answer[[sic] a thing]",)
    [task] = world.tasks("test")
    assert task.reference == '["Vinland", "in Vinland"]'
    results = play(world, task, ["search[city]", "answer[in Vinland]"])
    assert [r.reply for r in results] == ["Question: Where is Arden?", "1. Arden: A city in Vinland.", "Right."]
    assert results[0].admissible_actions == () and world.plan(task, ()) == ("answer[Vinland]",)
    report = check_environment(world, other_process=False)
    assert report.ok, str(report)


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path) -> None:
    corpus = written(tmp_path, "corpus.jsonl", [json.dumps({"text": "A\u2028hat."}, ensure_ascii=False)])
    questions = written(tmp_path, "questions.jsonl", [{"question": "What?", "answer": "hat", "split": "test"}])
    world = SearchQA(corpus=corpus, questions=questions)
    assert "hat" in play(world, world.tasks("test")[0], ["search[hat]"])[1].reply


def test_questions_without_a_split_go_by_their_hash(tmp_path: Path) -> None:
    corpus = written(tmp_path, "corpus.jsonl", [{"text": "x"}])
    lines: list[object] = [{"question": f"What is {i}?", "answer": "x"} for i in range(40)]
    world = SearchQA(corpus=corpus, questions=written(tmp_path, "questions.jsonl", lines))
    found = [task.info["question"] for split in ("train", "dev", "test") for task in world.tasks(split)]
    assert len(found) == len(set(found)) == 40


@pytest.mark.parametrize(
    ("line", "says"), [("no json", "questions.jsonl:1"), ({"question": "Q"}, "question and answer"), ("", "is empty")]
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: object, says: str) -> None:
    corpus, questions = written(tmp_path, "corpus.jsonl", [{"text": "x"}]), written(tmp_path, "questions.jsonl", [line])
    with pytest.raises(EnvError, match=says):
        SearchQA(corpus=corpus, questions=questions).tasks("test")


def test_answers_of_a_file_may_be_numbers(tmp_path: Path) -> None:
    corpus = written(tmp_path, "corpus.jsonl", [{"text": "x"}])
    lines: list[object] = [
        {"question": f"How many {i}?", "answer": answer, "split": "test"}
        for i, answer in enumerate((5, [5, "five"], 0))
    ]
    world = SearchQA(corpus=corpus, questions=written(tmp_path, "questions.jsonl", lines))
    tasks = world.tasks("test")
    assert [task.reference for task in tasks] == ["5", '["5", "five"]', "0"]
    assert [play(world, task, ["answer[5]"])[1].success for task in tasks] == [True, True, False]


@pytest.mark.parametrize(
    ("split", "says"), [("validation", "no such split"), ("train", "one question is in two splits")]
)
def test_splits_of_a_file_that_cannot_be_are_refused(tmp_path: Path, split: str, says: str) -> None:
    corpus = written(tmp_path, "corpus.jsonl", [{"text": "x"}])
    lines: list[object] = [{"question": "Q?", "answer": "a", "split": at} for at in ("test", split)]
    world = SearchQA(corpus=corpus, questions=written(tmp_path, "questions.jsonl", lines))
    with pytest.raises(EnvError, match=says):
        world.tasks("test")


def test_keys_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus and questions go together"):
        SearchQA(corpus=tmp_path)
    with pytest.raises(ValueError, match="and have no effect with a corpus"):
        SearchQA(corpus=tmp_path, questions=tmp_path, hops=2)
    with pytest.raises(EnvError, match="cannot be read"):
        SearchQA(corpus=tmp_path / "a", questions=tmp_path / "b").tasks("test")


# --- what the page says, and promises ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_what_the_page_says_of_random_play_and_the_oracle(hops: int) -> None:
    assert figures(SearchQA(hops=hops), f"`hops: {hops}`") in page()


def test_the_transcript_of_the_page() -> None:
    world = SearchQA(hops=2)
    task = world.tasks("test")[0]
    plan = world.plan(task, ())
    assert plan is not None and is_shown(transcript(play(world, task, plan), plan))


@pytest.mark.extended
def test_all_promises_are_kept() -> None:
    report = check_environment(SearchQA(hops=2))
    assert report.ok, str(report)
