"""The preference stage: TRL computes our loss on our tokens, gives the model back as it was, and success rises."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf
from rlhf.build.pair_data import check_sources
from rlhf.commands.output import Stopped
from rlhf.errors import MissingPackageError, ModelError, RecipeError, TrainingError
from rlhf.inference.embedded.attention import packed_forward
from rlhf.losses.preference import sequence_sums
from rlhf.recipe import load
from rlhf.recipe.compatibility import check_processes
from rlhf.recipe.suites import suite_of_recipe
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.run import Interrupted, Run
from rlhf.training.stages import trl_trainers
from rlhf.training.stages.pairs import Pair, Pairs, Side
from rlhf.training.stages.preference import Preference
from rlhf.training.stages.preference_training import _rows, reference_logps
from rlhf.training.stages.trl_trainers import _run, load_trl, train_dpo
from tests import test_resume as resume
from tests.tiers import tiered
from tests.training import runs, tiny, words
from tests.training.test_attempts import OUTCOME, START
from tests.training.test_reading import untied

try:
    load_trl()
except MissingPackageError:
    pytest.skip("needs the extra trl", allow_module_level=True)

STAGE: dict[str, Any] = {
    "kind": "preference", "pairs": {"tasks": 64, "group_size": 8}, "epochs": 4, "batch_size": 16, "beta": 0.3,
    "sft_coef": 0.3, "optimizer": {"lr": 5.0e-3, "schedule": "linear"},
}  # fmt: skip


# --- one update ------------------------------------------------------------------------------------------------------


def made(policy: Policy) -> list[Pair]:
    """Pairs of attempts of several turns, so that observations lie between what is compared."""
    pairs = Pairs(max_per_task=3).of(tiny.collect(policy, n_tasks=3, group_size=4), 0)
    assert len(pairs) > 4
    assert any(_n_pieces(side) > 1 for pair in pairs for side in (pair.chosen, pair.rejected))
    return pairs


def _n_pieces(side: Side) -> int:
    return sum(b and not a for a, b in zip((False, *side.mask), side.mask, strict=False))


def logps(policy: Policy, sides: list[Side]) -> torch.Tensor:
    """Our own packed forward pass, with gradient: the sum of the log-probs of the compared tokens, `[B]`."""
    ids = torch.tensor([i for side in sides for i in side.token_ids])
    mask = torch.tensor([m for side in sides for m in side.mask])
    places = mask.nonzero()[:, 0]
    logits = packed_forward(policy.model, ids, [len(side.token_ids) for side in sides], places - 1)
    each = logits.log_softmax(-1).gather(1, ids[places, None])[:, 0]
    owner = torch.tensor([i for i, side in enumerate(sides) for m in side.mask if m])
    return sequence_sums(each, owner, len(sides))


def lengths(sides: list[Side]) -> torch.Tensor:
    return torch.tensor([float(sum(side.mask)) for side in sides])


def test_the_reference_of_the_rows_is_our_own_log_prob() -> None:
    policy = tiny.policy()
    sides = [p.chosen for p in made(policy)]
    assert reference_logps(policy, sides, "start") == pytest.approx(logps(policy, sides).tolist(), rel=1e-6)


@pytest.mark.parametrize(("loss", "weight"), [("dpo", 0.0), ("ipo", 0.0), ("dpo", 0.5)])
@pytest.mark.parametrize("at_once", [64, 2, 3], ids=["at-once", "two-by-two", "the-last-pass-is-shorter"])
def test_an_update_by_trl_is_the_gradient_of_our_loss(loss: str, weight: float, at_once: int) -> None:
    policy = tiny.policy()
    pairs = made(policy)[:8]
    chosen, rejected = [p.chosen for p in pairs], [p.rejected for p in pairs]
    rows = _rows(policy, Preference(), pairs)
    for i, row in enumerate(rows):  # a reference that is another model
        row["ref_chosen_logps"] += 0.3 * i - 1
        row["ref_rejected_logps"] -= 0.1 * i
    ref = [torch.tensor([row[f"ref_{side}_logps"] for row in rows]) for side in ("chosen", "rejected")]
    ours = [logps(policy, chosen), logps(policy, rejected)]
    ratios = [mine - theirs for mine, theirs in zip(ours, ref, strict=True)]
    if loss == "dpo":  # −log σ(β M), of sums
        expected = -torch.nn.functional.logsigmoid(0.2 * (ratios[0] - ratios[1])).mean()
    else:  # (M − 1 / (2 β))², of means over the tokens
        good, bad = (ratio / lengths(side) for ratio, side in zip(ratios, (chosen, rejected), strict=True))
        expected = (good - bad - 1 / (2 * 0.2)).square().mean()
    expected = expected - weight * ours[0].sum() / lengths(chosen).sum()
    expected.backward()
    norm = float(tiny.gradient(policy.model).norm())
    policy.model.zero_grad(set_to_none=True)
    seen: list[Any] = []
    stage = Preference(
        optimizer=AdamW(lr=1e-3, max_grad_norm=None), batch_size={64: 64, 2: 8, 3: 9}[at_once],
        pairs_per_microbatch=at_once, loss=loss, beta=0.2, sft_coef=weight,
    )  # fmt: skip
    train_dpo(policy.model, policy.tokenizer, rows, stage, lambda n, logs: seen.append(logs), seed=0)
    assert len(seen) == stage.n_updates(len(pairs)) == 1
    assert seen[0]["loss"] == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
    right = (ratios[0] > ratios[1]).float().mean()
    if loss == "dpo":
        assert 0 < right < 1
        assert seen[0]["rewards/accuracies"] == pytest.approx(float(right))
        assert seen[0]["rewards/margins"] == pytest.approx(float(0.2 * (ratios[0] - ratios[1]).mean()), abs=1e-4)
        assert seen[0]["logps/chosen"] == pytest.approx(float(ours[0].mean()), rel=1e-6)
    if loss == "dpo" or at_once == 64:
        assert seen[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("lora", [None, Lora(rank=2, dropout=0.3)], ids=["full", "lora"])
def test_the_model_comes_back_as_it_was_but_for_its_weights(lora: Lora | None) -> None:
    policy = tiny.policy(lora=lora)
    pairs = made(policy)

    def look() -> dict[str, Any]:
        model = policy.model
        inner = model.get_base_model() if lora else model
        return {
            "trained": [name for name, p in model.named_parameters() if p.requires_grad],
            "names": [name for name, _ in model.named_parameters()],
            "forward": "forward" in vars(inner),
            "config": inner.config.to_dict(),
            "generation": inner.generation_config.to_dict(),
            "dropout": [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)],
            "training": model.training,
            "adapters": list(getattr(model, "peft_config", {})),
            "tags": getattr(inner, "model_tags", None),
        }

    before, weights = look(), tiny.parameters(policy.model)
    frozen = [p.detach().clone() for p in policy.model.parameters() if not p.requires_grad]
    stage = Preference(
        optimizer=AdamW(lr=1e-3), batch_size=8, pairs_per_microbatch=4, epochs=2, gradient_checkpointing=True
    )
    model = policy.model.get_base_model() if lora else policy.model
    train_dpo(model, policy.tokenizer, _rows(policy, stage, pairs), stage, lambda *_: None, seed=0)
    assert look() == before
    assert not torch.equal(tiny.parameters(policy.model), weights)
    left = [p for p in policy.model.parameters() if not p.requires_grad]
    assert all(map(torch.equal, left, frozen))


def test_the_model_under_an_adapter_can_be_the_reference() -> None:
    policy = tiny.policy(lora=Lora(rank=2))
    sides = [p.chosen for p in made(policy)]
    base = reference_logps(policy, sides, "base")
    assert base == reference_logps(policy, sides, "start")  # an adapter begins as no change
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.add_(0.1)
    assert base == reference_logps(policy, sides, "base") != reference_logps(policy, sides, "start")


def test_an_adapter_on_the_output_layer_is_refused() -> None:
    policy = untied(Lora(rank=2, target_modules=("lm_head", "q_proj")))
    rows = _rows(policy, Preference(), made(policy))
    with pytest.raises(ModelError, match="output layer"):
        train_dpo(
            policy.model.get_base_model(), policy.tokenizer, rows, Preference(batch_size=8), lambda *_: None, seed=0
        )


def test_a_loss_that_is_not_finite_ends_the_stage() -> None:
    policy = tiny.policy()
    rows = _rows(policy, Preference(), made(policy))
    rows[0]["ref_chosen_logps"] = float("nan")
    with pytest.raises(TrainingError, match="not finite"):
        stage = Preference(optimizer=AdamW(), batch_size=64, pairs_per_microbatch=64)
        train_dpo(policy.model, policy.tokenizer, rows, stage, lambda *_: None, seed=0)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy that solves about a quarter of the tasks."""
    folder = tmp_path_factory.mktemp("start")
    return runs.newest(runs.run(runs.write(folder, [START]), folder / "run").folder) / "policy"


