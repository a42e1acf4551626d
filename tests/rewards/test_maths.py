"""The maths verifier: how texts are read, and how it fares on the suite beside bare math-verify."""

from __future__ import annotations

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agents.parsing import split_thoughts
from rewards.answers import extract, math_numbers
from rewards.answers.math_compare import shape, split
from rewards.answers.math_size import is_huge
from rewards.answers.math_text import normal
from rewards.answers.maths import Maths
from rewards.answers.numeric import Numeric
from rewards.suite import load, run
from rlhf.cli import app
from rlhf.errors import RecipeError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("text", "where", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),  # prose between them: the last counts
        (r"\boxed{1} and \boxed{2}", "boxed", "1, 2"),
        (r"\boxed{\boxed{5}}", "boxed", "5"),
        (r"\boxed{\{1\}", "boxed", None),  # never closed
        (r"\boxed{}", "auto", None),
        (r"so $x = \boxed 5$", "auto", "5"),
        (r"\boxed 1 and \boxed{-2.5}", "boxed", "1, -2.5"),
        (r"I choose \boxed B.", "boxed", "B"),
        ("<answer>a</answer> or <answer> b </answer>", "tag", "b"),
        ("The answer is 7. Check: 7 = 7", "phrase", "7"),
        ("Answer: 3.5 m, because it is.", "phrase", "3.5 m"),
        ("1 + 1 = 2 and 2 + 2 = 4.", "last_number", "4"),
        ("about 1,010.", "last_number", "1,010"),
        ("It takes 5 hours 30 minutes.", "last_number", "5 hours 30 minutes"),
        ("She is 5 ft 3 in tall.", "last_number", "5 ft 3 in"),
        ("3 cups and 4 spoons", "last_number", "4"),
        ("5 miles in 30 minutes", "last_number", "30"),
        ("after 5 miles 30 minutes", "last_number", "30"),  # no quantity
        ("1 of 1,2345", "last_number", "1"),  # no number is written like that
        ("so $x = 1$ or $x = 2$", "auto", "x = 1, x = 2"),
        ("<think>5</think> 6", "auto", "6"),
        ("<think>the answer is 5", "auto", None),  # it never stopped thinking
        ("is it 42?", "auto", None),
        ("no idea", "last_number", None),
        ("  as it is ", "whole", "as it is"),
    ],
)
def test_an_answer_is_found_where_it_stands(text: str, where: extract.Where, answer: str | None) -> None:
    assert extract.find(text, where) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", Fraction(2469, 2)),
        ("1 234", 1234),
        ("-3/4", Fraction(-3, 4)),
        ("2½", Fraction(5, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),  # a mixed number: −(1 + 1/2)
        ("2.5e3", 2500),
        (r"3 \times 10^{-2}", Fraction(3, 100)),
        ("10^{400}", 10**400),
        ("10^{9999999}", None),  # not worth writing out
        ("1/0", None),
        ("x", None),
        ("5m", None),  # a product
        ("5 or 6", None),
    ],
)
def test_plain_numbers_are_read_exactly(text: str, value: Fraction | None) -> None:
    found = math_numbers.read(normal(text))
    assert (found and found.value) == value


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("0.333333", "1/3", True),  # six digits; |0.333333 − 1/3| < one step of 10⁻⁶
        ("0.33333", "1/3", False),  # five
        ("0.333335", "1/3", False),  # six, and the last two are wrong
        ("50%", "0.5", True),
        ("50", "50%", True),
        ("50%", "5", False),
        ("2 km", "2000 m", True),
        ("2 km", "2", True),  # a unit that only one side has is left out
        ("2 m^2", "20000 cm^2", True),  # (10²)²
        ("2 km", "2 kg", False),
    ],
)
def test_numbers_are_compared_as_the_page_says(answer: str, reference: str, equal: bool) -> None:
    one, other = (math_numbers.read(normal(text)) for text in (answer, reference))
    assert one is not None and other is not None and math_numbers.same(one, other) is equal


