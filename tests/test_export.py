"""`rlhf export`, and checkpoints as transformers and PEFT read them, without anything of this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import rlhf
from agents.stores import copies
from agents.stores.copies import content_hash
from agents.stores.store import Store
from rlhf.build.train import policy_of
from rlhf.data import Task, Trajectory
from rlhf.recipe import load
from tests.commands import last_json, run
from tests.training import runs
from tests.training.words import WORDS

SUPERVISED = {"kind": "supervised", "n_demonstrations": 64, "epochs": 6, "batch_size": 8, "optimizer": {"lr": 1.0e-2}}
STAGE = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4, "optimizer": {"lr": 1.0e-2}}
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 4, "dropout": 0.1}},
    "rslora": {"lora": {"rank": 4, "rslora": True, "target_modules": ["q_proj", "down_proj"]}},
}

#: Nats. W + BA is rounded once to float32 where the adapter is merged, and not where it is added to the output.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FORMS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    policy = {**runs.BASE["policy"], **FORMS[request.param]}
    changes: dict[str, Any] = {"policy": policy, "evaluation": {"n_tasks": 4}}
    return runs.run(runs.write(folder, [SUPERVISED, STAGE], **changes), folder / "run").folder


def export(*arguments: str | Path) -> Result:
    return run("export", *arguments)


@torch.no_grad()
def logprobs(model: Any, tokenizer: Any) -> torch.Tensor:
    """Of every token of some conversations, `[N]`, as transformers computes them."""
    found = []
    for word in WORDS:
        said = [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]
        ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(said, tokenize=False)).input_ids])
        logits = model.eval()(ids).logits.float().log_softmax(-1)
        found.append(logits[0, :-1].gather(-1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def read_elsewhere(checkpoint: Path) -> tuple[Any, Any]:
    """The policy of a checkpoint by the documented calls of transformers and PEFT."""
    folder = checkpoint / "policy"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder), tokenizer
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)), tokenizer


def test_what_is_exported_says_what_the_checkpoint_said(trained: Path, tmp_path: Path) -> None:
    checkpoint, out = runs.newest(trained), tmp_path / "model"
    record = last_json(export(checkpoint, "--out", out, "--json"))
    is_adapter = (checkpoint / "policy" / "adapter_config.json").is_file()
    assert record["merged"] == is_adapter and record["checkpoint"] == str(checkpoint)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    names = {p.name for p in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any("adapter" in name for name in names)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    of_checkpoint, its_tokenizer = read_elsewhere(checkpoint)
    assert tokenizer.chat_template == its_tokenizer.chat_template and tokenizer.get_vocab() == its_tokenizer.get_vocab()
    new, old = logprobs(model, tokenizer), logprobs(of_checkpoint, its_tokenizer)
    assert float((new - old).abs().max()) <= (TOLERANCE if is_adapter else 0.0)
    # The adapter matters, and the project's own reader finds the same policy.
    begun, _ = read_elsewhere(trained / "checkpoints" / "0-supervised-000000")
    assert float((old - logprobs(begun, its_tokenizer)).abs().max()) > 100 * TOLERANCE
    own = policy_of(load(str(trained / "recipe.yaml")), checkpoint)
    torch.testing.assert_close(logprobs(plain(own.model), own.tokenizer), old, atol=TOLERANCE, rtol=0)


def plain(model: Any) -> Any:
    """With the attention of transformers in the place of the one for packed rows."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    base.set_attn_implementation("eager")
    return model


def test_the_policy_in_a_checkpoint_stands_for_it(trained: Path, tmp_path: Path) -> None:
    ended = export(runs.newest(trained) / "policy", "--out", tmp_path / "deep" / "model")
    assert ended.exit_code == 0 and "MB" in ended.output, ended.output
    assert (tmp_path / "deep" / "model" / "config.json").is_file()


