"""Stages with an environment, rewards and limits of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import CheckpointError, RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import dump, load
from rlhf.recipe.played import environment_of, is_judged_by_rewards
from tests.training import runs

SHOWN = {
    "kind": "supervised", "n_demonstrations": 96, "random_share": 0.2, "epochs": 8, "batch_size": 8,
    "optimizer": {"lr": 3.0e-3},
}  # fmt: skip
GRADIENT: dict[str, Any] = {
    "kind": "policy_gradient", "steps": 3, "tasks_per_step": 4, "group_size": 4, "checkpoint_every": 1,
    "optimizer": {"lr": 5.0e-4},
}  # fmt: skip
ROWS = [f"Say {word}." for word in ("red", "green", "blue", "white")]


def in_data(folder: Path, **changes: Any) -> dict[str, Any]:
    """A stage on questions of a file, scored by a verifier of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": text, "answer": text[4:-1], "n": n} for text in ROWS for n in range(8)]
    (folder / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own: dict[str, Any] = {
        "environment": {"kind": "dataset", "path": str(folder / "said.jsonl")},
        "rewards": {"said": {"kind": "exact_match"}},
        "limits": {"max_tokens": 5},
    }
    return {**GRADIENT, **own, **changes}


def n_understood(record: Any) -> int:
    return sum(turn.action.error is None for turn in record.trajectory.turns)


def test_two_stages_are_trained_on_two_worlds_and_go_on_in_the_second_to_the_bit(tmp_path: Path) -> None:
    shorter = {**GRADIENT, "environment": {"kind": "./words.py:Words", "n_turns": 1}}
    path = runs.write(tmp_path, [SHOWN, in_data(tmp_path), shorter], evaluation={"n_tasks": 16})
    whole = runs.run(path, tmp_path / "whole")
    records = list(read_trajectories(tmp_path / "whole" / "trajectories"))
    of = {stage: [r for r in records if r.stage == stage] for stage in {r.stage for r in records}}
    assert max(n_understood(r) for r in of["2-policy_gradient"]) == 1
    assert {r.score.parts.keys() == {"words"} for r in of["2-policy_gradient"] if r.score} == {True}
    assert {len(r.trajectory.turns) for r in of["1-policy_gradient"]} == {1}  # which the dataset suggests
    assert {r.score.parts.keys() == {"said"} for r in of["1-policy_gradient"] if r.score} == {True}
    assert max(len(g.token_ids) for r in of["1-policy_gradient"] for g in r.trajectory.generations) <= 5
    for name in ("before", "after"):  # in the recipe's environment
        assert {r.task_id.split("/")[0] for r in of[name]} == {"words"}
        assert max(n_understood(r) for r in of[name]) == 2
    runs.stop(path, tmp_path / "stopped", "2-policy_gradient-000001")
    again = runs.run(path, tmp_path / "stopped", resume=True)
    assert runs.weights(runs.newest(again.folder)) == runs.weights(runs.newest(whole.folder))
    assert runs.lines(again.folder) == runs.lines(whole.folder)


def test_a_recipe_that_was_written_down_has_the_same_worlds(tmp_path: Path) -> None:
    rewards = {"said": {"kind": "exact_match"}, "words": 0.5}
    recipe = load(runs.write(tmp_path, [SHOWN, in_data(tmp_path, rewards=rewards)]))
    (tmp_path / "again.yaml").write_text(dump(recipe))
    again = load(tmp_path / "again.yaml")
    assert again == recipe
    seen = again.at(again.stages[1])
    assert (seen.limits.max_turns, seen.limits.max_tokens, seen.limits.max_concurrent) == (1, 5, 64)
    assert {name: (w.weight, w.success_threshold) for name, w in seen.rewards.items()} == {
        "words": (0.5, None), "said": (1.0, 1.0),
    }  # fmt: skip
    assert again.at(again.stages[0]) is again


def test_attempts_are_replayed_in_the_world_of_their_stage(tmp_path: Path) -> None:
    recipe = load(runs.write(tmp_path, [SHOWN, in_data(tmp_path)]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(dump(recipe))
    assert environment_of(tmp_path / "run", "1-policy_gradient") == recipe.stages[1].environment
    assert environment_of(tmp_path / "run", "after") == recipe.environment
    assert is_judged_by_rewards(tmp_path / "run", "1-policy_gradient")
    assert not is_judged_by_rewards(tmp_path / "run", "after")


def test_a_run_does_not_go_on_with_other_data_of_a_stage(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [{**GRADIENT, "steps": 1}, in_data(tmp_path, steps=1)], evaluation={"n_tasks": 4})
    runs.stop(path, tmp_path / "run", "0-policy_gradient-000000")
    in_data(tmp_path)
    (tmp_path / "said.jsonl").write_text((tmp_path / "said.jsonl").read_text().replace("red", "rot"))
    with pytest.raises(CheckpointError, match=r"stages\[1\]\.environment\.data"):
        runs.run(path, tmp_path / "run", resume=True)


@pytest.mark.parametrize(("changes", "where", "told"), [
    ({"rewards": {"words": {"kind": "exact_match"}}}, "stages[0].rewards.words", "has this name"),
    ({"rewards": {"said": {"kind": "exact_mach"}}}, "stages[0].rewards.said.kind", "'exact_match'?"),
    ({"rewards": {"wrds": 1.0, "said": {"kind": "exact_match"}}}, "stages[0].rewards.wrds", "'words'?"),
    ({"rewards": {"a": {"kind": "turn_cost"}, "b": {"kind": "invalid_action"}}}, "stages[0].rewards", "solved"),
    ({"limits": {"max_context": 100, "max_tokens": 5}}, "stages[0].limits.max_context", "all stages share one engine"),
    ({"limits": {"max_turn": 2}}, "stages[0].limits.max_turn", "did you mean 'max_turns'?"),
    ({"limits": {"max_tokens": 128}}, "stages[0].limits.max_tokens", "fill the context"),
    ({"split": "tain"}, "stages[0].split", "did you mean 'train'?"),
    ({"environment": {"kind": "datset"}}, "stages[0].environment.kind", "did you mean 'dataset'?"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_the_stage(changes: Any, where: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(runs.write(tmp_path, [in_data(tmp_path, **changes)]))
    assert told in str(caught.value) and caught.value.where.startswith(where)


@pytest.mark.parametrize("what", ["a world of its own", "weights of its own"])
def test_rollout_workers_on_ray_refuse_a_stage_with_settings_of_its_own(tmp_path: Path, what: str) -> None:
    weighed = {"kind": "policy_gradient", "rewards": dict.fromkeys(runs.BASE["rewards"], 0.5)}
    stage = in_data(tmp_path) if what == "a world of its own" else weighed
    engine = {"kind": "vllm", "servers": ["http://127.0.0.1:1"]}
    cluster, ahead = {"learners": 1, "rollout_workers": 1}, {"staleness": 1}
    with pytest.raises(
        RecipeError, match=r"stages\[0\]: rollout workers on Ray use the settings of the recipe in every stage"
    ):
        load(runs.write(tmp_path, [stage], engine=engine, cluster=cluster, asynchrony=ahead))