def learn(start: Path, folder: Path, stages: list[dict[str, Any]], **changes: Any) -> runs.Done:
    changes = {"policy": {"kind": "pretrained", "path": str(start)}, "rewards": OUTCOME, **changes}
    return runs.run(runs.write(folder, stages, **changes), folder / "run")


@pytest.mark.parametrize("level", tiered(["trajectory", "state", "parting", "expert"], "state", "expert"))
def test_preferring_the_better_one_raises_success(start: Path, tmp_path: Path, level: str) -> None:
    done = learn(start, tmp_path, [STAGE | {"pairs": STAGE["pairs"] | {"level": level}}])
    assert done.result["success_before"] < 0.4 and done.result["success_after"] > 0.8, done.result
    assert done.result["interval_before"][1] < done.result["interval_after"][0]
    losses = runs.curve(done.folder, "preference/loss")
    margins, right = (runs.curve(done.folder, f"preference/{name}") for name in ("margin", "accuracy"))
    assert abs(margins[0]) < 1e-5 and margins[-1] > 1 and right[-1] > 0.9 and losses[-1] < losses[0]
    [n_pairs] = runs.curve(done.folder, "preference/n_pairs")
    n_states = 2 if level == "expert" else 1
    assert runs.curve(done.folder, "rollout/n_episodes") == [512.0 * n_states] == [done.result["n_episodes"]]
    lines = (done.folder / "pairs" / "0-preference.jsonl").read_text().splitlines()
    assert len(lines) == n_pairs and f"{len(lines)} pairs of" in done.said
    assert runs.newest(done.folder).name == f"0-preference-{len(losses):06d}"
    assert ("0-preference", 1, "train") in runs.stored(done.folder)


