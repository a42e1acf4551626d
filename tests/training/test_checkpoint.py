"""Checkpoints: whole or absent, found by age, and clear about what is wrong with them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rlhf.build.train import train
from rlhf.errors import CheckpointError, RlhfError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.recipe import load
from rlhf.terminal import CleanConsole
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from rlhf.training.checkpoints.writer import Writer
from rlhf.training.policy.model import Lora, Policy, resume
from tests.training import runs, words
from tests.training.tiny import policy

STATE = State(1, "policy_gradient", 4, False, 9, n_updates=8, n_logged=7, train_s=1.5, results={"before": {"n": 3}})


@pytest.fixture(scope="module")
def small() -> Policy:
    return policy(n_layers=1)


# --- writing and finding ---------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path, small: Policy) -> None:
    optimizer = AdamW(lr=0.1).build(small.model.parameters())
    for parameter in small.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.manual_seed(4)
    folder = store.save(tmp_path, STATE, small, optimizer)
    drawn = torch.rand(3)
    assert folder == tmp_path / "1-policy_gradient-000004" and store.load_state(folder) == STATE
    again = AdamW(lr=0.7).build(small.model.parameters())
    store.load_trainer(folder, again)
    assert torch.equal(torch.rand(3), drawn), "the generator goes on from where it was"
    assert again.param_groups[0]["lr"] == 0.7, "settings are those of the recipe"
    for old, new in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_saved_model_stops_where_its_template_ends_a_turn(tmp_path: Path) -> None:
    made = policy()
    made.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    made.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = store.save(tmp_path, STATE, made, None)
    ends = GenerationConfig.from_pretrained(folder / "policy").eos_token_id
    assert ends == made.tokenizer.convert_tokens_to_ids(["<|im_end|>", made.tokenizer.eos_token])


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_of_an_adapter_asks_nobody_for_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *given, **_: asked.append(given))
    made = policy(n_layers=1, lora=Lora(rank=2))
    made.model.peft_config["default"].base_model_name_or_path = "somebody/base"
    writer = Writer()
    folder = store.save(tmp_path, STATE, made, None, writer=writer if in_background else None)
    writer.wait()
    assert not asked and (folder / "policy" / "adapter_model.safetensors").is_file()


def test_the_last_two_and_the_begin_of_each_stage_are_kept(tmp_path: Path, small: Policy) -> None:
    for step in range(5):
        store.save(tmp_path, replace(STATE, step=step), small, None)
    assert [p.name[-6:] for p in store.every(tmp_path)] == ["000000", "000003", "000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in store.every(tmp_path)], "nothing hidden"


def test_age_is_a_number(tmp_path: Path) -> None:
    # As text, stage 10 would come before stage 2 and step 1000000 before step 999999.
    names = ["2-policy_gradient-999999", "2-policy_gradient-1000000", "10-supervised-000000"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert [p.name for p in store.every(tmp_path)] == names
    newest = store.latest(tmp_path)
    assert newest is not None and newest.name == names[-1]


def test_a_folder_without_a_state_is_no_checkpoint(tmp_path: Path, small: Policy) -> None:
    good = store.save(tmp_path, STATE, small, None)
    bad = store.save(tmp_path, replace(STATE, step=5), small, None)
    (bad / "state.json").unlink()
    assert store.latest(tmp_path) == good and store.incomplete(tmp_path) == [bad]
    assert store.latest(tmp_path / "nothing") is None


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, small: Policy) -> None:
    for name in (".1-policy_gradient-000003.partial", ".1-policy_gradient-000002.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert store.every(tmp_path) == []
    store.save(tmp_path, STATE, small, None)
    assert [p.name for p in tmp_path.iterdir()] == ["1-policy_gradient-000004"]


def test_a_step_is_written_again_in_one_piece(tmp_path: Path, small: Policy) -> None:
    store.save(tmp_path, STATE, small, None)
    folder = store.save(tmp_path, replace(STATE, n_episodes=5), small, None)
    assert store.load_state(folder).n_episodes == 5


@pytest.mark.parametrize("after", ["the old one was moved", "the new one is in place"])
def test_a_kill_while_a_step_is_written_again_leaves_it(
    tmp_path: Path, small: Policy, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    folder = store.save(tmp_path, STATE, small, None)
    renamed, to_be = Path.rename, 1 if after == "the old one was moved" else 2

    def killed(self: Path, target: Path) -> Path:
        nonlocal to_be
        found, to_be = renamed(self, target), to_be - 1
        if not to_be:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        store.save(tmp_path, STATE, small, None)
    assert store.to_resume(tmp_path, lambda _: None) == folder and store.load_state(folder) == STATE


def test_a_place_that_cannot_be_written(tmp_path: Path, small: Policy) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match="could not be written") as error:
        store.save(root, STATE, small, None)
    assert "none yet" in error.value.hint and "MB free" in error.value.expected


# --- what is wrong with a checkpoint of a run ------------------------------------------------------------------------

STAGES = [
    {"kind": "supervised", "n_demonstrations": 4, "epochs": 1},
    {"kind": "policy_gradient", "steps": 3, "tasks_per_step": 2, "group_size": 2, "checkpoint_every": 1},
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a recipe whose run was stopped in its third step, with checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    path = runs.write(folder, STAGES, evaluation={"n_tasks": 4})
    runs.stop(path, folder / "run", "1-policy_gradient-000002")
    yield folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy"


NEWEST, OLDER = "1-policy_gradient-000002", "1-policy_gradient-000001"


def resumed(folder: Path) -> runs.Done:
    return runs.run(folder / "recipe.yaml", folder / "run", resume=True)


def fell_back(folder: Path, harm: Callable[[Path], object]) -> str:
    """What is said when the newest checkpoint is harmed: the run goes on from the one before, to the same end."""
    root = folder / "run" / "checkpoints"
    shutil.copytree(folder, folder.with_name("whole"))
    whole = resumed(folder.with_name("whole"))
    harm(root / NEWEST)
    done = resumed(folder)
    assert f"{root / NEWEST}, now {NEWEST}.damaged" in done.said
    assert f"resuming from {root / OLDER}" in done.said
    assert (root / f"{NEWEST}.damaged").is_dir() and (root / NEWEST).is_dir(), "put aside, and written anew"
    assert runs.weights(runs.newest(done.folder)) == runs.weights(runs.newest(whole.folder))
    assert runs.lines(done.folder) == runs.lines(whole.folder)
    [line] = [line for line in done.said.splitlines() if line.startswith("left out")]
    return line


def refused(folder: Path) -> str:
    """What is said of the newest checkpoint; without it, the run goes on from the one before."""
    with pytest.raises(CheckpointError) as error:
        resumed(folder)
    message = str(error.value)
    assert NEWEST in message and f"remove this checkpoint to resume from {OLDER}" in message
    shutil.rmtree(folder / "run" / "checkpoints" / NEWEST)
    done = resumed(folder)
    assert f"resuming from {folder / 'run' / 'checkpoints' / OLDER}" in done.said
    assert done.result["n_episodes"] == 3 * 2 * 2
    return message


def test_a_stopped_run_goes_on_from_its_newest_checkpoint(folder: Path) -> None:
    assert NEWEST in resumed(folder).said


def test_a_checkpoint_without_a_state_is_left_out_and_named(folder: Path) -> None:
    (folder / "run" / "checkpoints" / NEWEST / "state.json").unlink()
    said = resumed(folder).said
    assert f"left out, as it has no state.json: {folder / 'run' / 'checkpoints' / NEWEST}" in said
    assert f"resuming from {folder / 'run' / 'checkpoints' / OLDER}" in said


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_state_that_is_cut(folder: Path, text: str) -> None:
    assert "state.json" in fell_back(folder, lambda newest: (newest / "state.json").write_text(text))


@pytest.mark.parametrize("text", ['{"stage": 1}', '{"later": 1}'])
def test_a_state_of_another_version(folder: Path, text: str) -> None:
    newest = folder / "run" / "checkpoints" / NEWEST
    (newest / "files.json").unlink()  # by which it would be known as changed
    (newest / "state.json").write_text(text)
    assert "the checkpoint is not readable" in refused(folder)


@pytest.mark.parametrize("n_bytes", [0, 2000, -10], ids=["empty", "half", "end"])
def test_an_optimizer_state_that_is_cut(folder: Path, n_bytes: int) -> None:
    def cut(newest: Path) -> None:
        content = (newest / "trainer.pt").read_bytes()
        (newest / "trainer.pt").write_bytes(content[:n_bytes])

    size = (folder / "run" / "checkpoints" / NEWEST / "trainer.pt").stat().st_size
    left = n_bytes if n_bytes >= 0 else size + n_bytes
    assert f"trainer.pt has {left} bytes instead of {size}" in fell_back(folder, cut)


def test_weights_that_are_cut(folder: Path) -> None:
    def cut(newest: Path) -> None:
        path = newest / "policy" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    assert "policy/model.safetensors has" in fell_back(folder, cut)


def test_weights_that_are_gone(folder: Path) -> None:
    said = fell_back(folder, lambda newest: (newest / "policy" / "model.safetensors").unlink())
    assert "policy/model.safetensors is missing" in said


def test_without_a_whole_checkpoint_a_run_begins_again(folder: Path) -> None:
    root = folder / "run" / "checkpoints"
    for found in store.every(root):
        (found / "trainer.pt").write_bytes(b"")
    done = resumed(folder)
    assert done.said.count("left out, as trainer.pt has 0 bytes") == 4 and "resuming" not in done.said
    assert done.result["n_episodes"] == 3 * 2 * 2


def test_content_that_is_spoilt_at_its_full_length_is_refused(folder: Path) -> None:
    path = folder / "run" / "checkpoints" / NEWEST / "trainer.pt"
    path.write_bytes(b"x" * path.stat().st_size)
    message = refused(folder)
    assert f"{path}: this file has changed since it was written" in message and "other content" in message


def put_in_place(folder: Path, other: Policy, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Make the newest checkpoint of a run a whole one of another policy."""
    root = folder / "run" / "checkpoints"
    store.save(root, store.load_state(root / NEWEST), other, optimizer, keep="all")


