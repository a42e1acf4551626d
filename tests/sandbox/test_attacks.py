"""Each attack, tried at every level that this machine reaches: what is to be stopped is stopped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rewards.sandbox.level import Level
from rewards.sandbox.probe import probe_isolation
from tests.sandbox.attacks import ATTACKS, Scene, attempt, system_python

ROOT = Path(__file__).resolve().parent.parent.parent
IS_ROOT = os.geteuid() == 0
NOBODY = 65534


def is_stopped(attack: Callable[[Scene], bool], level: Level, *, is_root: bool) -> bool:
    return level >= Level[ATTACKS[attack][is_root].upper()]


@pytest.mark.parametrize("level", Level, ids=str)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_stopped_from_its_level_on(attack: Callable[[Scene], bool], level: Level) -> None:
    isolation = probe_isolation().at(level)
    if isolation is None:
        pytest.skip(f"{level} is out of reach here: {probe_isolation().why_not[level]}")
    if not is_stopped(attack, level, is_root=IS_ROOT):
        pytest.skip(f"{level} does not stop it, as docs/sandbox.md says")
    assert attempt(attack, isolation)


@pytest.fixture(scope="module", autouse=True)
def as_nobody() -> Iterator[subprocess.Popen[str] | None]:
    """The same attacks by an ordinary user, beside the tests of this module."""
    python = system_python()
    if not IS_ROOT or python is None:
        yield None
        return
    with subprocess.Popen(
        [python, "-S", "-m", "tests.sandbox.attacks", "rlimits", "namespaces"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    ) as process:
        yield process


def test_an_ordinary_user_is_protected_as_promised(as_nobody: subprocess.Popen[str] | None) -> None:
    if as_nobody is None:
        pytest.skip("to be another user takes root, a Python of the system, and a folder that others may read")
    found = json.loads(as_nobody.communicate(timeout=120)[0])
    promised = {
        str(level): {a.__name__: is_stopped(a, level, is_root=False) for a in ATTACKS}
        for level in Level
        if str(level) in found["stopped"]
    }
    assert "rlimits" in promised
    missed = {
        level: [name for name, is_promised in row.items() if is_promised and not found["stopped"][level][name]]
        for level, row in promised.items()
    }
    assert not any(missed.values()), missed


def test_the_page_says_what_is_stopped_where() -> None:
    text = (ROOT / "docs" / "sandbox.md").read_text("utf-8")
    rows = re.findall(r"^\| ([a-z][^|]*?) \| `(\w+)` \| `(\w+)` \|$", text, re.MULTILINE)
    named = {name.replace(" ", "_"): (user, root) for names, user, root in rows for name in names.split(", ")}
    assert named == {attack.__name__: levels for attack, levels in ATTACKS.items()}


def test_python_of_the_tests_is_not_needed_inside() -> None:
    assert all(
        isolation.python != sys.executable or sys.prefix == sys.base_prefix
        for isolation in probe_isolation().isolations
    )