def test_a_stage_after_it_trains_on(start: Path, tmp_path: Path) -> None:
    short = STAGE | {"epochs": 1}
    gradient = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 8, "group_size": 8, "optimizer": {"lr": 1e-3}}
    done = learn(start, tmp_path, [short, gradient, short], evaluation={"n_tasks": 8})
    # What the engine sampled with is what the trainer computes: TRL has left nothing behind in the model.
    assert max(runs.curve(done.folder, "loss/sampler_logprob_diff_max")) < 1e-3
    assert runs.curve(done.folder, "preference/n_pairs")[0] > 0


def test_an_adapter_learns_too(start: Path, tmp_path: Path) -> None:
    policy = {"kind": "pretrained", "path": str(start), "lora": {"rank": 4, "dropout": 0.1}}
    done = learn(start, tmp_path, [STAGE | {"reference": "base", "optimizer": {"lr": 2.0e-2}}], policy=policy)
    assert done.result["success_after"] > done.result["success_before"] + 0.2, done.result
    assert (runs.newest(done.folder) / "policy" / "adapter_config.json").is_file()


def test_stored_attempts_of_a_run_are_paired(start: Path, tmp_path: Path) -> None:
    first = learn(start, tmp_path / "a", [STAGE | {"epochs": 1}], evaluation={"n_tasks": 8})
    stage = STAGE | {"pairs": {"from_run": str(first.folder)}}
    done = learn(start, tmp_path / "b", [stage])
    assert done.result["success_after"] > 0.8 and done.result["n_episodes"] == 0
    made = [(f / "pairs" / "0-preference.jsonl").read_text().splitlines() for f in (first.folder, done.folder)]
    assert len(made[0]) == len(made[1])  # of the same attempts, though equals are drawn in another order or place


