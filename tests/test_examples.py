"""Examples in docstrings say what the code does."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path
    for package in ("rlhf", "agents", "environments", "rewards")
    for path in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"^ +>>> ", path.read_text("utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_examples_in_docstrings_are_right(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
