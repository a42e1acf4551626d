"""Rewards that remember, in whole runs: what they learn from, and that a resumed run goes on as it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from tests import test_resume as resume
from tests.training import runs, words

MEMORY = {"kind": "episodic_memory", "warmup_steps": 1, "window": 10, "per_query": 4, "capacity": 12, "dim": 16}
WITHIN = {"kind": "combine", "parts": {"new": {"reward": MEMORY}, "short": {"reward": resume.SHORT}}}


def recipe(folder: Path, **changes: Any) -> Path:
    rewards = {**runs.BASE["rewards"], "total": WITHIN, "told": {**MEMORY, "success_reward": "words", "nearest": 2}}
    rewards |= {"found": {"kind": "found_subgoals", "min_solved": 1, "min_difference": 0.05}}
    return resume.recipe(folder, "grpo", None, **{"rewards": rewards, **changes})


def test_a_run_that_was_stopped_remembers_what_one_that_ran_on_does(tmp_path: Path) -> None:
    again = resume.POLICY_GRADIENT | {"steps": 2}
    path = recipe(tmp_path, stages=[resume.SUPERVISED, resume.POLICY_GRADIENT, again])
    with words.on_every_step(path, counter := resume.PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    draw = random.Random(0)
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(5)]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")

    whole = tmp_path / "whole"
    held = [runs.curve(whole, f"episodic_{kind}/told") for kind in ("successes", "failures")]
    # 12 attempts a step, and no more than 12 of each kind; each stage begins with an empty memory, and forgets nothing
    # else while there is room: evaluations would show as more attempts than were made.
    assert all(sum(first) <= 12 for first in ([kind[0] for kind in held], [kind[5] for kind in held]))
    assert all(x <= 12 for kind in held for x in kind) and max(held[1]) > 0
    assert runs.curve(whole, "episodic_explore/total.parts.new.reward")
    trained = [r.score.parts["told"].value for r in read_trajectories(whole / "trajectories", phase="train") if r.score]
    measured = [r.score.parts["told"].value for r in read_trajectories(whole / "trajectories", phase="eval") if r.score]
    assert max(trained) > 0 and set(measured) == {0.0}
    assert len(runs.curve(whole, "found_subgoals/found")) == len(held[0])


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        (
            {"rewards": {"words": {"kind": "environment"}, "new": {**MEMORY, "success_reward": "word"}}},
            "rewards.new.success_reward",
            "words",
        ),
        (
            {"rewards": {"words": {"kind": "environment"}, "new": {**MEMORY, "success_reward": "new"}}},
            "rewards.new.success_reward",
            "another",
        ),
        ({"stages": [resume.SUPERVISED]}, "rewards.total.parts.new.reward", "policy_gradient"),
        (
            {"rewards": {"words": {"kind": "environment"}, "new": {**MEMORY, "explore": 0.0, "warmup_steps": 5}}},
            "rewards.new.warmup_steps",
            "5 steps",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, changes: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(recipe(tmp_path, **changes))
    assert refused.value.where == where and says in str(refused.value)