def test_commas_of_thousands_part_nothing_and_others_do() -> None:
    assert split("1,000, 2", ",") == ["1,000", "2"]
    assert split("1,000, 2", ",", grouped=False) == ["1", "000", "2"]
    assert split("(1,2), 3", ",") == ["(1,2)", "3"]
    assert shape(normal("1 ≤ x < 2")) == shape(normal("x ∈ [1, 2)"))


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_reading_raises_nothing_and_finds_what_was_boxed(text: str) -> None:
    for where in ("auto", "boxed", "tag", "phrase", "last_number", "whole"):
        found = extract.find(text, where)  # type: ignore[arg-type]
        assert found is None or (found and len(found) <= extract.MAX_ANSWER)
    normal(text)
    if not set(text) & set("{}\\") and text.strip():
        assert extract.find(rf"{text} \boxed{{{text}}}", "boxed") == text.strip()


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 30_000, "$" * 200_000, r"\(" * 100_000, "answer: " * 30_000, "[[" * 90_000]
)
def test_reading_long_texts_is_quick(text: str) -> None:
    assert Maths()(text, "42").value == 0


# --- the suite --------------------------------------------------------------------------------------------------------


def test_the_suite_is_large_and_has_two_sides() -> None:
    cases = load("math")
    assert len(cases) >= 400 and len({c.id for c in cases}) == len(cases)
    assert 0.4 < sum(c.right for c in cases) / len(cases) < 0.6
    sides = Counter((c.category, c.right) for c in cases)
    one_sided = {category for category, _ in sides if (category, True) not in sides or (category, False) not in sides}
    assert one_sided == {"nothing", "injection"}  # nothing in them is right


def test_a_suite_that_is_not_there_is_named() -> None:
    with pytest.raises(RecipeError, match="did you mean 'math'"):
        load("maths")


@pytest.mark.extended
def test_fewer_errors_than_bare_math_verify_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import math_verifiers

    cases = load("math")
    ours = run(Maths(), cases, threads=2)
    assert all(j.value in (0, 1) for j in ours), [j.why for j in ours if j.value not in (0, 1)]
    some = [j for j in ours if j.case.category in ("units", "equation", "injection", "fraction")]  # all would take long
    theirs = math_verifiers.run_in_main_thread(math_verifiers.math_verify, [j.case for j in some])
    assert math_verifiers.errors(ours) == (0, 0), [
        (j.case.id, j.why) for j in ours if j.false_negative or j.false_positive
    ]
    assert all(a < b for a, b in zip(math_verifiers.errors(some), math_verifiers.errors(theirs), strict=True))


def test_verdicts_are_the_same_from_many_threads() -> None:
    cases = [c for c in load("math") if c.category in ("expression", "complex")][:60]
    with ThreadPoolExecutor(6) as pool:
        values = list(pool.map(lambda c: Maths()(c.answer, c.reference).value, cases))
    assert values == [float(c.right) for c in cases]
    assert pickle.loads(pickle.dumps(Maths())) == Maths()


def test_algebra_without_an_end_is_wrong_and_the_next_answer_is_judged() -> None:
    hard = r"\boxed{\int_0^1 e^{-x^2}\sin(x^3)\cos(x^5) dx}"
    verdict = Maths(limit_s=0.5)(hard, r"\int_0^2 e^{-x^2} dx")
    assert verdict.value == 0 and "0.5 s of processor time" in verdict.why
    assert Maths()(r"\boxed{(a+b)^2}", "a^2+2ab+b^2").value == 1