def test_branches_of_trees_are_compared_without_a_reference(start: Path, tmp_path: Path) -> None:
    pairs = STAGE["pairs"] | {"level": "parting", "turns": 2}
    tree = {"kind": "tree", "branches_per_round": 3}
    done = learn(start, tmp_path, [STAGE | {"pairs": pairs, "rollout": tree, "reference": "none", "beta": 0.1}])
    assert done.result["success_after"] > done.result["success_before"] + 0.2, done.result
    assert runs.curve(done.folder, "rollout/n_replayed_turns")[0] > 0
    assert runs.curve(done.folder, "preference/loss")[0] != pytest.approx(0.6931, abs=0.02)  # ln 2 with a reference


def test_pairs_of_a_file_are_learnt(start: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = []
    for _ in range(64):
        right, wrong = rng.sample(words.WORDS, 2)
        lines.append({"prompt": f"Say {right}.", "chosen": right, "rejected": wrong})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = learn(start, tmp_path, [STAGE | {"pairs": {"file": str(path)}}])
    assert done.result["success_after"] > done.result["success_before"] + 0.2, done.result
    assert runs.curve(done.folder, "preference/n_pairs") == [64.0]


def test_a_recipe_without_rewards_reports_its_loss_alone(start: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"Say {w}.", "chosen": w, "rejected": "nothing"} for w in words.WORDS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage = STAGE | {"pairs": {"file": str(tmp_path / "pairs.jsonl")}, "epochs": 1}
    path = runs.write(tmp_path, [stage], policy={"kind": "pretrained", "path": str(start)}, rewards={})
    done = runs.run(path, tmp_path / "run")
    assert runs.curve(done.folder, "preference/loss") and not runs.curve(done.folder, "eval/success")
    assert done.result["success_before"] is done.result["interval_after"] is done.result["success_after"] is None
    assert not (done.folder / "trajectories").exists() or not list((done.folder / "trajectories").iterdir())
    again = runs.run(path, tmp_path / "run", resume=True)
    assert "this run is finished; nothing is left to train" in again.said
    page = (done.folder / "report.html").read_text("utf-8")
    assert "preference/loss" in page
    with pytest.raises(RecipeError, match="this recipe has no rewards") as caught:
        suite_of_recipe(load(path))
    assert "--suite" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "policy_gradient", "steps": 1},
        {"kind": "preference"},
        {"kind": "reward_model"},
        {"kind": "supervised", "rejection_sampling": {}},
    ],
    ids=lambda stage: stage["kind"],
)
def test_a_stage_that_scores_attempts_needs_rewards(tmp_path: Path, stage: dict[str, Any]) -> None:
    path = runs.write(tmp_path, [{"kind": "supervised"}, stage], rewards={})
    with pytest.raises(RecipeError, match="no reward for training") as caught:
        load(path)
    assert caught.value.where == "rewards" and "for stages[1]" in (caught.value.expected or "")
    load(runs.write(tmp_path, [{"kind": "supervised"}], rewards={}))


