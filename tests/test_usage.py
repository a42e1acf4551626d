"""Command lines that cannot be read are told of in the four parts of every other error."""

from __future__ import annotations

import json

import pytest

from tests.commands import run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian quickstart", ["error rlhf: no such command", "got:      trian", "do:       did you mean 'train'?"]),
        ("train quickstart --ou x", ["error rlhf train: no such option", "got:      --ou", "did you mean '--out'?"]),
        ("train quickstart --no-memory", ["expected: --json, ", "did you mean '--no-memory-check'?"]),
        ("show quickstart --max_turns 6", ["got:      --max_turns", "KEY=VALUE, without dashes: max_turns=..."]),
        ("export checkpoint", ["error rlhf export: missing option '--out'", "expected: rlhf export [OPTIONS]"]),
        ("show", ["error rlhf show: missing argument 'recipe'", "do:       rlhf show --help"]),
        ("trajectories run --step two", ["error rlhf trajectories: invalid value for '--step'", "valid integer"]),
        ("version now", ["error rlhf version: got unexpected extra argument", "(now)", "rlhf version --help"]),
    ],
)
def test_it_says_where_what_was_given_and_what_to_do(words: str, said: list[str]) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(part in result.stderr for part in said), result.stderr


def test_it_is_one_line_of_json_where_that_is_asked_for() -> None:
    result = run("trian", "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2
    assert (error["type"], error["where"], error["got"]) == ("UsageError", "rlhf", "trian")
    assert error["do"] == "did you mean 'train'?" and "train" in error["expected"].split(", ")