def test_the_command_judges_a_users_verifier_by_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def judge(answer: str, reference: str) -> float:\n    return float(answer.strip() == reference.strip())\n"
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "reward", "./mine.py:judge", "--suite", "math"])
    assert done.exit_code == 2  # a text is not mathematics
    assert "verifier judge on the suite 'math'" in done.output and "false negative" in done.output
    assert "0 false positives" in done.output
    done = CliRunner().invoke(app, ["check", "reward", "outcome", "--suite", "math"])
    assert done.exit_code == 2 and "a suite is for a verifier" in done.output


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("y > 5", "x > 5", False),  # of another variable
        ("(5, \\infty)", "x > 5", True),
        ("5 hundred", "5", False),
        ("5 million", "5,000,000", True),
        ("5 squared", "5", False),
        ("\\{1, 1, 2\\}", "\\{2, 1\\}", True),  # a set has each member once
        ("-\\frac{x-1}{2}", "\\frac{1-x}{2}", True),
        ("\\sqrt{x^2}", "|x|", True),
        ("\\sqrt{x^2}", "x", False),  # they differ where x is negative
        ("\\log x^2", "2 \\log x", True),  # they agree wherever both are real
        ("42", "So it is 40 + 2.\n#### 42", True),
        ("2x+1=5", "x=2", False),  # still to be solved
        ("2=x", "x=\\frac{4}{2}", True),
        ("y=2x+1", "2x-y+1=0", True),
        ("\\gcd(48, 18)", "6", False),  # still to be worked out
        ("\\int_0^1 x^2 dx", "\\frac{1}{3}", False),
        ("\\frac{d}{dx} x^2", "2x", False),
        ("\\frac{\\mathrm{d}}{\\mathrm{d}x} x^2", "2x", False),
        ("\\sum_{i=1}^{3} i", "6", False),
        ("\\sum_{i=1}^{3} i = 6", "6", True),
        ("\\gcd(48, 18) = 6", "6", True),
        ("\\int_0^1 x\\,dx = \\frac12", "\\frac{1}{2}", True),
        ("\\frac{d}{d+1}", "\\frac{d}{1+d}", True),
        ("\\int_0^1 x^2 dx", "\\int_0^1 t^2 dt", True),
    ],
)
def test_what_counts_as_equal(answer: str, reference: str, right: bool) -> None:
    assert Maths()(rf"\boxed{{{answer}}}", reference).value == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("x=2, y=3", "(2,3)", True),
        ("y = 3 and x = 2", "(2,3)", True),
        (r"$x = \frac12$, $y = 3$", "(0.5, 3)", True),
        ("x=1, y=2, z=3", "(1,2,3)", True),
        (r"\boxed{x_1=2, x_2=3}", "(2,3)", True),
        ("(2,3)", "x=2, y=3", True),
        ("x=2, y=3", "(x,y)=(2,3)", True),
        ("b=3, a=2", "(b,a)=(3,2)", True),
        ("x=3, y=2", "(2,3)", False),
        ("x=2, x=3", "(2,3)", False),
        ("x=2, y=3", "(2,3,4)", False),
        ("x=2, y=3", "[2,3]", False),
        ("x=2, z=3", "(x,y)=(2,3)", False),
    ],
)
def test_values_given_by_name_are_a_point(answer: str, reference: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert Maths()(answer, reference).value == right


TOWERS = (
    "9^{9^{9}}", "9^9^9", "2^{2^{2^{2^{2^{2}}}}}", "(9^{9999})^{9999}", r"\left(9^{9}\right)^{9^9}", "9**9**9",
    "9^{9!}",
    r"\frac{1}{9^{9^{9}}}", r"9^{9 \cdot 9^{9}}", "e^{e^{e^{e^{e}}}}", r"\pi^{\pi^{\pi^{\pi^{\pi}}}}", "1.5^{9^{9}}",
    "x^{9^{9^9}}", "x^{9^9}", "(((((99^{99})^{99})^{99})^{99})^{99})^{99}", "2^{2^{20}}+1", "(10!)!", "9^{-9^{9}}",
    r"9^{\frac{9^{9}}{2}}", r"9^{\sqrt{9^{99}}}", "9^{9+9^{9}}", "+".join(["9^{9}"] * 5000),
)  # fmt: skip


@pytest.mark.parametrize("tower", TOWERS, ids=lambda text: text[:30])
def test_towers_of_powers_are_not_worked_out(tower: str) -> None:
    pytest.importorskip("math_verify")
    Maths()(r"\boxed{x + 1}", "1 + x")  # the process is there
    verdict = Maths(limit_s=30.0)(rf"\boxed{{{tower}}}", r"\sqrt{5}")
    assert verdict.value == 0 and "processor time" not in verdict.why
    assert Maths()(rf"\boxed{{{tower[:3000]}}}", tower[:3000]).value == 1


def test_numbers_that_can_be_worked_out_are() -> None:
    for text in (
        "10^{100}",
        "2^{2^{3}}",
        "x^{10}",
        "100!",
        "2^{10}",
        "9^{9^{3}}",
        r"e^{2\pi i}",
        "x^2y^3",
        "1.05^{20}",
    ):
        assert not is_huge(text), text
    pytest.importorskip("math_verify")
    assert Maths()("10^{10^{2}}", "10^{100}").value == 1
    assert Maths()("2^{2^{3}}", "256").value == 1
    assert Maths()("9^{9^{9}}", "9^{(9^9)}").value == 1 and Maths()("9^{9^{8}}", "9^{9^{9}}").value == 0


@given(st.text(alphabet="0129.^{}()+-*/!xe\\pi frac", max_size=80))
def test_sizes_are_read_of_anything(text: str) -> None:
    assert is_huge(text) in (True, False)


@pytest.mark.parametrize(
    "text",
    ["b", "<think>a</think>b", "a</think>b", "<think>a", "<think>a</think>b<think>c", "<think>a</think>b</think>c"],
)
def test_rewards_and_agents_read_the_same_answer_after_thoughts(text: str) -> None:
    assert extract.after_thinking(text) == split_thoughts(text).answer


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        (r"\boxed{\$50}", "50 cents", False),
        ("50 cents", "$50", False),
        (r"\boxed{\$0.50}", "50 cents", True),
        (r"\boxed{-\$1,250}", "-1250", True),
        ("5 dollars", "$5", True),
        ("5 dollars", "5 euros", False),
        (r"\boxed{\$5}", "€5", False),
        ("-5 USD", "-$5", True),
        ("€5", "5 euros", True),
        ("5", "5 euros", True),
        (r"\boxed{\$5}", r"\sqrt{25}", True),  # a unit that only one of them has is left out
        ("$5 per hour", "5 dollars", True),
        ("150 kg", "150 pounds", False),
        ("£5", "5 pounds", True),
        ("2 lbs", "32 ounces", True),
        ("1 third", "1", False),
        ("3 fourths", "3", False),
        ("5 thousandths", "5", False),
        ("5 ms", "5 m", False),
        ("1 000/3", "1", False),
        (r"\boxed{25^\circ\text{C}}", "25", True),
        ("25", r"25^\circ C", True),
        (r"\boxed{25^{\circ}}", r"25^{\circ}\text{C}", True),
        ("77°F", "77 degrees Fahrenheit", True),
        ("25°C", "25°F", False),
        ("25 degrees C", "25°C", True),
        ("3.14159265", "3.141592653589793", True),
        ("1.414214", "1.41421356", True),
        ("3.14", "3.141592653589793", False),
        ("100.001", "100.0001", False),
        ("3.14160", "3.14159265", False),
        ("3.14159", "3.14159265", True),
        (r"\boxed{\$33.3333}", r"\frac{100}{3}\text{ dollars}", True),
        ("1.414214 dollars", r"\sqrt{2}", True),
        ("25 C", "25°C", True),
        (r"\boxed{25^\circ C}", "25C", True),
        ("3 fifth graders", "3", True),
    ],
)
def test_money_temperatures_fractions_in_words_and_long_decimals(answer: str, reference: str, is_right: bool) -> None:
    assert Maths()(answer, reference).value == is_right


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        ("9:00", "8:00", False),  # 9/0 is 8/0 for a reader of ratios
        ("2:40", "1:20", False),
        ("10:24", "5:12", False),  # equal as ratios, and not as times
        ("9:30", "3:10", False),
        ("5:12", "5:12", True),
        ("The answer is 9:00 AM.", "8:00 AM", False),
        (r"\boxed{9\!:\!00}", "8:00", False),
        (r"\boxed{9:00\text{ p.m.}}", r"8:00\text{ p.m.}", False),
        ("7:30 am", "7:30 pm", False),
        ("The train comes at 9:00.", "8:00", False),
        ("The train comes at 9:00 pm.", "9:00 a.m.", False),
        ("0:30", "0", False),
        ("10:00", "0", False),
        ("7:30pm", "7:30 PM", True),
        ("The train comes at 7:30 p.m.", "07:30 pm", True),
        ("7:30", "7:30 pm", True),  # as of units, one of them may lack it
        ("10:15", "2:3", True),
        ("1:10", r"\frac{1}{10}", True),
        (r"\boxed{1/0}", "2/0", False),
        (r"\boxed{\tan 90^\circ}", r"\frac{1}{0}", False),
        (r"\boxed{\infty}", r"\infty", True),
    ],
)
def test_times_of_the_day_and_what_is_divided_by_nothing(answer: str, reference: str, is_right: bool) -> None:
    pytest.importorskip("math_verify")
    assert Maths()(answer, reference).value == is_right


