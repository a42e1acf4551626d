"""Verifiers of answers, by numbers worked by hand."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards.answers.choice import MultipleChoice
from rewards.answers.denial import without_denied
from rewards.answers.numeric import Numeric
from rewards.answers.pattern import Pattern
from rewards.answers.qa import QuestionAnswer, f1
from rewards.check import check_reward
from rewards.contrib.json_schema import JsonSchema
from rewards.contrib.overlap import Bleu, Rouge
from rewards.contrib.ranking import Ranking, items, ndcg
from rewards.contrib.similarity import PatchSimilarity, Similarity, diff_similarity, diffs, edited, ratio
from rewards.contrib.sql import SqlResult, is_ordered
from rewards.verified import is_verifier
from rlhf.errors import RecipeError, RewardError
from tests.rewards.played import played, task


@pytest.mark.parametrize(
    "part",
    [
        Numeric(),
        MultipleChoice(),
        QuestionAnswer(),
        QuestionAnswer(metric="f1"),
        Ranking(),
        SqlResult(),
        Rouge(),
        Bleu(),
        Similarity(),
        PatchSimilarity(),
        JsonSchema(schema={"type": "object"}),
        Pattern(pattern="a*b"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_each_keeps_the_contract(part):
    pytest.importorskip("rouge_score")
    report = check_reward(part)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("99", "100", 1),  # |99 − 100| = 1 = .01 · 100
        ("98.9", "100", 0),
        ("-99", "-100", 1),
        ("It is about 1,010.", "1,000", 1),  # 10 off, 10 allowed
        ("1,010 m", "1 km", 1),
        ("1.02 km", "1 km", 0),
        ("1 kg", "1 km", 0),
        ("50%", "0.5", 1),
        ("50%", "50", 1),
        ("50", "50%", 1),
        ("50", "0.5", 0),
        ("5%", "0.5", 0),
        ("The answer is three.", "3", 0),
        ("The answer is not 7.", "7", 0),
        ("The answer is not 6 but 7.", "7", 1),
        ("The answer is between 5 and 7", "7", 0),
        ("The answer is 12 or 13", "13", 0),
        ("<answer>12, 13, 14</answer>", "14", 0),
        ("<answer>3 pens at $4 cost $12</answer>", "12", 1),
        ("<answer>5 + 7 = 12</answer>", "12", 1),
        ("", "0", 0),
        ("0.0001", "0", 0),
    ],
)
def test_numeric_allows_a_share_of_the_reference(answer, reference, value):
    assert Numeric(rel_tol=0.01)(answer, reference).value == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [("12", 1), ("It is 12.", 1), ("(B) 12", 1), ("(C) 12", 0), ("13", 0), ("B", 0), ("", 0)],
)
def test_numeric_reads_the_value_of_a_reference_with_its_choice(answer, value):
    for reference in (r"\textbf{(B)}\ 12", "(B) 12"):
        assert Numeric()(answer, reference).value == value


def test_numeric_near_zero_needs_an_absolute_tolerance():
    assert Numeric(abs_tol=0.001)("0.0001", "0").value == 1


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("B", True),
        ("(B)", True),
        ("b.", True),
        ("The answer is B", True),
        ("B) because A is too small", True),
        (r"so \boxed{\text{B}}", True),
        ("I think\n\n**B**", True),
        ("It is option B.", True),
        ("<think>A?</think> B", True),
        ("A or B", False),
        ("AB", False),
        ("A", False),
        ("", False),
        ("banana", False),
        ("The answer is (A), not (B).", False),
        ("A, B, C, D, E", False),
        ("Either A or B might be right in this case.", False),
        ("Either B or A might be right in this case.", False),
        ("I think that a good choice is B here.", True),
        ("The answer is B (vitamin C).", True),
        ("The correct answer is option B: Hepatitis C", True),
        ("Answer: B - Hepatitis C", True),
        ("The answer is B (C).", False),
        ("The answer is B - C", False),
        ("The answer is option A (vitamin B)", False),
        ("The answer is B, I am quite sure of it.", True),
        ("B and I am confident of that", True),
        ("The answer is B. This answer is supported by the passage.", True),
        ("The answer is B. This answer is wrong.", False),
    ],
)
def test_a_choice_is_one_letter(answer, right):
    assert MultipleChoice(n_choices=10)(answer, "B").value == right
    assert MultipleChoice()(answer, "B").value == right
    assert MultipleChoice()(answer, "(B)").value == right


def test_a_reference_beyond_the_choices_widens_them() -> None:
    assert MultipleChoice()("The answer is (G).", "G").value == 1.0
    assert MultipleChoice()("The answer is (F).", "(G)").value == 0.0
    assert MultipleChoice()("J", r"\boxed{J}").value == 1.0
    assert MultipleChoice(n_choices=4)("The answer is (E).", "A").value == 0.0


DENIALS = (
    "The answer is not B.",
    "The answer isn't B.",
    "The answer isn’t (B).",
    "It is not B.",
    "Not B",
    "not B.",
    "B is wrong.",
    "B is incorrect",
    "B) is wrong",
    "(B) is not correct.",
    "(b) is wrong.",
    "The answer cannot be B.",
    "The answer can't be B",
    "The answer can't possibly be B",
    "The answer could not be B.",
    "It's definitely not B.",
    "The answer is anything but B.",
    "The answer is any option but B.",
    "Everything except B.",
    "Anything other than B",
    "I would rule out B.",
    "We can eliminate B.",
    "I reject option B.",
    "It is not option B.",
    "Neither A nor B.",
    "The answer is neither B nor C.",
    "Never B.",
    "B is not the answer.",
    "B isn't the right choice.",
    "B cannot be right.",
    "B can't be the answer.",
    "B was ruled out.",
    "I don't think the answer is B.",
    "I do not believe it is B.",
    "It is not true that the answer is B.",
    "I doubt it is B.",
    "I doubt that the answer is B.",
    "It's unlikely to be B.",
    "The wrong answer is B.",
    "Incorrect: B",
    "B? No.",
    "Is it B? No.",
    "The answer is B? No.",
    "The answer is not \\boxed{B}.",
    "\\boxed{\\text{not } B}",
    "<answer>not B</answer>",
    "The correct option is not **B**.",
    "**B** is incorrect.",
    "The answer is not A, B or C.",
    "A and B are wrong.",
    "Option B is false.",
    "Choice B does not fit.",
    "Option B doesn't work.",
    "The answer is certainly not B",
    "The final answer is not: B",
    "answer: not B",
    "There is no way it is B.",
    "The answer would never be B.",
    "The answer is far from B.",
    "The correct choice is other than B.",
    "The answer is no longer B",
    "The answer was never B.",
    "B must be excluded.",
    "B has to be wrong.",
    "I am not going with B.",
    "I wouldn't choose B.",
    "The answer is not (B), I think.",
    "The answer isn't necessarily B.",
    "The answer is all but B.",
    "I would not pick B",
    "It is hardly B.",
)
AFFIRMATIONS = (
    "The answer is B.",
    "The answer is B, not A.",
    "Not A but B.",
    "A is wrong, so the answer is B.",
    "Not sure, but B.",
    "I'm not sure, but the answer is B.",
    "The answer is none other than B.",
    "Nothing but B.",
    "It cannot be anything but B.",
    "The one that is not prime is B.",
    "The statement that is not true is B.",
    "No doubt it is B.",
    "There is no doubt that the answer is B.",
    "B is not wrong.",
    "A and C are wrong, so B.",
    "It is not A, so the answer is B.",
    "The answer is not A, C or D; it is B.",
    "The answer is not A. The answer is B.",
    "B. No other option fits.",
    "B because A is not correct.",
    "B, since the others are wrong.",
    "If it is not A, then the answer is B.",
    "Neither A nor C is right, so the answer is B.",
    "I don't know the details, but the answer is B.",
    "The answer is B because it is not red.",
    "\\boxed{B}",
    "The answer isn't A; it's B",
    "(B) 5",
    "I rule out A and C. The answer is B.",
    "It does not matter. B",
    "Without a doubt, B",
    "The incorrect statement is B.",
    "B",
)
LETTERS = st.sampled_from("ABCDE")


@given(text=st.sampled_from(DENIALS), letter=LETTERS)
def test_a_denial_is_no_answer(text, letter):
    """Whatever the letter, and in whatever case the words are."""
    others = str.maketrans({"B": letter, "A": "B" if letter == "A" else "A", "C": "B" if letter == "C" else "C"})
    for said in (text, f"Let me see.\n{text}", f"<think>It may be {letter}.</think>{text}"):
        assert MultipleChoice()(said.translate(others), letter).value == 0


@given(text=st.sampled_from(AFFIRMATIONS), letter=LETTERS)
def test_an_answer_beside_denials_is_one(text, letter):
    others = str.maketrans({"B": letter, "A": "B" if letter == "A" else "A", "C": "B" if letter == "C" else "C"})
    others |= {ord("D"): "B"} if letter == "D" else {}
    if letter == "A" and "\n" not in text and len(text) > 20 and "(" not in text:
        return  # "A" is a word, too, in the longer texts
    assert MultipleChoice()(text.translate(others), letter).value == 1


@given(said=st.lists(st.sampled_from(DENIALS), min_size=1, max_size=4))
def test_several_denials_are_no_answer_either(said):
    assert MultipleChoice()(" ".join(said), "B").value == 0


@given(st.text(alphabet="ABab not,.()isn't\n", max_size=200))
def test_taking_denied_letters_out_never_raises_and_adds_none(text):
    left = without_denied(text)
    assert all(left.count(letter) <= text.count(letter) for letter in "AB")


def test_words_of_an_answer_count_as_squad_counts_them():
    # the|red big ball and a|red ball lose their articles: 3 and 2 words, 2 in common; 2·2/(3 + 2) = .8
    assert f1("the red big ball", "a red ball") == pytest.approx(0.8)
    assert QuestionAnswer(metric="f1")("red, red", "red").value == pytest.approx(2 / 3)  # 1 in common; 2/(2 + 1)
    assert QuestionAnswer()("The answer is the Eiffel Tower!", "eiffel tower").value == 1
    assert QuestionAnswer()("<answer>NYC</answer>", '["New York", "NYC"]').value == 1
    assert QuestionAnswer()("the", "a").value == 0  # nothing is left to compare
    assert QuestionAnswer(where="whole")("so: Paris", "Paris").value == 0


@pytest.mark.parametrize(
    ("said", "reference", "right"),
    [
        ("St. Louis.", "St. Louis", True),
        ("J. K. Rowling.", "J. K. Rowling", True),
        ("Crosby, Stills, and Nash.", "Crosby, Stills, and Nash", True),
        ("Paris, which is in France.", "Paris", True),
        ("Paris. It is in France.", "Paris", True),
        ("Paris. London.", "London", False),  # several answers are none of them but the first
        ("Paris, London", "Paris", False),
        ("Paris. This answer is well known.", "Paris", True),
        ("Paris. This answer is wrong.", "Paris", False),
        ("a right triangle", "right triangle", True),
        ("Paris or London", "London", False),
        ("A.", "A", True),
        ("The The", "The The", True),
        ("the", "A", False),
        ("+", "+", True),
        ("?", "!", False),
    ],
)
def test_names_with_full_stops_and_commas_are_answers_and_lists_are_not(said, reference, right):
    answers = (f"The answer is {said}", f"I looked it up.\nAnswer: {said}\n")
    assert [QuestionAnswer()(text, reference).value for text in answers] == [right, right]
    assert QuestionAnswer(where="phrase")(answers[0], reference).value == right


def test_ranking_by_hand():
    # b, a, c with gains 3, 2, 1 of a, b, c: (2 + 3/log2(3) + 1/2) / (3 + 2/log2(3) + 1/2)
    wanted = (2.5 + 3 / math.log2(3)) / (3.5 + 2 / math.log2(3))
    assert ndcg(["b", "a", "c"], {"a": 3, "b": 2, "c": 1}) == pytest.approx(wanted) == pytest.approx(0.9224945)
    reference = json.dumps({"a": 3, "b": 2, "c": 1})
    assert Ranking()("1. B\n2. a\n3. c", reference).value == pytest.approx(wanted)
    assert Ranking()('["a", "b", "c"]', reference).value == 1
    assert Ranking()("a, a, a, a", reference).value == pytest.approx(3 / (3.5 + 2 / math.log2(3)))  # once is enough
    assert Ranking(metric="recall", k=2)("x, b, a", "a, b").value == 0.5  # b is among the first two, a is not
    assert Ranking(metric="reciprocal_rank")("x, y, b", "a, b").value == pytest.approx(1 / 3)
    # The first one and the first two of both, then all three: (0 + .9 + .81) / (1 + .9 + .81).
    assert Ranking(metric="overlap")("b, a, c", '{"a": 3, "b": 2, "c": 1}').value == pytest.approx(0.630996, abs=1e-6)
    assert [Ranking(metric="overlap")(said, '["a", "b"]').value for said in ("a, b, x", "x, y", "")] == [1, 0, 0]
    views = {"ndcg": 1.0, "recall": 0.1, "overlap": 0.1}  # ReasonRank's three views, .922495 + .1 + .0630996
    found = sum(w * Ranking(metric=m, k=10)("b, a, c", '{"a": 3, "b": 2, "c": 1}').value for m, w in views.items())  # type: ignore[arg-type]
    assert found == pytest.approx(1.085594, abs=1e-6)
    assert Ranking(k=1)("", "a").value == 0
    assert items("- a\n- b\n\n* a") == ["a", "b"]


def test_json_has_to_have_the_shape():
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 0}}}
    part = JsonSchema(schema=schema)
    values = {
        '{"n": 1}': 1,
        'Here:\n```json\n{"n": 2}\n```': 1,
        '{"n": -1}': 0,
        "{}": 0,
        '{"n": 1': 0,
        "NaN": 0,
        "": 0,
        "[" * 50_000: 0,
    }
    assert {text: part(task(), played(text)).value for text in values} == values
    assert "-1" in part(task(), played('{"n": -1}')).why
    hundredths = JsonSchema(schema={"type": "number", "multipleOf": 0.01})
    assert [hundredths(task(), played(text)).value for text in ("0.05", "1e400", "1" + "0" * 400)] == [1, 0, 0]
    with pytest.raises(ValidationError, match="not a JSON Schema"):
        JsonSchema(schema={"type": "nonsense"})


def test_a_pattern_that_takes_for_ever_is_worth_nothing():
    assert Pattern(pattern=r"move (north|south)")(task(), played("wait", " move north\n")).value == 1
    assert Pattern(pattern=r"north")(task(), played("move north")).value == 0
    assert Pattern(pattern=r"north", match="search")(task(), played("move north")).value == 1
    assert Pattern(pattern=r"wait.*north", match_in="all_actions")(task(), played("wait", "north")).value == 1
    begin = time.monotonic()
    found = Pattern(pattern=r"(a+)+b", limit_s=0.2)(task(), played("a" * 60))
    assert found.value == 0 and "0.2 s" in found.why and time.monotonic() - begin < 20
    with pytest.raises(ValidationError, match="not a regular expression"):
        Pattern(pattern="(")


# --- texts and patches ------------------------------------------------------------------------------------------------


def test_similarity_by_hand():
    # "-a\n+b" and "-a\n+c": 4 of 5 characters in common, 2·4/10
    assert ratio("-a\n+b", "-a\n+c") == pytest.approx(0.8)
    assert diff_similarity({"x": "-a\n+b"}, {"x": "-a\n+c"}) == pytest.approx(0.8)
    assert diff_similarity({"x": "-a\n+b"}, {"x": "-a\n+c", "y": "+d"}) == pytest.approx(0.4)  # y is left alone
    assert diff_similarity({}, {}) == 1
    assert Similarity()("abcd", "bcde").value == pytest.approx(0.75)  # bcd: 2·3/8
    assert Similarity()("", "").value == 0 and Similarity()("a" * 30_000, "a").value == 0


BEFORE = {"a.py": "x = 1\ny = 2\n"}
REFERENCE = json.dumps({"before": BEFORE, "after": {"a.py": "x = 3\ny = 2\n"}})


def block(old, new, path="a.py"):
    return f"### {path}\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n"


def patched(text, **info):
    return PatchSimilarity()(replace(task(REFERENCE), info=info), played(text))


def test_patches_are_compared_by_their_diffs():
    assert diffs(BEFORE, {"a.py": "x = 3\ny = 2\n"}) == {"a.py": "@@\n-x = 1\n+x = 3\n y = 2"}
    assert patched(block("x = 1\n", "x = 3\n")).value == 1
    assert patched(block("x = 1\n", "x = 3\n"), structured=True).value == 1  # a mapping as verl's `ground_truth`
    # "@@\n-x = 1\n+x = 3\n y = 2" has 23 characters, of which one differs: 2·22/46
    assert patched(block("x = 1\n", "x = 4\n")).value == pytest.approx(44 / 46)
    two = block("x = 1\n", "x = 3\n") + block("", "z = 1\n", path="b.py")
    assert patched(two).value == pytest.approx(0.5)  # b.py is not in the reference


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no search/replace block"),
        ("x = 3", "no search/replace block"),
        (block("x = 9\n", "x = 3\n"), "not there"),
        (block("x = 1\n", "x = 1\n"), "changes nothing"),
        (block("x = 1\n", "x = 3\n") + "<<<<<<< SEARCH\n", "not whole"),
    ],
)
def test_edits_that_cannot_be_made_are_worth_minus_one(text, why):
    found = patched(text)
    assert found.value == -1 and why in found.why
    assert isinstance(edited(BEFORE, text), str)


def test_a_patch_needs_files_to_compare_with():
    with pytest.raises(RewardError, match="not a pair of files"):
        PatchSimilarity()(task("x = 3"), played("x = 3"))


def test_rouge_and_bleu_are_those_of_their_libraries():
    pytest.importorskip("rouge_score")
    # longest common subsequence 3: precision 3/3, recall 3/4, F = 2·1·.75/1.75
    assert Rouge()("the cat sat", "the cat sat down").value == pytest.approx(6 / 7)
    assert Rouge(measure="recall")("the cat sat", "the cat sat down").value == 0.75
    assert Rouge(variant="rouge2", measure="recall")("the cat sat", "the cat sat down").value == pytest.approx(2 / 3)
    # one- to three-grams all there, none of four; brevity exp(1 − 4/3)
    assert Bleu()("the cat sat", "the cat sat down").value == pytest.approx(math.exp(-1 / 3), abs=1e-4)
    assert Bleu()("", "the cat").value == 0


# --- queries ----------------------------------------------------------------------------------------------------------

SETUP = "CREATE TABLE t (name TEXT, n INT); INSERT INTO t VALUES ('a', 3), ('b', 1), ('c', 2), ('c', 2);"


def asked(query, reference, **more):
    return SqlResult(limit_s=0.5)(query, json.dumps({"setup": SETUP, "query": reference, **more}))


@pytest.mark.parametrize(
    ("query", "reference", "value"),
    [
        ("SELECT name FROM t ORDER BY n", "SELECT name FROM t", 1),  # no order was asked for
        ("SELECT name FROM t ORDER BY name DESC", "SELECT name FROM t ORDER BY n", 0),
        ("SELECT name FROM t ORDER BY n, name", "SELECT name FROM t ORDER BY n", 1),
        ("SELECT DISTINCT name FROM t", "SELECT name FROM t", 0),  # c comes twice
        ("SELECT n AS other FROM t", "SELECT n FROM t", 1),
        ("SELECT name, n FROM t", "SELECT n, name FROM t", 0),
        ("```sql\nSELECT count(*) FROM t;\n```", "SELECT 4", 1),
        ("SELECT n * 1.0 FROM t", "SELECT n FROM t", 1),
        ("SELECT", "SELECT n FROM t", 0),
        ("DELETE FROM t", "SELECT n FROM t WHERE 0", 0),
        ("DROP TABLE t; SELECT 4", "SELECT 4", 0),
        ("ATTACH '/tmp/x.db' AS y", "SELECT 4", 0),
        ("PRAGMA table_info(t)", "PRAGMA table_info(t)", 0),
        ("", "SELECT 4", 0),
        ("I don't know", "SELECT 4", 0),
    ],
)
def test_queries_are_compared_by_their_rows(query, reference, value):
    assert asked(query, reference).value == value


def test_an_order_counts_where_the_question_has_one():
    assert asked("SELECT name FROM t ORDER BY name", "SELECT name FROM t ORDER BY n", ordered=False).value == 1
    assert asked("SELECT n FROM t ORDER BY n", "SELECT n FROM t ORDER BY -n", ordered=True).value == 0
    assert asked("SELECT n FROM t ORDER BY n", "SELECT n FROM t ORDER BY -n", ordered=None).value == 0
    assert is_ordered("SELECT a FROM t ORDER BY a") and is_ordered("(SELECT 1) ORDER  by 1")
    assert not is_ordered("SELECT a FROM (SELECT * FROM t ORDER BY a)")
    assert not is_ordered("SELECT 'order by' -- order by")


def test_a_query_without_an_end_is_wrong():
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    found = asked(endless, "SELECT 4")
    assert found.value == 0 and "processor time" in found.why


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ("answer, reference", True),
        ("a: str, b: str", True),
        ("solution_str, ground_truth", True),
        ("completion, target", True),
        ("task, trajectory", False),
        ("t: object, trajectory: object", False),
        ("ground_truth, solution_str", "swap the two"),
        ("reference, answer", "swap the two"),
        ("prompt: str, response: str", "does not receive the prompt"),
        ("completion, state", "does not receive the state"),
        ("response, question", "does not receive the question"),
        ("one, two", "cannot tell whether"),
    ],
)
def test_a_function_is_told_by_its_parameters(parameters: str, wanted: bool | str) -> None:
    made: dict[str, Any] = {}
    exec(f"def judge({parameters}):\n    return 1.0", made)
    if isinstance(wanted, bool):
        assert is_verifier(made["judge"]) is wanted
        return
    with pytest.raises(RecipeError, match=wanted):
        is_verifier(made["judge"])


def test_a_lambda_and_an_object_are_told_by_their_parameters_too() -> None:
    class Judge:
        def __call__(self, one, two):  # type: ignore[no-untyped-def]
            return 1.0

    assert is_verifier(lambda answer, reference: 1.0)
    assert not is_verifier(lambda task, trajectory: 1.0)
    for odd in (lambda x, y: 1.0, Judge(), Judge().__call__):
        with pytest.raises(RecipeError, match="cannot tell whether"):
            is_verifier(odd)
