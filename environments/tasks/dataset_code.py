"""Programming tasks of data sets: unit tests of a row, and a program that passes them, as the reference of a task."""

from __future__ import annotations

import json
from typing import Any

from rewards.code.unit_tests import refuse_unusable, without_nulls
from rlhf.errors import EnvError, RewardError

#: Columns that are taken for a program that passes the tests, where the recipe names none.
SOLUTIONS = ("canonical_solution", "solution", "code")


def tests_as_reference(
    tests: Any,
    where: str,
    *,
    entry_point: Any = None,
    setup: Any = None,
    preamble: Any = None,
    solution: Any = None,
) -> str:
    """Reference of a task for the reward `unit_tests`: the tests of a row, with all that they need, as JSON.

    Args:
        tests: a Python text, a list of assertions, or the JSON that `unit_tests` reads, as an object or a text.
        where: file and line, for errors.
        entry_point: name of the function that the tests' `check` is given.
        setup: text, or lines, before the tests.
        preamble: text before the program.
        solution: program that passes.

    Raises:
        EnvError: the tests are none, or cannot be run.
    """
    made = _object(tests) or {"tests": _text(tests, where, "tests")}
    if setup and "tests" not in made:
        raise EnvError(
            "test_setup needs tests that are Python source",
            where=f"{where}, column of environment.test_setup",
            got=f"{str(setup)[:80]!r} beside {', '.join(made)}",
            expected="no test_setup in this row, or its tests as `tests`",
            hint="take environment.test_setup out of the recipe, or empty the cell",
        )
    if setup:
        made["tests"] = f"{_text(setup, where, 'test_setup')}\n{made['tests']}"
    for key, value in (("entry_point", entry_point), ("preamble", preamble), ("solution", solution)):
        if value:
            made[key] = _text(value, where, key)
    reference = json.dumps(made, ensure_ascii=False)
    try:
        refuse_unusable(reference, where)
    except RewardError as error:
        raise EnvError(
            f"the unit tests of a row cannot be used: {error.what}",
            where=error.where,
            got=error.got,
            expected=error.expected,
            hint="fix them, or take the row out; environment.entry_point names the column of the tested function",
        ) from error
    return reference


def _object(tests: Any) -> dict[str, Any] | None:
    """Tests in the form that `unit_tests` reads; None where they are in another."""
    if isinstance(tests, str) and tests.lstrip().startswith("{"):
        try:
            tests = json.loads(tests)
        except ValueError:
            return None
    return without_nulls(tests) if isinstance(tests, dict) else None


def _text(value: Any, where: str, key: str) -> str:
    text = "\n".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value
    if not isinstance(text, str) or (key == "tests" and not text.strip()):
        raise EnvError(
            "no text of a program",
            where=f"{where}, column of environment.{key}",
            got=str(value)[:80] or "an empty text",
            expected="Python, as one text or a list of lines",
            hint=f"see environment.{key}, or take the row out",
        )
    return text