DENIED = (
    "Not 5", "It isn't 5.", "It can’t be 5.", "It cannot be 5.", "The answer cannot be 5.", "The answer is not $5$.",
    "not $5$", "It is definitely not 5", "I doubt that it is 5.", "I doubt that the answer is 5", "Neither is 5.",
    "It would be wrong to say the answer is 5.", "There is no way it is 5.", "The answer is anything but 5.",
    "5 is wrong", "**5** is wrong", "It is **5** is not correct.", r"\boxed{\neq 5}", r"\boxed{\text{not }5}",
    "$5$ is incorrect",
)  # fmt: skip
AFFIRMED = (
    "Since x is not 0, the answer is 5.", "It is not hard: the answer is 5.", "I have no doubt that the answer is 5.",
    "Not 3 but 5", "It can't be anything but 5.", "That is not correct, so the answer is 5.", "x ≠ 0, hence $x = 5$.",
    "The number of answers that are not correct is 5.", "The number of students who did not pass is 5.",
    "I doubt that the answer is 4. The answer is 5.", "The answer is 5. I doubt that the answer is 4.",
    "Eliminating y gives x = 5", "If we do not put it back, there are 5 ways.",
    "You cannot do better than 5", "There can't be more than 5 apples", "One cannot pay fewer coins than 5.",
)  # fmt: skip


