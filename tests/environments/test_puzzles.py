"""Countdown, SAT, and knights and knaves: what is drawn, read and judged, and solvers compared with brute force."""

from __future__ import annotations

import asyncio
import random
from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.contrib import knights, sat
from environments.contrib.knights import Knights, Puzzle, Statement, read_answer, solutions
from environments.contrib.sat import Sat, difficulty, read_values, satisfied
from environments.games.countdown import Countdown, Numbers, value_of

seeds = st.integers(0, 30_000_000)


# --- countdown -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("1/3 + 1/6", Fraction(1, 2)), ("2 × 3 − 1", 5), ("3 x 15", 45),
        ("8 ÷ 2", 4), ("`3 * 15` ", 45), ("3*15 = 45", 45), ("45", 45), ("10 - 2 - 3", 5),
    ],
)  # fmt: skip
def test_expressions_are_computed_exactly(text: str, value: Fraction) -> None:
    found = value_of(text, 45)
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    "text",
    [
        "", "3 +", "2 ** 9", "7 // 2", "-3 + 4", "1.5 * 2", "a + 1", "__import__('os')", "3(4)", "3*15 = 44", "()",
        "1 2",
        "9" * 200, "(" * 60 + "1" + ")" * 60 + ")", "1e3", "3, 4", "\x00",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_not_read(text: str) -> None:
    assert value_of(text, 45) is None


@pytest.mark.parametrize(
    ("text", "says", "solved"),
    [
        ("3 * 15", "15 is none of the numbers.", False),
        ("3 * 3 + 5", "3 is used more often than it is given.", False),
        ("3 * 5", "7 is not used as often as it is given.", False),
        ("7 / (5 - 5)", "5 is used more often than it is given.", False),
        ("3 * 5 + 7", "That makes 22, not 26.", False),
        ("3 / 7 / 5", "That makes 3/35, not 26.", False),
        ("3 * 7 + 5 = 26", "26 it is.", True),
    ],
)
def test_feedback_says_what_is_wrong(text: str, says: str, solved: bool) -> None:
    judged = Countdown(numbers=3)._judge(Numbers((3, 5, 7), 26, ""), text)
    assert (judged.feedback, judged.solved) == (says, solved) and judged.answer is not None


def test_numbers_may_be_left_out_where_that_is_allowed() -> None:
    judge = Countdown(numbers=3, use_all=False)._judge
    assert judge(Numbers((3, 5, 7), 15, ""), "3 * 5").solved
    assert judge(Numbers((3, 5, 5), 15, ""), "3 / (5 - 5)").feedback == "It divides by zero."


def solve(parts: list[tuple[Fraction, str]], target: int, use_all: bool = True) -> str | None:
    """Expression that makes `target`, by exhaustive search over pairs of values and their texts; None if there is none.

    Of n numbers that is up to n! (n - 1)! 4^(n - 1) expressions: for up to 5 numbers.
    """
    if len(parts) == 1 or not use_all:
        found = next((text for value, text in parts if value == target), None)
        if found is not None or len(parts) == 1:
            return found
    for (i, (a, left)), (j, (b, right)) in permutations(enumerate(parts), 2):
        rest = [part for n, part in enumerate(parts) if n not in (i, j)]
        results = {"+": a + b, "-": a - b, "*": a * b, **({"/": a / b} if b else {})}
        for sign, value in results.items():
            if sign in "+*" and i > j:
                continue
            found = solve([*rest, (value, f"({left} {sign} {right})")], target, use_all)
            if found is not None:
                return found
    return None


def numbered(*numbers: int) -> list[tuple[Fraction, str]]:
    return [(Fraction(number), str(number)) for number in numbers]


@given(st.builds(Countdown, numbers=st.integers(2, 4), use_all=st.booleans()), seeds)
@settings(max_examples=40)
def test_what_is_drawn_can_be_made_and_the_search_finds_a_way_too(world: Countdown, seed: int) -> None:
    found = world.draw(random.Random(seed))
    assert world._judge(found, found.solution).solved
    path = solve(numbered(*found.numbers), found.target, world.use_all)
    assert path is not None and world._judge(found, path).solved


def test_the_search_knows_what_cannot_be_made() -> None:
    assert solve(numbered(1, 1, 1), 10) is None
    assert solve(numbered(2, 3), 3) is None and solve(numbered(2, 3), 3, use_all=False) == "3"


# --- SAT -------------------------------------------------------------------------------------------------------------


def test_difficulty_by_hand() -> None:
    # log2 5 + 2 log2 5 - 3 + 5/3 = 3 x 2.321928 - 1.333333; log2 15 = 3.906891: 2.321928 + 7.813781 - 1.333333
    assert difficulty(3, 5, 5) == pytest.approx(5.632451, abs=1e-6)
    assert difficulty(3, 5, 6) == pytest.approx(6.158520, abs=1e-6)
    assert difficulty(3, 5, 15) == pytest.approx(8.802376, abs=1e-6)
    assert Sat(n_test=2).tasks("test")[0].info == {"difficulty": 8.802}


@given(
    st.sampled_from(
        [Sat(), Sat(variables=8, clauses=30), Sat(literals=2, variables=4, clauses=8), Sat(literals=1, clauses=2)]
    ),
    seeds,
)  # fmt: skip
@settings(max_examples=40)
def test_formulas_can_be_satisfied_and_the_search_does_it(world: Sat, seed: int) -> None:
    formula = world.draw(random.Random(seed))
    assert len(set(formula)) == world.clauses
    assert all(len({abs(x) for x in clause}) == world.literals for clause in formula)
    values = sat.solve(formula, world.variables)
    assert values is not None and all(satisfied(clause, values) for clause in formula)


@given(st.lists(st.sets(st.sampled_from([-3, -2, -1, 1, 2, 3]), min_size=1, max_size=3), min_size=1, max_size=10))
def test_the_search_finds_a_way_if_and_only_if_there_is_one(formula: list[set[int]]) -> None:
    clauses = [tuple(sorted(clause)) for clause in formula]
    ways = [v for v in product((False, True), repeat=3) if all(satisfied(clause, v) for clause in clauses)]
    found = sat.solve(clauses, 3)
    assert tuple(found) in ways if found is not None else not ways


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("101", [True, False, True]), ("1 0 1", [True, False, True]), ("[1, 0, 1]", [True, False, True]),
        ("true, false, true", [True, False, True]), ("x1 = true, x2=0, x_3: yes", [True, False, True]),
        ("x3=1 x1=1 x2=0", [True, False, True]), ("", None), ("10", None), ("1011", None), ("x1=1", None),
        ("x1=1 x1=0 x2=1 x3=1", None), ("x1=1 x2=0 x3=1 x4=1", None), ("maybe", None), ("1" * 500, None),
    ],
)  # fmt: skip
def test_truth_values_are_read_tolerantly(text: str, values: list[bool] | None) -> None:
    assert read_values(text, 3) == values


