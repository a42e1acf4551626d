"""Blocks between backticks: which text is the program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.answers.extract import fenced
from rewards.code.sandboxed_reward import program_of


@pytest.mark.parametrize(
    ("answer", "blocks"),
    [
        ("```\na\n```", [("", "a\n")]),
        ("x\n ``` Python \na\n\nb\n ```\ny", [("Python", "a\n\nb\n")]),
        ("```py\na\n```\n```js\nb\n```", [("py", "a\n"), ("js", "b\n")]),
        ("```py\na\n```py\nb\n```", [("py", "b\n")]),
        ("```py\na", []),
        ("```\n```", [("", "")]),
        ("```a``` is no fence\n```\nb\n```", [("", "b\n")]),
        ("", []),
    ],
)
def test_blocks_are_found(answer: str, blocks: list[tuple[str, str]]) -> None:
    assert list(fenced(answer)) == blocks


@given(st.lists(st.text(alphabet=st.characters(blacklist_characters="`\n"), max_size=9), max_size=4), st.text())
def test_what_stands_between_is_what_comes_out(lines: list[str], before: str) -> None:
    text = "".join(line + "\n" for line in lines)
    assert list(fenced(f"```python\n{text}```")) == [("python", text)]
    list(fenced(before))  # any text can be read


def test_the_last_block_is_the_program() -> None:
    assert program_of("```\na\n```\nno:\n```py\nb\nc\n```\nend") == "b\nc\n"
    assert program_of("```python\nx = '''\n```\n") == "x = '''\n"
    assert program_of("```Python\na\n```\n```js\nb\n```") == "a\n"
    assert program_of("```python\na\n```\nOutput:\n```\n3\n```") == "a\n"
    assert program_of("```\na\n```\nor\n```\nb\n```") == "b\n"
    assert program_of("1. It is:\n   ```python\n   if a:\n     b\n\n  c\n   ```") == "if a:\n  b\n\nc\n"
    assert program_of("```js\na\n```") is None and program_of("```python\n \n```") is None


@pytest.mark.parametrize(
    ("answer", "blocks"),
    [
        ("````python\nx = 1\n````", [("python", "x = 1\n")]),
        ("`````\na\n``````", [("", "a\n")]),
        ("````md\n```python\nx\n```\n````", [("md", "```python\nx\n```\n")]),  # fewer are text of the block
        ("```python\nx\n````", [("python", "x\n")]),  # more close it, too
        ("````python\nx\n```", []),
        ("``\nx\n``", []),
    ],
)
def test_a_block_may_have_more_backticks(answer: str, blocks: list[tuple[str, str]]) -> None:
    assert list(fenced(answer)) == blocks