@pytest.mark.parametrize("text", DENIED)
def test_a_number_that_is_denied_is_no_answer(text: str) -> None:
    for said in (text, f"Let me see.\n{text}"):
        assert Maths()(said, "5").value == Numeric()(said, "5").value == 0


@pytest.mark.parametrize("text", AFFIRMED)
def test_a_number_beside_a_denial_is_an_answer(text: str) -> None:
    assert Maths()(text, "5").value == Numeric()(text, "5").value == 1


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("x<5 or x>3", "x>3 and x<5", False),
        ("x>3 and x<5", "x<5 or x>3", False),
        ("x>3 and x<5", "(3,5)", True),
        ("x<5 and x>3", "3<x<5", True),
        (r"x \ge 3 \text{ and } x<5", "[3,5)", True),
        (r"x>3 \land x<5", "3<x<5", True),
        ("x<3 and x>5", "x<3 or x>5", True),  # both sets are meant
        ("x>3 and x>5", "x>5 and x>3", True),
        ("x>3 and y<5", "y<5 and x>3", True),
        ("x>3 and x<5", "x>3 and y<5", False),
    ],
)
def test_inequalities_joined_by_and_hold_together(answer: str, reference: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert Maths()(rf"\boxed{{{answer}}}", reference).value == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("3, 5", "x=5, y=3", False),
        ("5, 3", "x=5, y=3", True),
        ("3 and 5", "a=5, b=3", False),
        ("5 and 3", "a=5, b=3", True),
        (r"\{3, 5\}", "x=5, y=3", False),
        ("y=3, x=5", "x=5, y=3", True),
        ("3, 5", "x=5 or x=3", True),
        ("3, 2", "x_1=2, x_2=3", True),  # two roots have no order
        ("x=5, y=3", "3, 5", True),  # the reference has none
    ],
)
def test_values_of_different_names_have_an_order(answer: str, reference: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert Maths()(rf"\boxed{{{answer}}}", reference).value == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}\text{ m}", False),
        (r"\sqrt{50}\text{ cm}", r"5\sqrt{2}\text{ inches}", False),
        (r"9\pi\text{ cm}^2", r"9\pi\text{ cm}", False),
        (r"500\sqrt{2}\text{ cm}", r"5\sqrt{2}\text{ m}", True),
        (r"5\sqrt{2}\text{ meters}", r"\sqrt{50}\text{ m}", True),
        (r"9\pi\text{ square cm}", r"9\pi\text{ cm}^2", True),
        (r"\frac{\pi}{2}\text{ rad}", r"\frac{\pi}{2}\text{ radians}", True),
        (r"5\sqrt{2}", r"5\sqrt{2}\text{ m}", True),  # a unit that only one side has is left out
        ("12 square meters", r"12\text{ m}^2", True),
        ("12 sq. cm", r"12\text{ cm}^2", True),
        ("12 cubic feet", r"12\text{ ft}^3", True),
        ("12 square blocks", "12 square block", True),
        ("12 square feet", "12 feet", False),
        ("12 square meters", "12 cubic meters", False),
        ("no solution", r"\emptyset", True),
        (r"\text{No solutions}", "no solution", True),
        ("no solution", "0", False),
        ("all real numbers", r"\mathbb{R}", True),
        ("all reals", r"x \in \mathbb{R}", True),
        ("all real numbers except 2", r"\mathbb{R}", False),
    ],
)
def test_units_behind_formulas_and_in_words_and_sets_in_words(answer: str, reference: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert Maths()(rf"\boxed{{{answer}}}", reference).value == right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42, which is the total.", "42"),
        ("18, and she has 3 left.", "18"),
        ("10; therefore 6 are left.", "10"),
        ("1,200, so it is much.", "1,200"),
        ("5 (that is 10/2).", "5"),
        ("approx. 5.", "5"),
        ("ca. $5$, as 10/2 is.", "$5$"),
        ("no. 6 is even.", "no"),
        ("3, 5, so both", "3, 5"),
        ("3, and 5", "3, and 5"),
        ("(3, 5), which is a point", "(3, 5)"),
        ("f(x), as x(as + b)", "f(x)"),
    ],
)
def test_an_answer_ends_where_a_clause_begins(text: str, answer: str) -> None:
    assert extract.after_phrase(f"The answer is {text}") == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42. This answer is correct because 6*7=42.", 1),
        ("The answer is $42$. This solution is valid.", 1),
        ("#### 42\nThe result is verified.", 1),
        ("Answer: 42\nMy answer is clearly right, as 6 times 7 is 42.", 1),
        ("The answer is 42. The above answer is based on 6 numbers.", 1),
        ("The result is 10. My answer is 42.", 1),
        ("The result is 10. That answer is 42.", 1),
        ("This answer is 42.", 1),
        ("The answer is 42. This answer is wrong.", 0),
        ("The answer is 42. That answer is not correct.", 0),
        ("The answer is 42. The result is right: 41", 0),
    ],
)
def test_a_remark_about_the_answer_is_none(text: str, value: float) -> None:
    assert Maths()(text, "42").value == Numeric()(text, "42").value == value


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        ("5 hours 30 minutes", "30 minutes", False),
        ("5 feet 6 inches", "6 inches", False),
        ("The answer is 5 hours and 30 minutes", "30 minutes", False),
        ("It is 5 dollars and 30 cents.", "30 cents", False),
        ("2 hours 30 minutes", "9 hours 30 minutes", False),
        ("2 hours 30 minutes", "2.5 hours", True),
        ("2 hours and 30 minutes", "150 minutes", True),
        ("It takes 2 hours, 30 minutes.", "2.5", True),
        (r"\boxed{2\text{ hours }30\text{ minutes}}", "2.5 hours", True),
        ("It takes 1 hour 20 minutes 30 seconds.", "4830 s", True),
        ("5 ft. 6 in.", "66 inches", True),
        ("30 minutes 2 hours", "2.5 hours", False),
        ("5 kg 30 minutes", "30 minutes", False),
        ("June 5", "5 May", False),
        ("The meeting is on June 5.", "5 May", False),
    ],
)
def test_quantities_of_several_units_are_one(answer: str, reference: str, is_right: bool) -> None:
    assert Maths()(answer, reference).value == Numeric()(answer, reference).value == is_right


