"""`docs/properties.md`: every row names tests that exist."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.test_promises import REFERENCE, ROOT, names_in

PAGE = ROOT / "docs" / "properties.md"
ROWS = range(1, 12)


@cache
def page_rows() -> dict[int, list[str]]:
    """The cells of each numbered row, without its number."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\|\s*\d+\s*\|", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {int(number): rest for number, *rest in cells}


def test_every_row_is_there() -> None:
    assert sorted(page_rows()) == list(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_a_row_says_what_holds_and_names_tests_that_exist(number: int) -> None:
    name, holds, proven = page_rows()[number]
    assert name and len(holds) > 20
    named = REFERENCE.findall(proven)
    assert named and len(set(named)) == len(named), proven
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert test in names_in(path), f"{path} has no {test}"
    # Nothing but references stands in the cell: a name with a slip in it would otherwise be read as prose.
    assert REFERENCE.sub("", proven).replace("<br>", "").strip() == ""
