"""A run says what stood between the machine and the programs of its policy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from rewards.code.sandboxed_reward import sandbox_record
from rewards.code.unit_tests import UnitTests
from rewards.sandbox.probe import probe_isolation
from rewards.verified import Verified
from rlhf.build.record import programs_record, write_record
from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.rollout.scoring import WeightedReward

RECIPE = """
policy: {kind: from_scratch}
environment: {kind: keyhole}
rewards: {tests: {kind: unit_tests, score: share, wall_s: 2.0}, cost: {kind: turn_cost}}
stages: [{kind: policy_gradient, advantage: {kind: grpo}}]
"""


def test_the_record_of_a_run_has_the_level(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load(str(tmp_path / "r.yaml"))
    reward = recipe.rewards["tests"].reward
    assert isinstance(reward, UnitTests) and (reward.score, reward.bounds.wall_s) == ("share", 2.0)
    write_record(tmp_path, recipe)
    assert json.loads((tmp_path / "versions.json").read_text())["sandbox"] == probe_isolation().record()
    without = load(str(tmp_path / "r.yaml"), ["rewards={cost: {kind: turn_cost}}"])
    write_record(tmp_path, without)
    assert "sandbox" not in json.loads((tmp_path / "versions.json").read_text())


def test_a_level_that_is_none_is_refused_with_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=r"rewards\.tests\.min_level"):
        load(str(tmp_path / "r.yaml"), ["rewards.tests.min_level=chroot"])


def test_a_verifier_that_runs_programs_counts_too() -> None:
    class Runs(UnitTests):
        pass

    held = WeightedReward("t", 1.0, Verified(Runs()))  # type: ignore[arg-type]
    assert programs_record({"t": held})["sandbox"]["level"] == str(probe_isolation().isolation.level)


def test_a_reward_within_another_counts_too() -> None:
    @dataclass(frozen=True)
    class Part:
        reward: object
        weight: float = 1.0

    @dataclass(frozen=True)
    class Sum:
        parts: dict[str, Part]
        more: tuple[Part, ...] = ()

    inner = {"tests": Part(UnitTests())}
    assert sandbox_record({"all": Sum(inner)}) == probe_isolation().record()
    assert sandbox_record({"all": Sum({}, (inner["tests"],))}) == probe_isolation().record()
    assert sandbox_record({"all": Sum({"none": Part("text")})}) is None
