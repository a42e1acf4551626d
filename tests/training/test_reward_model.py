"""The reward model: TRL computes our loss, it is right about tasks it has not seen, and it scores attempts or fails."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer

from rewards.check import check_reward
from rewards.models.model_folder import logits
from rewards.models.reward_model import RewardModelScore
from rlhf.data import Finish, Task
from rlhf.errors import MissingPackageError, ModelError, RecipeError, TrainingError
from rlhf.losses.preference import bradley_terry
from rlhf.recipe import load
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.policy.lora import Lora, merged
from rlhf.training.reward_model_training import adapted, save, scoring_model, split_by_task
from rlhf.training.stages.pairs import Pair, Pairs, Side
from rlhf.training.stages.reward_model import RewardModel
from rlhf.training.stages.reward_model_pairwise import scores
from rlhf.training.stages.trl_trainers import load_trl, train_pairwise
from tests import test_resume as resume
from tests.training import runs, tiny, words
from tests.training.test_attempts import OUTCOME, START

try:
    load_trl()
except MissingPackageError:
    pytest.skip("needs the extra trl", allow_module_level=True)

STAGE: dict[str, Any] = {
    "kind": "reward_model", "pairs": {"tasks": 128, "group_size": 8}, "epochs": 8, "batch_size": 16,
    "optimizer": {"lr": 3.0e-3, "schedule": "linear"},
}  # fmt: skip


# --- the model, and one update ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_the_model_is_a_copy_of_the_policy_with_one_number_on_top(lora: Lora | None) -> None:
    policy = tiny.policy(lora=lora)
    before = tiny.parameters(policy.model)
    torch.manual_seed(0)
    model = scoring_model(policy)
    inner = policy.model.get_base_model() if lora else policy.model
    assert torch.equal(model.model.embed_tokens.weight, inner.model.embed_tokens.weight)
    assert model.config.num_labels == 1 and all(p.requires_grad for p in model.parameters())
    rows = [[5, 6, 7], [5, 6, 7, 8, 9], [10]]
    together = scores(model, rows, 3)
    assert together == pytest.approx([scores(model, [row], 1)[0] for row in rows], abs=1e-6)  # padding does not show
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(tiny.parameters(policy.model), before)


@pytest.mark.parametrize("at_once", [3, 4], ids=["equal-passes", "the-last-pass-is-shorter"])
def test_an_update_by_trl_is_the_gradient_of_our_loss(at_once: int) -> None:
    policy = tiny.policy()
    pairs = Pairs(max_per_task=3).of(tiny.collect(policy, n_tasks=3, group_size=4), 0)[:6]
    torch.manual_seed(0)
    model = scoring_model(policy)

    def of(sides: list[Side]) -> torch.Tensor:
        return torch.cat([model(input_ids=torch.tensor([side.token_ids])).logits[0] for side in sides])

    chosen, rejected = of([p.chosen for p in pairs]), of([p.rejected for p in pairs])
    loss = bradley_terry(chosen, rejected, centring=0.1).mean()
    loss.backward()
    norm = float(tiny.gradient(model).norm())
    model.zero_grad(set_to_none=True)
    rows = [{"chosen_ids": list(p.chosen.token_ids), "rejected_ids": list(p.rejected.token_ids)} for p in pairs]
    seen: list[Any] = []
    stage = RewardModel(
        optimizer=AdamW(lr=1e-3, max_grad_norm=None),
        batch_size=2 * at_once,
        pairs_per_microbatch=at_once,
        epochs=1,
        centring=0.1,
    )
    train_pairwise(model, policy.tokenizer, rows, stage, lambda n, logs: seen.append(logs), seed=0)
    assert len(seen) == 1
    assert seen[0]["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert seen[0]["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert seen[0]["margin"] == pytest.approx(float((chosen - rejected).mean().detach()), rel=1e-4)
    assert seen[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_no_task_is_both_learnt_and_judged() -> None:
    side = Side((1,), (True,))
    pairs = [Pair(str(i % 10), side, side) for i in range(30)]
    seen, unseen = split_by_task(pairs, 0.2, "x")
    assert len(seen) == 24 and len(unseen) == 6  # 8 and 2 of 10 tasks, three pairs each
    assert not {p.task_id for p in seen} & {p.task_id for p in unseen}
    assert split_by_task(pairs, 0.2, "x") == (seen, unseen)
    assert [len(part) for part in split_by_task(pairs[:2], 0.01, "x")] == [1, 1]
    with pytest.raises(
        TrainingError, match="a reward model needs training tasks and evaluation tasks, and there is only one task"
    ):
        split_by_task(pairs[:1], 0.2, "x")


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> runs.Done:
    """A policy that solves about half of the tasks, and a model of which of its attempts are right."""
    folder = tmp_path_factory.mktemp("judged")
    stages = [START | {"random_share": 0.5}, STAGE]
    # Two layers: whether what was said is what was shown is found in one and read at the end by the next.
    changes: dict[str, Any] = {"policy": runs.BASE["policy"] | {"n_layers": 2}, "evaluation": {"n_tasks": 4}}
    return runs.run(runs.write(folder, stages, rewards=OUTCOME, **changes), folder / "run")


def folder_of(done: runs.Done) -> Path:
    return done.folder / "reward_model" / "1-reward_model"


def test_it_is_right_on_pairs_of_tasks_it_has_not_seen(done: runs.Done) -> None:
    accuracy, low, high = (runs.curve(done.folder, f"reward_model/accuracy{n}")[0] for n in ("", "_low", "_high"))
    assert accuracy >= 0.85 and 0.5 < low < accuracy <= high <= 1
    assert runs.curve(done.folder, "reward_model/n_held_out")[0] > 40
    assert "the reward model is right on" in done.said and "95% interval" in done.said
    losses = runs.curve(done.folder, "reward_model/loss")
    assert losses[-1] < 0.4 < losses[0]


def test_how_sure_it_is_is_kept_logged_and_drawn(done: runs.Done) -> None:
    [error] = runs.curve(done.folder, "reward_model/calibration_error")
    kept = json.loads((folder_of(done) / "held_out.json").read_text())
    assert sum(b["n"] for b in kept["bins"]) == kept["n"] == runs.curve(done.folder, "reward_model/n_held_out")[0]
    assert kept["accuracy"] == runs.curve(done.folder, "reward_model/accuracy")[0]
    gaps = [b["n"] * abs(b["said"] - b["share"]) for b in kept["bins"]]
    assert error == pytest.approx(sum(gaps) / kept["n"]) and error < 0.25
    assert "Reward model of 1-reward_model" in (done.folder / "report.html").read_text()


def test_the_policy_stays_as_it_is(done: runs.Done) -> None:
    folder = done.folder / "checkpoints"
    [last] = [p for p in folder.glob("1-reward_model-*") if not p.name.endswith("-000000")]
    assert runs.weights(last) == runs.weights(folder / "1-reward_model-000000")
    config = json.loads((folder_of(done) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]


def test_a_policy_learns_from_its_scores(done: runs.Done, tmp_path: Path) -> None:
    policy = {"kind": "pretrained", "path": str(runs.newest(done.folder) / "policy")}
    stage = {"kind": "policy_gradient", "steps": 6, "tasks_per_step": 8, "group_size": 8, "optimizer": {"lr": 4.0e-3}}
    rewards = {"learned": {"kind": "reward_model", "path": str(folder_of(done))}}
    learnt = runs.run(runs.write(tmp_path, [stage], policy=policy, rewards=rewards), tmp_path / "run")
    assert learnt.result["success_after"] > learnt.result["success_before"] + 0.1, learnt.result
    rewards_seen = runs.curve(learnt.folder, "reward/learned")
    assert rewards_seen[-1] > rewards_seen[0]


def test_a_stage_that_was_stopped_begins_again_and_comes_out_the_same(done: runs.Done, tmp_path: Path) -> None:
    short = STAGE | {"pairs": {"tasks": 8, "group_size": 4}, "epochs": 1, "batch_size": 8}
    policy = {"kind": "pretrained", "path": str(runs.newest(done.folder) / "policy")}
    path = runs.write(tmp_path, [short, short], policy=policy, rewards=OUTCOME, evaluation={"n_tasks": 6})
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        whole = runs.run(path, tmp_path / "whole")
    third = len(calls) // 3
    assert resume.run_with_interruptions(path, tmp_path / "stopped", [third, third]) == 2
    assert resume.everything(tmp_path / "stopped") == resume.everything(whole.folder)
    # The models that were learnt lie beside the checkpoints.
    learnt = [
        sorted((run / "reward_model").glob("*/model.safetensors")) for run in (whole.folder, tmp_path / "stopped")
    ]
    assert len(learnt[0]) == 2 and [p.parent.name for p in learnt[0]] == [p.parent.name for p in learnt[1]]
    for one, other in zip(*learnt, strict=True):
        assert one.read_bytes() == other.read_bytes()


# --- as a reward -----------------------------------------------------------------------------------------------------


def test_attempts_are_scored_together_by_their_own_ids(tmp_path: Path) -> None:
    policy = tiny.policy()
    [group] = tiny.collect(policy, n_tasks=1, group_size=3)
    model = scoring_model(policy)
    save(tmp_path, model, policy.tokenizer)
    reward = RewardModelScore(path=str(tmp_path), batch_size=2)
    reward.check_policy(policy.tokenizer)
    found = [v.value for v in reward.over_group(Task(group.task_id), group.trajectories)]
    rows = [list(t.generations[-1].full_ids) for t in group.trajectories]
    assert found == pytest.approx(scores(model, rows, 1), abs=1e-5)
    assert all(g.finish in tuple(Finish) for t in group.trajectories for g in t.generations)


def test_scores_of_a_model_in_bfloat16_are_not_rounded_to_it() -> None:
    policy = tiny.policy()
    policy.model.bfloat16()
    torch.manual_seed(0)
    model, pad = scoring_model(policy), policy.tokenizer.pad_token_id
    model.score.weight.data *= 100
    rows = [[5, 6, 7], [5, 6, 7, 8, 9], [10, 11, pad]]  # the last one is read before its padding
    ends = [2, 4, 1]
    with torch.no_grad():
        hidden = [
            model.model(torch.tensor([row])).last_hidden_state[0, end] for row, end in zip(rows, ends, strict=True)
        ]
        expected = torch.stack(hidden).float() @ model.score.weight[0].float()
    assert not torch.equal(expected, expected.bfloat16().float())
    assert scores(model, rows, 1) == pytest.approx(expected.tolist(), rel=1e-5)
    one_by_one = [logits(model, [(row, (end,))], 1)[0][0] for row, end in zip(rows, ends, strict=True)]
    assert one_by_one == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("trouble", ["nan", "gone", "wrong"])
def test_a_model_that_fails_is_an_error_and_never_a_score(tmp_path: Path, trouble: str) -> None:
    policy = tiny.policy()
    [group] = tiny.collect(policy, n_tasks=1, group_size=2)
    model = scoring_model(policy)
    if trouble == "nan":
        torch.nn.init.constant_(model.score.weight, float("nan"))
    if trouble != "gone":
        save(tmp_path / "model", model, policy.tokenizer)
    if trouble == "wrong":
        (tmp_path / "model" / "model.safetensors").write_bytes(b"rubbish")
    reward = RewardModelScore(path=str(tmp_path / "model"))
    scored = asyncio.run(score_group(Task(group.task_id), group.trajectories, {"r": WeightedReward("r", 1.0, reward)}))
    assert not scored.trajectories and len(scored.failures) == 2
    assert all(f.outcome == "reward_error" and "reward model" in f.message for f in scored.failures)


def test_a_model_keeps_the_contract_of_rewards(tmp_path: Path) -> None:
    policy = tiny.policy()
    save(tmp_path / "model", scoring_model(policy), policy.tokenizer)
    report = check_reward(RewardModelScore(path=str(tmp_path / "model")))
    assert report.ok, str(report)


def test_a_model_of_other_tokens_is_refused_before_anything_is_scored(tmp_path: Path) -> None:
    policy = tiny.policy()
    save(tmp_path, scoring_model(policy), policy.tokenizer)
    from rlhf.training.policy.tokenizer import train_tokenizer

    other = train_tokenizer(["something else entirely"] * 9, vocab_size=300, max_context=64)
    with pytest.raises(ModelError, match="does not fit the policy") as caught:
        RewardModelScore(path=str(tmp_path)).check_policy(other)
    assert caught.value.got == "another tokenizer"
    with pytest.raises(ModelError, match="cannot be loaded"):
        RewardModelScore(path=str(tmp_path / "nowhere")).check_policy(other)


def test_a_model_whose_number_was_never_trained_is_refused(tmp_path: Path) -> None:
    policy = tiny.policy()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        RewardModelScore(path=str(tmp_path)).check_policy(policy.tokenizer)
    assert "no weights for score.weight" in caught.value.got


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    policy = {"kind": "pretrained", "path": str(tmp_path), "lora": {"quantization": "4bit"}}
    with pytest.raises(RecipeError, match="a quantised base does not support this") as caught:
        load(runs.write(tmp_path, [STAGE], policy=policy))
    assert "a reward model" in caught.value.got


def test_adapters_are_merged_as_those_of_a_policy_are() -> None:
    short = tiny.policy()
    short.model.bfloat16()
    inside, merge = adapted(scoring_model(short), Lora(rank=2))
    layers = {name: module for name, module in inside.named_modules() if isinstance(module, LoraLayer)}
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=1e-3)
    inside.score.modules_to_save["default"].weight.data.fill_(0.5)
    expected = {name: merged(layer, layer.get_base_layer().weight.detach().clone()) for name, layer in layers.items()}
    plain = merge()
    assert len(expected) > 4 and bool((plain.score.weight == 0.5).all())
    found = dict(plain.named_modules())
    assert all(torch.equal(found[name].weight, weight) for name, weight in expected.items())


def test_adapters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="does not fit the model"):
        Lora(target_modules=("q_projj",)).wrap_scorer(scoring_model(tiny.policy()))


def test_the_reward_is_known_without_torch() -> None:
    heavy = "('torch', 'transformers', 'trl')"
    code = f"import sys, rewards.models.reward_model; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"held_out": 1.0}, ["stages[0].held_out"]),
        ({"beta": 0.1}, ["no key 'beta'"]),
        ({"centering": 0.1}, ["did you mean 'centring'?"]),
        ({"pairs": {"gamma": 0.5}}, ["stages[0].pairs.gamma", "no effect"]),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path: Path, stage: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(runs.write(tmp_path, [STAGE | stage]))
    assert all(text in str(caught.value) for text in says), caught.value
