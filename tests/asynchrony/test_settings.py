"""The recipe key `asynchrony`: what it refuses, and what `rlhf show` says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.errors import RecipeError
from rlhf.recipe import load
from tests.training import runs

STAGE: dict[str, Any] = {"kind": "policy_gradient", "steps": 10, "tasks_per_step": 8, "group_size": 4}


def recipe(folder: Path, asynchrony: dict[str, Any], stage: dict[str, Any] | None = None, **changes: Any) -> Path:
    return runs.write(folder, [{**STAGE, **(stage or {})}], asynchrony=asynchrony, **changes)


BYPASSED = {"loss": {"kind": "reinforce"}, "correction": {"kind": "bypass"}}
REMEMBERS = {"rewards": {"new": {"kind": "episodic_memory"}, "words": {"kind": "environment"}}}


@pytest.mark.parametrize(
    ("asynchrony", "stage", "changes", "where"),
    [
        pytest.param({"staleness": -1}, {}, {}, "asynchrony.staleness", id="a negative bound"),
        pytest.param(
            {"staleness": 1, "max_steps_ahead": 2}, {}, {}, "asynchrony.max_steps_ahead", id="a depth above the bound"
        ),
        pytest.param({"staleness": 1, "max_steps_ahead": 0}, {}, {}, "asynchrony.max_steps_ahead", id="no depth"),
        pytest.param({"max_steps_ahead": 1}, {}, {}, "asynchrony.max_steps_ahead", id="a depth without a bound"),
        pytest.param({"stalenes": 1}, {}, {}, "asynchrony.stalenes", id="a misspelt key"),
        pytest.param({"staleness": 1, "order": "in_ordre"}, {}, {}, "asynchrony.order", id="another order"),
        pytest.param(
            {"staleness": 1, "order": "first_finished", "weight_update": "deterministic"},
            {},
            {},
            "asynchrony.order",
            id="two orders",
        ),
        pytest.param({"staleness": 2}, BYPASSED, {}, "stages[0].correction", id="no correction above 1"),
        pytest.param({"staleness": 1}, {"sampler": {"kind": "curriculum"}}, {}, "stages[0].sampler", id="a curriculum"),
        pytest.param({"staleness": 1}, {"selection": {"kind": "dynamic"}}, {}, "stages[0].selection", id="rounds"),
        pytest.param({"staleness": 1}, {"replay": {}}, {}, "stages[0].replay", id="replay"),
        pytest.param(
            {"staleness": 1}, {"advantage": {"kind": "gae"}, "critic": {}}, {}, "stages[0].critic", id="a critic"
        ),
        pytest.param({"staleness": 1}, {}, REMEMBERS, "rewards.new", id="a reward that remembers"),
        pytest.param({"staleness": 1}, REMEMBERS, {}, "stages[0].rewards.new", id="a stage's reward that remembers"),
    ],
)
def test_what_cannot_work_is_refused_in_four_parts(
    tmp_path: Path, asynchrony: dict[str, Any], stage: dict[str, Any], changes: dict[str, Any], where: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(recipe(tmp_path, asynchrony, stage, **changes))
    error = caught.value
    assert error.where == where and error.got and error.expected and error.hint


def test_what_is_refused_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="so weight_update cannot be deterministic"):
        load(recipe(tmp_path, {"staleness": 1, "order": "first_finished", "weight_update": "deterministic"}))


def test_a_loss_without_correction_is_told_the_line_to_add(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"write stages\[0\].correction: \{kind: truncated\}"):
        load(recipe(tmp_path, {"staleness": 2}, BYPASSED))
    load(recipe(tmp_path, {"staleness": 1}, BYPASSED))
    load(recipe(tmp_path, {"staleness": 2}, {"loss": {"kind": "reinforce"}, "correction": {"kind": "truncated"}}))
    load(recipe(tmp_path, {"staleness": 2}, {"correction": {"kind": "bypass"}}))  # the loss has a ratio


def test_show_says_what_follows(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"staleness": 3, "max_steps_ahead": 2, "weight_update": "deterministic"})
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "at most 2 updates old" in text and "at most 24 groups" in text and "truncated" in text
    found = json.loads(CliRunner().invoke(app, ["show", str(path), "--json"]).stdout)
    assert found["arithmetic"]["stages"][0]["asynchrony"]["max_age"] == 2


def test_show_says_nothing_of_it_where_attempts_and_updates_take_turns(tmp_path: Path) -> None:
    path = recipe(tmp_path, {})
    found = json.loads(CliRunner().invoke(app, ["show", str(path), "--json"]).stdout)
    assert "asynchrony" not in found["arithmetic"]["stages"][0]