def test_a_run_with_a_reward_of_a_program_is_exported_and_extrapolated_without_it(tmp_path: Path) -> None:
    def close(task: Task, trajectory: Trajectory) -> float:
        return len(trajectory.turns) / 4

    policy = {**runs.BASE["policy"], **FORMS["lora"]}
    path = runs.write(tmp_path, [SUPERVISED | {"epochs": 1}, STAGE], policy=policy, evaluation={"n_tasks": 4})
    given = rlhf.train(path, rewards={"close": close}, out=tmp_path / "run", progress=False, memory_check=False).run
    assert "python:rewards.close" in (given / "recipe.yaml").read_text()
    assert last_json(export(given, "--out", tmp_path / "model", "--json"))["merged"]
    begin = given / "checkpoints" / "0-supervised-000000"
    last_json(run("extrapolate", given, "--start", begin, "--out", tmp_path / "further", "--json"))
    for name in ("model", "further"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.model_type == "qwen3"
    (given / "recipe.yaml").write_text((given / "recipe.yaml").read_text() + "# changed")
    refused = export(given, "--out", tmp_path / "again")
    assert refused.exit_code == 2 and "recipe.yaml" in refused.output, refused.output


# --- with a store ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remembering")
    agent = {"kind": "remembering", "inner": {"kind": "chat", "system": ""}, "store": {"kind": "cases", "k": 1}}
    path = runs.write(folder, [SUPERVISED | {"epochs": 1}, STAGE], agent=agent, evaluation={"n_tasks": 4})
    return runs.run(path, folder / "run").folder


def test_the_store_goes_with_the_model(remembering: Path, tmp_path: Path) -> None:
    checkpoint, out = runs.newest(remembering), tmp_path / "model"
    record = last_json(export(checkpoint, "--out", out, "--json"))
    with Store(out / copies.FILE) as store, Store(checkpoint / copies.FILE) as saved:
        assert content_hash(store) == content_hash(saved) == (out / copies.HASH).read_text()
        assert record["n_entries"] == len(store.entries()) > 0
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen3"
    said = " ".join(export(checkpoint, "--out", tmp_path / "again").output.split())
    assert f"with a store of {record['n_entries']} entries" in said
    # What it holds is read in the run, in the checkpoint and beside the model.
    found = [last_json(run("memory", folder, "--json")) for folder in (remembering, checkpoint, out)]
    assert found[0] == found[1] == found[2] and found[0]["n_entries"] == record["n_entries"]


def test_a_store_that_is_not_what_was_saved_is_not_exported(remembering: Path, tmp_path: Path) -> None:
    checkpoint = runs.newest(remembering)
    (checkpoint / copies.HASH).write_text("0" * len((checkpoint / copies.HASH).read_text()))
    assert f"{copies.HASH}: this file has changed since it was written" in refused(
        checkpoint, "--out", tmp_path / "model"
    )
    assert list(tmp_path.iterdir()) == []


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    stage = {**STAGE, "steps": 6, "evaluate_every": 2}
    path = runs.write(folder, [SUPERVISED | {"epochs": 1}, stage], evaluation={"n_tasks": 4})
    return runs.run(path, folder / "run").folder


def refused(*arguments: str | Path) -> str:
    ended = export(*arguments)
    assert ended.exit_code == 2 and "Traceback" not in ended.output, ended.output
    return " ".join(ended.output.split())


def test_an_existing_folder_is_left_alone(finished: Path, tmp_path: Path) -> None:
    out, taken = tmp_path / "model", tmp_path / "model-2"
    out.mkdir()
    taken.symlink_to("nowhere")
    said = refused(runs.newest(finished), "--out", out)
    assert "the folder exists" in said and f"do: --out {tmp_path / 'model-3'}, or move" in said
    assert list(out.iterdir()) == [] and sorted(tmp_path.iterdir()) == [out, taken]
    assert "got: a file" in refused(runs.newest(finished), "--out", taken)
    assert "do: --out /model-2, or" in refused(runs.newest(finished), "--out", "/")


def test_a_run_gives_its_newest_checkpoint(finished: Path, tmp_path: Path) -> None:
    exported = last_json(export(finished, "--out", tmp_path / "model", "--json"))
    assert exported["checkpoint"] == str(runs.newest(finished)) and (tmp_path / "model" / "config.json").is_file()


def test_a_run_without_a_checkpoint_is_told_of(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text((finished / "recipe.yaml").read_text())
    said = refused(tmp_path / "run", "--out", tmp_path / "model")
    assert "this run has no checkpoint yet" in said and f"rlhf train --resume {tmp_path / 'run'}" in said


def test_a_name_that_is_nearly_one(finished: Path, tmp_path: Path) -> None:
    said = refused(finished / "checkpoints" / "1-policy_gradient-00006", "--out", tmp_path / "model")
    assert "did you mean '1-policy_gradient-000006'?" in said


def test_a_place_that_is_no_checkpoint_is_told_the_run_that_may_be_meant(finished: Path, tmp_path: Path) -> None:
    said = refused(finished / "checkpoints", "--out", tmp_path / "model")
    assert f"rlhf export {finished} takes the newest" in said
    said = refused(finished.with_name(f"{finished.name}x"), "--out", tmp_path / "model")
    assert f"did you mean '{finished}'?" in said


def test_a_model_and_a_place_that_is_nothing(finished: Path, tmp_path: Path) -> None:
    for asked in (tmp_path, tmp_path / "nothing" / "here"):
        assert "not a checkpoint of a run" in refused(asked, "--out", tmp_path / "model")


def test_a_damaged_checkpoint_is_not_exported(finished: Path, tmp_path: Path) -> None:
    path = finished / "checkpoints" / "1-policy_gradient-000000" / "policy" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    said = refused(path.parent.parent, "--out", tmp_path / "model")
    path.write_bytes(content)
    assert "this checkpoint is damaged" in said and f"{len(content) - 1} bytes instead of {len(content)}" in said
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "the model cannot be written" in refused(runs.newest(finished), "--out", tmp_path / "file" / "model")


def test_a_model_has_nothing_to_redact(tmp_path: Path) -> None:
    found = run("export", tmp_path, "--out", tmp_path / "out", "--redact", "foo")
    assert found.exit_code == 2 and "--redact: a model has no text to redact" in found.stderr