def test_evaluation_tasks_among_pairs_are_told_of_a_file_beside_the_recipe(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {w} {i}.", "reference": w} for w in words.WORDS for i in range(20)]
    pairs = [{"prompt": row["prompt"], "chosen": row["reference"], "rejected": "nothing"} for row in rows]
    for name, lines in (("tasks", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage = STAGE | {"pairs": {"file": "pairs.jsonl"}}
    path = runs.write(
        tmp_path,
        [stage],
        environment={"kind": "dataset", "path": "tasks.jsonl"},
        rewards={"right": {"kind": "exact_match"}},
        evaluation={"n_tasks": 4},
    )
    told: list[str] = []
    check_sources(load(path), told.append)
    assert len(told) == 1 and "4 tasks that the policy is judged by are in stages[0].pairs.file" in told[0]


def test_a_stage_that_was_stopped_begins_again_and_comes_out_the_same(start: Path, tmp_path: Path) -> None:
    short = STAGE | {"pairs": {"tasks": 8, "group_size": 4}, "epochs": 1, "batch_size": 8}
    policy = {"kind": "pretrained", "path": str(start)}
    path = runs.write(tmp_path, [short, short], policy=policy, rewards=OUTCOME, evaluation={"n_tasks": 6})
    whole = runs.run(path, tmp_path / "whole")
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        runs.run(path, tmp_path / "counted")
    third = len(calls) // 3
    assert resume.run_with_interruptions(path, tmp_path / "stopped", [third, third]) == 2
    assert resume.everything(tmp_path / "stopped") == resume.everything(whole.folder)


@pytest.mark.parametrize("is_last", [False, True], ids=["before-the-last-update", "after-it"])
def test_a_callback_that_stops_within_the_stage_ends_it_at_that_update(
    start: Path, tmp_path: Path, is_last: bool
) -> None:
    """Begun again when the run is resumed; a stage whose updates are all made is kept."""
    short = STAGE | {"pairs": {"tasks": 8, "group_size": 4}, "epochs": 3, "batch_size": 8}
    policy = {"kind": "pretrained", "path": str(start)}
    path = runs.write(tmp_path, [short, short], policy=policy, rewards=OUTCOME, evaluation={"n_tasks": 6})
    whole = runs.run(path, tmp_path / "whole")
    total = sum(line["stage"] == "0-preference" and "preference/loss" in line for line in runs.log(whole.folder))
    assert total > 2
    heard: list[tuple[int, int]] = []

    async def stop(step: rlhf.StepInfo) -> None:
        await asyncio.sleep(0.01)
        if step.stage.startswith("0-") and step.step:
            heard.append((step.step, len(runs.curve(step.run, "preference/loss"))))
            if step.step == (total if is_last else 2):
                step.stop()

    found = rlhf.train(path, out=tmp_path / "run", callbacks=[stop], memory_check=False, progress=False)
    state = json.loads((runs.newest(tmp_path / "run") / "state.json").read_text())
    assert not found.is_finished and state["stage"] == is_last
    assert heard == [(n, n) for n in range(1, 1 + (total if is_last else 2))], "no update is made before it is heard"
    rlhf.train(resume=tmp_path / "run", memory_check=False, progress=False)
    assert resume.everything(tmp_path / "run") == resume.everything(whole.folder)


@pytest.mark.parametrize("is_last", [False, True], ids=["before-the-last-update", "in-it"])
def test_ctrl_c_within_an_update_ends_the_stage_with_that_update_logged(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    short = STAGE | {"pairs": {"tasks": 8, "group_size": 4}, "epochs": 3, "batch_size": 8}
    policy = {"kind": "pretrained", "path": str(start)}
    path = runs.write(tmp_path, [short], policy=policy, rewards=OUTCOME, evaluation={"n_tasks": 6})
    whole = runs.run(path, tmp_path / "whole")
    total = len(runs.curve(whole.folder, "preference/loss"))
    at, check, release = total if is_last else 2, trl_trainers._check_finite, Run.release_engine_memory
    tasks: list[Any] = []
    assert total > 2

    async def released(self: Run) -> None:
        tasks.append(asyncio.current_task())
        await release(self)

    def press(logs: Mapping[str, float], update: int) -> None:
        check(logs, update)
        if update == at:  # in TRL's thread, once the update is made
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while not tasks[-1].cancelling():
                time.sleep(0.001)

    with monkeypatch.context() as patch:
        patch.setattr(trl_trainers, "_check_finite", press)
        patch.setattr(Run, "release_engine_memory", released)
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            runs.run(path, tmp_path / "run")
    assert len(runs.curve(tmp_path / "run", "preference/loss")) == at
    state = json.loads((runs.newest(tmp_path / "run") / "state.json").read_text())
    assert state["finished"] is is_last
    runs.run(path, tmp_path / "run", resume=True)
    assert resume.everything(tmp_path / "run") == resume.everything(whole.folder)


def test_ctrl_c_reaches_a_callback_that_waits_between_updates(start: Path, tmp_path: Path) -> None:
    short = STAGE | {"pairs": {"tasks": 8, "group_size": 4}, "epochs": 2, "batch_size": 8}
    path = runs.write(tmp_path, [short], policy={"kind": "pretrained", "path": str(start)}, rewards=OUTCOME)
    heard: list[int] = []

    async def wait(step: rlhf.StepInfo) -> None:
        if step.step == 1:
            signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 60)
            except asyncio.CancelledError:
                heard.append(step.step)
                raise

    with pytest.raises(Stopped):
        rlhf.train(path, out=tmp_path / "run", callbacks=[wait], memory_check=False, progress=False)
    assert heard == [1]


def test_a_callback_that_raises_within_the_stage_ends_it(start: Path, tmp_path: Path) -> None:
    short = STAGE | {"pairs": {"tasks": 8, "group_size": 4}, "epochs": 2, "batch_size": 8}
    path = runs.write(tmp_path, [short], policy={"kind": "pretrained", "path": str(start)}, rewards=OUTCOME)

    def fail(step: rlhf.StepInfo) -> None:
        if step.step == 1:
            raise KeyError("absent")

    with pytest.raises(TrainingError, match="a callback raised") as caught:
        rlhf.train(path, out=tmp_path / "run", callbacks=[fail], memory_check=False, progress=False)
    assert "step 1 of 0-preference" in caught.value.where
    assert len(runs.curve(tmp_path / "run", "preference/loss")) == 1


# --- what is refused -------------------------------------------------------------------------------------------------


def test_attempts_that_all_score_the_same_say_what_to_do(start: Path, tmp_path: Path) -> None:
    same = {"same": {"kind": "outcome", "failure": 1.0}}
    with pytest.raises(TrainingError, match="no pairs to learn from") as caught:
        learn(start, tmp_path, [STAGE | {"pairs": {"tasks": 4, "group_size": 2}}], rewards=same)
    assert caught.value.where == "the pairs of 0-preference"
    assert caught.value.got == "8 attempts at 4 tasks; those at one task all score the same"
    assert "group_size" in caught.value.hint


def test_a_bad_file_is_refused_before_anything_is_trained(start: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "reject": "c"}\n')
    with pytest.raises(RecipeError, match="no field 'reject'") as caught:
        learn(start, tmp_path, [START, STAGE | {"pairs": {"file": str(path)}}])
    assert "stages[1].pairs.file" in caught.value.where and "line 1" in caught.value.where
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("named", "what", "got", "hint"),
    [
        ("earlyer", "no run in this folder", "earlyer, which is not there", "did you mean '{}/earlier'?"),
        ("", "no run in this folder", ", without recipe.yaml", "name one of those below it: {}/earlier"),
        ("earlier", "no trajectories of training", "/earlier", "name another, with a stage such as policy_gradient"),
    ],
)
def test_a_folder_without_attempts_is_refused_with_the_run_that_may_be_meant(
    start: Path, tmp_path: Path, named: str, what: str, got: str, hint: str
) -> None:
    home = tmp_path / "runs"
    (home / "earlier").mkdir(parents=True)
    (home / "earlier" / "recipe.yaml").write_text("")
    with pytest.raises(RecipeError, match=what) as caught:
        learn(start, tmp_path / "a", [STAGE | {"pairs": {"from_run": str(home / named)}}])
    assert caught.value.got.endswith(got) and caught.value.hint == hint.format(home)


def test_a_run_of_other_tokens_is_refused(start: Path, tmp_path: Path) -> None:
    other = START | {"epochs": 1, "n_demonstrations": 8}
    gradient = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 2}
    small = runs.BASE["policy"] | {"vocab_size": 300}
    done = learn(start, tmp_path / "b", [other, gradient], policy=small, evaluation={"n_tasks": 2})
    with pytest.raises(RecipeError, match="not of the policy's tokenizer"):
        learn(start, tmp_path / "c", [STAGE | {"pairs": {"from_run": str(done.folder)}}], evaluation={"n_tasks": 2})
    own = learn(start, tmp_path / "d", [gradient], evaluation={"n_tasks": 2})
    opposed = {"from_run": str(own.folder), "rejected_from": str(done.folder)}
    with pytest.raises(RecipeError, match="not of the policy's tokenizer") as caught:
        learn(start, tmp_path / "e", [STAGE | {"pairs": opposed}], evaluation={"n_tasks": 2})
    assert caught.value.where == "stages[0].pairs.rejected_from"


@pytest.mark.parametrize(
    ("stage", "changes", "says"),
    [
        ({"pairs": {"levels": "state"}}, {}, ["stages[0].pairs.levels", "did you mean 'level'?"]),
        ({"pairs": {"beta": 0.1}}, {}, ["stages[0].pairs.beta", "stages.N.beta here"]),
        ({"ref_model": "x"}, {}, ["stages[0].ref_model", "stages.N.reference: start, base or none"]),
        ({"max_length": 64}, {}, ["stages[0].max_length", "policy.max_context"]),
        ({"pairs": {"level": "turn"}}, {}, ["stages[0].pairs.level", "state", "parting"]),
        ({"pairs": {"group_size": 1}}, {}, ["stages[0].pairs.group_size"]),
        ({"pairs": {"turns": 2}}, {}, ["stages[0].pairs.turns", "no effect"]),
        ({"pairs": {"role": "plans"}}, {}, ["stages[0].pairs.role"]),
        ({"pairs": {"level": "expert", "margin": 0.5}}, {}, ["stages[0].pairs.margin", "no effect"]),
        ({"pairs": {"rejected_from": "a"}}, {}, ["stages[0].pairs.rejected_from", "no effect"]),
        ({"rollout": {"kind": "tree", "branches_per_round": 4}}, {}, ["stages[0].pairs.group_size"]),
        ({"pairs": {"gamma": 0.9}}, {}, ["stages[0].pairs.gamma", "no effect"]),
        ({"pairs": {"file": "a", "margin": 0.1}}, {}, ["stages[0].pairs.margin", "no effect"]),
        ({"pairs": {"from_run": "a", "tasks": 3}}, {}, ["stages[0].pairs.tasks", "no effect"]),
        ({"pairs": {"file": "a", "from_run": "b"}}, {}, ["stages[0].pairs", "one source"]),
        ({"batch_size": 16, "pairs_per_microbatch": 6}, {}, ["pairs_per_microbatch must divide"]),
        ({"reference": "base"}, {}, ["stages[0].reference", "policy.lora is null"]),
        ({"split": "trains"}, {}, ["stages[0].split", "no such split"]),
        ({}, {"rewards": {"a": {"kind": "outcome", "weight": 0}}}, ["rewards", "weight"]),
        (
            {},
            {"stages": [STAGE, {"kind": "supervised", "trainer": {"kind": "deepspeed", "zero_stage": 3}}]},
            ["sharded weights"],
        ),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    tmp_path: Path, stage: dict[str, Any], changes: dict[str, Any], says: list[str]
) -> None:
    stages = changes.get("stages", [STAGE | stage])
    rest = {name: value for name, value in changes.items() if name != "stages"}
    with pytest.raises(RecipeError) as caught:
        load(runs.write(tmp_path, stages, **rest))
    assert all(text in str(caught.value) for text in says), caught.value


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="runs in one process") as caught:
        check_processes(load(runs.write(tmp_path, [STAGE])), 2)
    assert caught.value.where == "stages[0].kind"


def test_a_machine_with_several_gpus_trains_on_one() -> None:
    seen = []

    class Trainer:
        def __init__(self, *, args: Any, **_: Any) -> None:
            seen.append(args.n_gpu)

        def remove_callback(self, _: Any) -> None: ...
        def add_callback(self, _: Any) -> None: ...
        def train(self) -> None: ...

    class Arguments:
        _n_gpu = 2

        @property
        def n_gpu(self) -> int:
            return self._n_gpu

    made = tiny.policy(n_layers=1)
    rows = [{"chosen": "a", "rejected": "b"}]
    _run(Trainer, made.model, made.tokenizer, rows, Preference(), lambda *_: None, args=Arguments())
    assert seen == [1]
