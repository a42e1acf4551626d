"""The page of coverage says what is: rows, counts, files, kinds, recipes and tests."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from rlhf.catalog import CATALOG

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "coverage.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| \d+ \|.*\|$", TEXT, re.M)]
STATES = ("complete", "part", "missing")
FILE = re.compile(r"`([\w-]+/[\w/.-]+\.\w+)(?:::(\w+))?`")
#: Figures, or a page that has them.
FIGURES = re.compile(r"`docs/|\d+ of \d+|\d%")
KIND = re.compile(rf"\b({'|'.join(CATALOG)})s? ((?:`\w+`(?:, )?)+)")


def test_every_system_has_one_row_of_seven_cells() -> None:
    assert [row[0] for row in ROWS] == [str(n) for n in range(1, 123)]
    assert all(len(row) == 7 and row[1] and row[6] in STATES for row in ROWS)


def test_the_count_is_that_of_the_rows() -> None:
    n = Counter(row[6] for row in ROWS)
    measured = sum(row[6] == "complete" and bool(FIGURES.search(row[5])) for row in ROWS)
    said = f"\nComplete: {n['complete']}, part: {n['part']}, missing: {n['missing']}.\n"
    assert f"{said}Of the complete, {measured} were measured here" in TEXT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_exists(row: list[str]) -> None:
    _, _, here, recipe, tests, said, state = row
    for path, name in FILE.findall(" ".join(row)):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text("utf-8"), name
    for section, kinds in KIND.findall(here):
        for kind in re.findall(r"`(\w+)`", kinds):
            assert kind in CATALOG[section], f"{section} {kind}"
    assert all(path.startswith("tests/") for path, _ in FILE.findall(tests))
    if state == "complete":
        assert here and FILE.search(recipe) and FILE.search(tests)
    assert said or state == "missing"
