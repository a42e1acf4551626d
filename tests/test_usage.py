"""Command lines that cannot be read are told of in the four parts of every other error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.commands import run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian quickstart", ["error rlhf: no such command", "got:      trian", "do:       did you mean 'train'?"]),
        ("--foo", ["error rlhf: no such option", "got:      --foo", "expected: --debug, --help", "rlhf --help lists"]),
        ("--foo train quickstart", ["error rlhf: no such option", "got:      --foo"]),
        ("--deubg recipes", ["got:      --deubg", "do:       did you mean '--debug'?"]),
        ("--recipes", ["got:      --recipes", "do:       it is a command, without dashes: rlhf recipes"]),
        ("--resume runs/a train", ["do:       it comes after the command that takes it: rlhf train ... --resume"]),
        ("--debug", ["error rlhf: missing command", "rlhf --help lists its options"]),
        ("train quickstart --ou x", ["error rlhf train: no such option", "got:      --ou", "did you mean '--out'?"]),
        ("train quickstart --no-memory", ["expected: --help, --json, ", "did you mean '--no-memory-check'?"]),
        ("show quickstart --max_turns 6", ["got:      --max_turns", "KEY=VALUE, without dashes: max_turns=..."]),
        ("train quickstart --steps 3", ["got:      --steps", "KEY=VALUE, without dashes: steps=..."]),
        ("train quickstart --hlep", ["got:      --hlep", "do:       did you mean '--help'?"]),
        ("export checkpoint", ["error rlhf export: missing option '--out'", "expected: rlhf export [OPTIONS]"]),
        ("show", ["error rlhf show: missing argument 'recipe'", "do:       rlhf show --help"]),
        (
            "trajectories run --step two",
            [
                "error rlhf trajectories: invalid value for '--step'\n",
                "got:      two\n",
                "expected: a whole number, at least 0\n",
                "do:       change the value; rlhf trajectories --help",
            ],
        ),
        (
            "evaluate quickstart --n abc",
            [
                "invalid value for '--n' / '-n' / '--limit'\n",
                "got:      abc\n",
                "expected: a whole number, at least 1\n",
            ],
        ),
        ("evaluate quickstart --n 0", ["got:      0\n", "expected: a whole number, at least 1\n"]),
        ("evaluate quickstart --price-in -1", ["got:      -1\n", "expected: a number, at least 0\n"]),
        ("compare a b --difference x", ["got:      x\n", "expected: a number, at least 0.0001\n"]),
        (
            "train quickstart --profile",
            ["rlhf train: option '--profile' requires an argument", "expected: --profile N"],
        ),
        (
            "view --port",
            ["rlhf view: option '--port' requires an argument", "expected: --port VALUE", "rlhf view --help"],
        ),
        ("train quickstart --json=5", ["option '--json' does not take a value", "expected: --json\n"]),
        ("--debug=3 train", ["error rlhf: option '--debug' does not take a value"]),
        ("version now", ["error rlhf version: got unexpected extra argument", "(now)", "rlhf version --help"]),
    ],
)
def test_it_says_where_what_was_given_and_what_to_do(words: str, said: list[str]) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(part in result.stderr for part in said), result.stderr


@pytest.mark.parametrize(("wrong", "meant", "one"), [("trian", "train", "train"), ("--deubg", "--debug", "--help")])
def test_it_is_one_line_of_json_where_that_is_asked_for(wrong: str, meant: str, one: str) -> None:
    result = run(wrong, "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2
    assert (error["type"], error["where"], error["got"]) == ("UsageError", "rlhf", wrong)
    assert error["do"] == f"did you mean '{meant}'?" and one in error["expected"].split(", ")


def test_the_command_alone_still_prints_its_help() -> None:
    assert "Usage: rlhf" in run().stdout and "Usage: rlhf" in run("--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show quickstrat", "did you mean 'quickstart'?"),
        ("show quickstart seeed=1", "did you mean 'seed'?"),
        ("check recipe quickstrat", "did you mean 'quickstart'?"),
        ("train quickstrat", "did you mean 'quickstart'?"),
        ("evaluate quickstrat", "did you mean 'quickstart'?"),
    ],
)
def test_what_is_misspelt_is_told_before_torch_is_loaded(words: str, said: str) -> None:
    code = f"""
import sys
from rlhf.cli import main
sys.argv = ["rlhf", *{words.split()!r}]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and done.stdout.strip() == "False", done.stderr


def test_of_words_that_no_recipe_has_together_it_is_said_how_many_have_each() -> None:
    n_each = [run("recipes", word, "--json").stdout.count('"path"') for word in ("webshop", "nethack")]
    n_all = run("recipes", "--json").stdout.count('"path"')
    told = run("recipes", "webshop", "nethack").stderr
    assert all(n_each)
    assert f"got:      webshop: {n_each[0]} of {n_all}, nethack: {n_each[1]} of {n_all}" in told
    assert "words that all occur in one of them" in told


def test_words_of_other_lists_are_told_of_and_none_that_is_far() -> None:
    told = run("recipes", "math").stderr
    assert "no match among the recipes" in told
    assert "do:       `rlhf recipes --kinds math` finds 1 of the kinds: reward math" in told
    assert "`rlhf recipes webshop` finds" in run("recipes", "--suites", "webshop").stderr
    for word in ("zzzz", "gsm9k"):
        told = run("recipes", word).stderr
        assert "did you mean" not in told and "do:       `rlhf recipes` lists all" in told


def test_a_reader_that_has_gone_ends_a_command_without_a_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rlhf.cli", "environments"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()  # as `head` does once it has its lines
        assert command.stderr.read() == "" and command.wait() == 0