def test_a_formula_that_no_seed_could_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="needs as many variables"):
        Sat(literals=4, variables=3)
    with pytest.raises(ValueError, match="35 is the most"):  # C(5, 3) x 7 / 2
        Sat(clauses=36)


# --- knights and knaves ----------------------------------------------------------------------------------------------

#: Ada says that Ben is a knave; Ben says that both are knaves. Were Ben a knight, he would be none: he lies, and Ada is
#: a knight, of whom Ben's "both are knaves" is false indeed.
TWO = (Statement("is", 1, 1, False), Statement("and", 0, 1, False))


def test_a_puzzle_by_hand() -> None:
    assert solutions(TWO) == [(True, False)]
    puzzle = Puzzle(("Ada", "Ben"), TWO)
    assert TWO[1].words(1, puzzle.names) == "Ada and I are both knaves."
    judged = knights._judge(puzzle, "Ada is a knave, Ben is a knave")
    assert judged.feedback == "That does not fit: a knave would have told the truth, Ada." and not judged.solved
    assert knights._judge(puzzle, "Ben: knave; Ada: knight").solved


@pytest.mark.parametrize(
    ("form", "truth"),  # of knights/knaves in the order 11, 10, 01, 00, said of knights
    [("is", "1100"), ("same", "1001"), ("and", "1000"), ("or", "1110"), ("if", "1011")],
)
def test_what_statements_mean(form: knights.Form, truth: str) -> None:
    statement = Statement(form, 0, 1, True)
    assert "".join("01"[statement.holds(kinds)] for kinds in product((True, False), repeat=2)) == truth


@given(st.builds(Knights, people=st.integers(2, 5), compound=st.booleans()), seeds)
@settings(max_examples=40)
def test_exactly_one_answer_is_accepted(world: Knights, seed: int) -> None:
    puzzle = world.draw(random.Random(seed))
    accepted = [
        kinds
        for kinds in product((True, False), repeat=world.people)
        if knights._judge(puzzle, knights.answer(puzzle.names, kinds)).solved
    ]
    assert len(accepted) == 1


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Ada is a knight, Ben is a knave", [True, False]), ("ben=knave ada=knight", [True, False]),
        ("**Ada** is the knight, _Ben_ a `knave`.", [True, False]),
        ("Ada: Knight\nBen: Knave", [True, False]), ("Ada is a knight", None), ("both are knaves", None),
        ("Ada is a knight, Ada is a knave", None), ("Ada knight, Ben knave, Cleo knave", None), ("", None),
    ],
)  # fmt: skip
def test_answers_are_read_tolerantly(text: str, kinds: list[bool] | None) -> None:
    assert read_answer(text, ("Ada", "Ben")) == kinds


def test_solved_tasks_end() -> None:
    world = Knights(n_test=1)
    [task] = world.tasks("test")
    [right] = world.plan(task, []) or ()
    result = asyncio.run(world.start(task).step(right))
    assert (result.reply, result.reward, result.terminated, result.success) == ("That fits.", 1.0, True, True)
    assert result.admissible_actions == ()
