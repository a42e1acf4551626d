"""A few lines of YAML stay few: aliases of aliases and references to references are bounded before they grow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhf.errors import RecipeError
from rlhf.recipe.size_limits import MOST_VALUES
from rlhf.recipe.text import parse, read

LISTS = "\n".join([f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(10)])
MAPPINGS = "a0: &a0 {k: x}\n" + "\n".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 10)
)
MERGES = "a0: &a0 {k: x}\n" + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 10))
LONG = f"a0: &a0 {'x' * 100_000}\nall: [{', '.join(['*a0'] * 1000)}]"
REFERENCES = "a0: x\n" + "\n".join(f"a{i}: '{f'${{a{i - 1}}}' * 9}'" for i in range(1, 10))
BESIDE = "part:\n  a0: x\n" + "\n".join(f"  a{i}: '{f'${{.a{i - 1}}}' * 9}'" for i in range(1, 10))
SUBTREES = "a0: [x]\n" + "\n".join(f"a{i}: [" + ", ".join([f"'${{a{i - 1}}}'"] * 9) + "]" for i in range(1, 10))


@pytest.mark.parametrize(
    "text", [LISTS, MAPPINGS, MERGES, LONG, REFERENCES, BESIDE, SUBTREES, "a: " + "[" * 200 + "]" * 200]
)
def test_what_would_grow_is_refused_at_once(tmp_path: Path, text: str) -> None:
    path, begun = tmp_path / "recipe.yaml", time.perf_counter()
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read(path, [])
    assert error.value.what == "the recipe is too large" and error.value.hint
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize("text", ["a: " + "[" * 20_000, "&a [*a]", "a: &a {b: *a}"])
def test_depth_and_circles_are_told_of(text: str) -> None:
    with pytest.raises(RecipeError):
        parse(text, "here")


def test_the_most_that_is_allowed_is_read_within_seconds(tmp_path: Path) -> None:
    path, begun = tmp_path / "recipe.yaml", time.perf_counter()
    path.write_text("all: [" + ", ".join(["1"] * (MOST_VALUES - 3)) + "]")
    assert len(read(path, [])["all"]) == MOST_VALUES - 3
    assert time.perf_counter() - begun < 120


def test_aliases_and_references_that_stay_small_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: &base {x: 1, y: [2]}\nmore: {<<: *base, z: '${seed} and ${.x}'}\nseed: 7\nagain: *base\n")
    found = read(path, [])
    assert found["more"] == {"x": 1, "y": [2], "z": "7 and 1"} and found["again"] == {"x": 1, "y": [2]}
