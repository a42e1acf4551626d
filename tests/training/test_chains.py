"""Chains of stages in one recipe: a reward model that a later stage learns against, and weights of a stage's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import rlhf
from rewards.models.reward_model import RewardModelScore
from rlhf.build.train import train
from rlhf.commands.check_availability import refuse_absent_models
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.training.reward_model_training import split_by_task
from rlhf.training.run import Run
from rlhf.training.stages import pair_files
from rlhf.training.stages.pairs import Pair, Side
from rlhf.training.stages.trl_trainers import load_trl
from tests.training import runs

try:
    load_trl()
except MissingPackageError:
    pytest.skip("needs the extra trl", allow_module_level=True)

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "largest"
START = {
    "kind": "supervised", "n_demonstrations": 64, "random_share": 0.3, "epochs": 6, "batch_size": 8,
    "optimizer": {"lr": 3.0e-3},
}  # fmt: skip
MODEL: dict[str, Any] = {
    "kind": "reward_model", "pairs": {"tasks": 24, "group_size": 8}, "epochs": 2, "batch_size": 16,
    "rewards": {"right": 1.0}, "optimizer": {"lr": 2.0e-3},
}  # fmt: skip
GRADIENT: dict[str, Any] = {
    "kind": "policy_gradient", "steps": 3, "tasks_per_step": 4, "group_size": 4, "rewards": {"learned": 1.0},
    "checkpoint_every": 1, "optimizer": {"lr": 5.0e-4},
}  # fmt: skip
REWARDS = {"right": {"kind": "outcome"}, "learned": {"kind": "reward_model", "path": "stages[1]"}}


def recipe(folder: Path, *stages: Any, **changes: Any) -> Path:
    return runs.write(folder, [START, *stages], rewards=REWARDS, evaluation={"n_tasks": 16}, **changes)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_a_stage_learns_against_the_model_that_one_before_it_left(lora: Any, tmp_path: Path) -> None:
    path = recipe(tmp_path, {**MODEL, "lora": lora}, GRADIENT)
    refuse_absent_models(load(path))
    done = runs.run(path, tmp_path / "run")
    left = tmp_path / "run" / "reward_model" / "1-reward_model"
    assert (left / "config.json").is_file() and not (left / "adapter_config.json").exists()
    records = list(read_trajectories(tmp_path / "run" / "trajectories", phase="train"))
    made = [r.score for r in records if r.stage == "1-reward_model" and r.score]
    judged = [r.score for r in records if r.stage == "2-policy_gradient" and r.score]
    assert made and {tuple(score.parts) for score in made} == {("right",)}
    assert judged and {tuple(score.parts) for score in judged} == {("right", "learned")}
    assert all(score.total == pytest.approx(score.parts["learned"].value) for score in judged)
    check_judged_as_trained(done.folder, [r for r in records if r.stage == "2-policy_gradient" and r.score])


def check_judged_as_trained(folder: Path, judged: list[Any]) -> None:
    """Check that the model scores attempts as it was trained: the same rows, order, sign and weights."""
    left = folder / "reward_model" / "1-reward_model"
    model = AutoModelForSequenceClassification.from_pretrained(left).eval()

    def plain(ids: Sequence[int]) -> float:
        with torch.inference_mode():
            return float(model(torch.tensor([list(ids)])).logits[0, 0])

    lines = (folder / "pairs" / "1-reward_model.jsonl").read_text().splitlines()
    pairs = [Pair(p["task_id"], Side(**p["chosen"]), Side(**p["rejected"])) for p in map(json.loads, lines)]
    _, unseen = split_by_task(pairs, 0.2, "0/1/held_out")
    served = RewardModelScore(path=str(left)).read(
        model, [(s.token_ids, ()) for p in unseen for s in (p.chosen, p.rejected)]
    )
    right = [chosen > rejected for [chosen], [rejected] in zip(served[::2], served[1::2], strict=True)]
    assert runs.curve(folder, "reward_model/accuracy") == [pytest.approx(sum(right) / len(right))]
    for record in judged:  # in rollouts the same rows are read: all that was said, its end included, and nothing else
        said = record.trajectory.generations[-1]
        assert record.score.parts["learned"].value == pytest.approx(plain(said.full_ids), abs=1e-4)
    trained = {tuple(side.token_ids) for p in pairs for side in (p.chosen, p.rejected)}
    assert any(r.trajectory.generations[-1].full_ids in trained for r in judged)  # whole attempts, in training too
    agreement = runs.curve(folder, "rollout/score_agreement")
    assert agreement and all(0 <= share <= 1 for share in agreement)


def test_a_stage_before_the_model_of_the_only_reward_is_not_evaluated(tmp_path: Path) -> None:
    own = {"right": {"kind": "outcome"}}
    early = {**GRADIENT, "steps": 2, "rewards": own, "evaluate_every": 1}
    model = {**MODEL, "rewards": own}
    rewards = {"learned": {"kind": "reward_model", "path": "stages[2]"}}
    path = runs.write(tmp_path, [{**START, "rewards": own}, early, model], rewards=rewards, evaluation={"n_tasks": 2})
    done = runs.run(path, tmp_path / "run")
    assert done.said.count("no evaluation in this stage") == 1
    assert runs.curve(done.folder, "optimizer/n_updates")


def test_rounds_of_preferences_are_scored_by_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = list[str]()

    async def noted(run: Run) -> None:
        asleep.append(run.state.label)

    monkeypatch.setattr(Run, "release_engine_memory", noted)
    prefer = {"kind": "preference", "pairs": {"tasks": 12, "group_size": 4}, "rewards": {"learned": 1.0}}
    done = runs.run(recipe(tmp_path, MODEL, prefer, prefer), tmp_path / "run")
    assert len([n for n in runs.curve(done.folder, "preference/n_pairs") if n > 0]) == 3  # the model's pairs first
    assert asleep == ["0-supervised", "1-reward_model", "2-preference", "3-preference"]
    for stage in ("2-preference", "3-preference"):
        scores = [r.score for r in read_trajectories(done.folder / "trajectories", stage=stage) if r.score]
        assert scores and all(score.total == pytest.approx(score.parts["learned"].value) for score in scores)


def test_a_run_that_was_stopped_scores_with_the_same_model(tmp_path: Path) -> None:
    path = recipe(tmp_path, MODEL, GRADIENT)
    whole = runs.run(path, tmp_path / "whole")
    runs.stop(path, tmp_path / "stopped", "2-policy_gradient-000001")
    again = runs.run(path, tmp_path / "stopped", resume=True)
    assert runs.weights(runs.newest(again.folder)) == runs.weights(runs.newest(whole.folder))


def test_the_model_of_a_run_scores_its_evaluation(tmp_path: Path) -> None:
    runs.run(recipe(tmp_path, MODEL, {**GRADIENT, "steps": 1}), tmp_path / "run")
    rlhf.evaluate(tmp_path / "run", n=4, out=tmp_path / "found", progress=False)
    scores = [r.score for r in read_trajectories(tmp_path / "found" / "trajectories") if r.score]
    assert scores and all("learned" in score.parts for score in scores)


@pytest.mark.parametrize(("stages", "told"), [
    ([GRADIENT], "this stage trains no reward model of that kind"),
    ([{**MODEL, "objective": "outcome"}, GRADIENT], "this stage trains no reward model of that kind"),
    ([{**MODEL, "rewards": {"learned": 1.0}}, GRADIENT], "not trained yet"),
    ([MODEL, {**GRADIENT, "rewards": {"lerned": 1.0}}], "did you mean 'learned'?"),
])  # fmt: skip
def test_what_cannot_score_a_stage_is_refused(stages: list[Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(recipe(tmp_path, *stages))
    assert told in str(caught.value)


# --- pairs in the usual forms -----------------------------------------------------------------------------------------


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_pairs_are_read_from_tables_and_from_conversations(tmp_path: Path) -> None:
    import datasets

    rows = [{"chosen": said("Say red.", "red"), "rejected": said("Say red.", "blue"), "score": 3.0}] * 2
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(str(tmp_path / "pairs.parquet"))
    made.to_json(str(tmp_path / "pairs.jsonl"))
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected,source\nSay red.,red,blue,me\n")
    for name in ("pairs.parquet", "pairs.jsonl", "saved", "pairs.csv"):
        found = pair_files.read(tmp_path / name, "pairs.file")[0]
        assert ([m.content for m in found.prompt], found.chosen, found.rejected) == (["Say red."], "red", "blue")


@pytest.mark.parametrize(("row", "told"), [
    ("prompt,chosen,rejcted\na,b,c", "did you mean 'rejected'?"),
    ("prompt,chosen,rejected\na,b,b", "the same"),
    ("prompt,chosen\na,b,c", "this row and the header differ in length"),
])  # fmt: skip
def test_a_row_of_a_table_that_is_no_pair_is_named(row: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(row + "\n")
    with pytest.raises(RecipeError) as caught:
        pair_files.read(tmp_path / "pairs.csv", "stages[0].pairs.file")
    assert told in str(caught.value) and "2" in caught.value.where


# --- it learns --------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["largest-dpo", "largest-reward-model"])
def test_the_chain_learns_on_questions_that_it_has_not_seen(name: str, seed: int, tmp_path: Path) -> None:
    found = train(load(RECIPES / f"{name}.yaml", [f"seed={seed}"]), tmp_path / "run")
    shown = {key: found[key] for key in ("success_before", "interval_before", "success_after", "interval_after")}
    print(name, seed, shown)
    assert found["success_after"] > found["success_before"] + 0.03, shown