def test_a_policy_of_another_model(folder: Path) -> None:
    put_in_place(folder, policy(hidden_size=16, n_layers=1, n_heads=2))
    message = refused(folder)
    assert "another model: hidden_size 16" in message and "hidden_size 32" in message


def test_an_adapter_where_the_recipe_trains_everything(folder: Path) -> None:
    made = policy(hidden_size=32, n_layers=1, n_heads=2, lora=Lora(rank=2))
    made.save_base(folder / "run")
    put_in_place(folder, made)
    assert "another model: an adapter True" in refused(folder)


def test_an_optimizer_of_another_model(folder: Path) -> None:
    # The same number of parameters, in other shapes: torch would notice in the next step, with a message of its own.
    other = policy(hidden_size=16, n_layers=1, n_heads=2)
    optimizer = AdamW().build(other.model.parameters())
    for parameter in other.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    run = folder / "run"
    own = resume(load(folder / "recipe.yaml").policy, run / "checkpoints" / NEWEST / "policy", run)
    put_in_place(folder, own, optimizer)
    assert "another model's state" in refused(folder)


def test_a_folder_that_is_no_run(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run"):
        runs.run(folder / "recipe.yaml", tmp_path / "nothing", resume=True)


def test_a_run_without_any_checkpoint_begins_again(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")
    done = resumed(folder)
    assert "resuming" not in done.said and done.result["n_episodes"] == 3 * 2 * 2
    steps = [(line["stage"], line["step"]) for line in runs.log(folder / "run") if "rollout/success" in line]
    assert steps == [("1-policy_gradient", step) for step in (1, 2, 3)]
    assert json.loads((folder / "run" / "result.json").read_text()).keys() == {"before", "after"}


# --- what is said of runs that are over, or hardly begun -------------------------------------------------------------


def test_a_finished_run_says_so_and_stays_as_it_is(folder: Path) -> None:
    first = resumed(folder)
    before = {p: p.read_bytes() for p in first.folder.rglob("*") if p.is_file() and p.name != "report.html"}
    again = resumed(folder)
    newest = runs.newest(first.folder)
    assert "this run is finished: success" in again.said and f"rlhf export {newest} --out FOLDER" in again.said
    assert again.result == first.result and "resuming" not in again.said
    assert before == {p: p.read_bytes() for p in first.folder.rglob("*") if p.is_file() and p.name != "report.html"}


@pytest.mark.parametrize("at", ["_sinks", "run_stages", "finish"])
def test_an_engine_is_closed_wherever_a_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    closed, close = [], TransformersEngine.close

    async def noted(self: TransformersEngine) -> None:
        closed.append(self)
        await close(self)

    def fails(*_: object, **__: object) -> None:
        raise RlhfError("the disk is full")

    monkeypatch.setattr(TransformersEngine, "close", noted)
    monkeypatch.setattr(f"rlhf.build.train.{at}", fails)
    monkeypatch.setattr("rlhf.sinks.Metrics.close", fails)
    with pytest.raises(RlhfError, match="the disk is full"):
        runs.run(runs.write(tmp_path, STAGES, evaluation={"n_tasks": 4}), tmp_path / "run")
    assert len(closed) == 1


def test_a_run_that_fails_before_its_first_checkpoint_says_what_there_is(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [STAGES[0], *STAGES], evaluation={"n_tasks": 4})
    out, shown = tmp_path / "run", io.StringIO()

    def fall_over() -> None:
        if any(out.glob("demonstrations/*.jsonl")):  # those of the first stage are played
            raise RuntimeError("the lamp fell over")

    with words.on_every_step(path, fall_over), pytest.raises(RlhfError, match="demonstrations"):
        train(load(path), out, console=CleanConsole(file=shown, width=500))
    said = shown.getvalue()
    assert f"there is no checkpoint yet; {out} holds demonstrations, " in said
    assert f"rlhf train --resume {out}" in said
    done = runs.run(path, out, resume=True)
    assert done.result["n_episodes"] == 3 * 2 * 2 and "there is no checkpoint yet" not in done.said


# --- how many stay ---------------------------------------------------------------------------------------------------


def test_a_stage_may_keep_more(tmp_path: Path, small: Policy) -> None:
    for stage, keep in ((0, 3), (1, 2), (2, "all"), (3, 2)):
        for step in range(6):
            store.save(tmp_path, replace(STATE, stage=stage, step=step), small, None, keep=keep)  # type: ignore[arg-type]
    steps = {stage: [int(p.name[-6:]) for p in store.every(tmp_path) if p.name[0] == str(stage)] for stage in range(4)}
    # Where nothing is said, the last two of the whole run stay; what a stage asked for stays in later ones too.
    assert steps == {0: [0, 3, 4, 5], 1: [0], 2: [0, 1, 2, 3, 4, 5], 3: [0, 4, 5]}


def test_what_was_a_reference_stays(tmp_path: Path, small: Policy) -> None:
    names = ["1-policy_gradient-000001", "1-policy_gradient-000003"]
    for step in range(7):
        state = replace(STATE, step=step, references=names[: (step >= 1) + (step >= 3)])
        store.save(tmp_path, state, small, None)
    assert [int(p.name[-6:]) for p in store.every(tmp_path)] == [0, 1, 3, 5, 6]
    assert store.load_state(tmp_path / "1-policy_gradient-000006") == state
    assert state.reference == names[1]
    assert replace(state, stage=2).reference == "2-policy_gradient-000000", "each stage begins with its own"


def test_the_best_of_the_watched_stays(tmp_path: Path, small: Policy) -> None:
    best = {1: "", 2: "1-policy_gradient-000002", 3: "1-policy_gradient-000002", 4: "1-policy_gradient-000004"}
    for step in range(9):
        name = best.get(step, "1-policy_gradient-000004" if step else "")
        store.save(tmp_path, replace(STATE, step=step, best=name, best_low=step / 10), small, None)
        if step == 5:
            assert [int(p.name[-6:]) for p in store.every(tmp_path)] == [0, 4, 5], "the former best is gone"
    assert [int(p.name[-6:]) for p in store.every(tmp_path)] == [0, 4, 7, 8]


def test_a_run_keeps_what_was_best_and_says_which(tmp_path: Path) -> None:
    stage = {**STAGES[1], "steps": 8, "evaluate_every": 2, "checkpoint_every": 0, "optimizer": {"lr": 0.01}}
    done = runs.run(runs.write(tmp_path, [STAGES[0], stage], evaluation={"n_tasks": 4}), tmp_path / "run")
    lows = {line["step"]: line["eval/success_low"] for line in runs.log(done.folder) if "eval/success_low" in line}
    watched = {step: low for step, low in lows.items() if step in (2, 4, 6)}
    assert len(watched) == 3
    best = max(watched, key=lambda step: (watched[step], -step))  # the earliest of equals
    state = store.load_state(runs.newest(done.folder))
    assert (state.best, state.best_low) == (f"1-policy_gradient-{best:06d}", watched[best])
    assert (done.folder / "checkpoints" / state.best / "state.json").is_file()


def test_the_evaluation_before_training_can_be_left_out_and_changes_no_step(tmp_path: Path) -> None:
    stage = {**STAGES[1], "steps": 2}
    done = {
        before: runs.run(
            runs.write(tmp_path / str(before), [stage], evaluation={"n_tasks": 4, "before": before}),
            tmp_path / str(before) / "run",
        )
        for before in (True, False)
    }
    assert done[False].result["success_before"] is None and done[False].result["success_after"] is not None
    assert json.loads((done[False].folder / "result.json").read_text()).keys() == {"after"}
    steps = [[line for line in runs.lines(one.folder) if "rollout/success" in line] for one in done.values()]
    assert steps[0] == steps[1] and len(steps[0]) == 2
    assert runs.weights(runs.newest(done[True].folder)) == runs.weights(runs.newest(done[False].folder))