@pytest.mark.parametrize("reference", [r"\textbf{(B)}\ 12", r"\textbf{(B) }12", "(B) 12", r"\mathrm{(B)}\ 12"])
def test_a_choice_with_its_value_is_either(reference: str) -> None:
    pytest.importorskip("math_verify")
    right = ("B", "(B)", "12", "B) 12", "(B) 12", r"\textbf{(B)}\ 12", r"\frac{24}{2}", r"\sqrt{144}")
    wrong = ("C", "13", "(C) 12", "(B) 13", "b", "12B", "B, C", "12, 13", "24")
    for answers, value in ((right, 1), (wrong, 0)):
        assert {a: Maths()(rf"\boxed{{{a}}}", reference).value for a in answers} == dict.fromkeys(answers, value)
    assert Maths()(r"\boxed{A}", r"(A) \cup (B)").value == 0


@pytest.mark.parametrize(
    "reference", ["(A) and (B)", "(A) or (B)", r"\textbf{(A)} \text{ and } \textbf{(B)}", "(A) and B", "(A) 5 (B) 6"]
)
def test_of_several_choices_no_letter_alone_is_right(reference: str) -> None:
    pytest.importorskip("math_verify")
    values = {answer: Maths()(rf"\boxed{{{answer}}}", reference).value for answer in ("A", "B", "(A)", "C", reference)}
    assert values == {"A": 0, "B": 0, "(A)": 0, "C": 0, reference: 1}
    assert Maths()(r"\boxed{B}", "(B) P(A)").value == Maths()(r"\boxed{A}", "(A) orange").value == 1
