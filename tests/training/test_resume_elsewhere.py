"""A run that goes on elsewhere: in another number of processes, at another ZeRO stage, with or without DeepSpeed.

Updates are sums in another order there, so what comes out equals the uninterrupted run within rounding.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf.errors import RecipeError
from rlhf.evaluation.changes import read_changes
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Fsdp, Torch
from rlhf.training.backends.zero_optimizer_state import named, numbered
from rlhf.training.checkpoints.store import load_trainer
from rlhf.training.policy.model import Pretrained
from rlhf.training.run import Interrupted
from tests.training import children, runs, test_revise, words
from tests.training.alike import assert_alike
from tests.training.test_deepspeed import SCHEDULE, go_on, rows
from tests.training.test_deepspeed_runs import deepspeed, recipe
from tests.training.tiny import policy
from tests.training.together import together

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

#: Of weights and figures of the log; the learning rate is 2e-3, so a moment that is lost shows at once.
TOLERANCE = 1e-4


@contextmanager
def stopping(path: Path, out: Path, after: int) -> Iterator[None]:
    """Ask for an end in the step after one whose checkpoint is there: in the midst of it alone, behind it together."""

    told = False

    def stop() -> None:
        nonlocal told
        if not told and (out / "checkpoints" / f"1-policy_gradient-{after:06d}" / "state.json").is_file():
            told = True  # a second time would end the process at once
            signal.raise_signal(signal.SIGTERM)

    with words.on_every_step(path, stop), pytest.raises(Interrupted):
        yield


def first(rank: int, folder: Path) -> None:
    path, out = folder / "zero2" / "recipe.yaml", folder / "run"
    with stopping(path, out, 1):
        runs.run(path, out)


def last(rank: int, folder: Path) -> str:
    return runs.run(folder / "zero3" / "recipe.yaml", folder / "run", resume=True).said


def assert_close(found: Path, wanted: Path) -> None:
    """The logs and the policies of two runs."""
    lines = list(zip(runs.lines(found), runs.lines(wanted), strict=True))
    assert sum("loss/total" in line for line, _ in lines) == 4
    for got, expected in lines:
        figures = {k: v for k, v in expected.items() if isinstance(v, float) and "/sampler_" not in k}
        assert_alike({k: got[k] for k in figures}, figures, str(got["step"]), atol=TOLERANCE, rtol=TOLERANCE)
    of_one, of_other = (runs.newest(run) / "policy" / "model.safetensors" for run in (found, wanted))
    weights = load_file(of_one)
    for name, value in load_file(of_other).items():
        torch.testing.assert_close(weights[name], value, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain torch in one process, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return runs.run(recipe(folder, {"kind": "torch"}), folder / "run").folder


@NEEDS_DEEPSPEED
@pytest.mark.extended
def test_from_two_processes_to_one_and_to_two_in_pieces(tmp_path: Path, whole: Path) -> None:
    for name, trainer in (("zero2", deepspeed(2)), ("torch", {"kind": "torch"}), ("zero3", deepspeed(3))):
        path = recipe(tmp_path / name, trainer)
        every_step = "checkpoint_every: 1" + "\n  checkpoint_in_background: true" * (name == "zero3")
        path.write_text(path.read_text().replace("checkpoint_every: 2", every_step))
    together(first, tmp_path)
    assert runs.newest(tmp_path / "run").name == "1-policy_gradient-000002"
    with stopping(tmp_path / "torch" / "recipe.yaml", tmp_path / "run", 3):
        runs.run(tmp_path / "torch" / "recipe.yaml", tmp_path / "run", resume=True)
    assert runs.newest(tmp_path / "run").name == "1-policy_gradient-000003"
    said, _ = together(last, tmp_path)
    assert "resuming from" in said and "1-policy_gradient-000003" in said
    assert_close(tmp_path / "run", whole)


@NEEDS_DEEPSPEED
def test_from_plain_torch_to_deepspeed_by_the_command_line(tmp_path: Path, whole: Path) -> None:
    path, out = recipe(tmp_path, {"kind": "torch"}), tmp_path / "run"
    with stopping(path, out, 2):
        runs.run(path, out)
    ended = children.run(tmp_path, "train", "--resume", out, "stages.1.trainer={kind: deepspeed, zero_stage: 1}")
    assert ended.code == 0, ended.err
    assert (out / "deepspeed-1-policy_gradient.json").is_file()
    assert_close(out, whole)


def test_what_is_no_matter_of_the_trainer_is_refused(tmp_path: Path) -> None:
    path, out = recipe(tmp_path, {"kind": "torch"}), tmp_path / "run"
    with stopping(path, out, 2):
        runs.run(path, out)
    ended = children.run(
        tmp_path, "train", "--resume", out, "stages.1.trainer={kind: torch, gradient_checkpointing: true}",
        "stages.1.group_size=2",
    )  # fmt: skip
    assert ended.code == 2 and "another value of stages.1.group_size: 2 instead of " in ended.err


def in_bfloat16(rank: int, folder: Path) -> None:
    """Three updates of a float32 policy that is computed in bfloat16, and their checkpoint."""
    made = policy()
    trainer = Fsdp(precision="bfloat16").start(made, SCHEDULE, 8)
    go_on(trainer, rows(), 0, 3)
    made.save(folder / "policy")
    state = {"optimizer": trainer.optimizer.state_dict(), "torch_rng": torch.get_rng_state(), "kept": {}}
    torch.save(state, folder / "trainer.pt")
    trainer.close()


@pytest.mark.parametrize("form", ["numbers", "names"])
def test_a_float32_policy_goes_on_from_float32_masters(tmp_path: Path, form: str) -> None:
    together(in_bfloat16, tmp_path, 1)
    made = Pretrained(path=str(tmp_path / "policy")).build(0)
    names = [name for name, _ in made.model.named_parameters()]
    saved = torch.load(tmp_path / "trainer.pt")
    wanted = {name: saved["optimizer"]["state"][i]["master"] for i, name in enumerate(names)}
    assert any(not torch.equal(p, wanted[name]) for name, p in made.model.named_parameters()), "they are finer"
    if form == "names":  # as DeepSpeed's are
        torch.save({**saved, "optimizer": named(saved["optimizer"], names)}, tmp_path / "trainer.pt")
    trainer = Torch().start(made, SCHEDULE, 8)
    load_trainer(tmp_path, trainer.optimizer, names=names)
    assert all(torch.equal(p, wanted[name]) for name, p in made.model.named_parameters())
    go_on(trainer, rows(), 3, 4)
    assert all({*state} == {"step", "exp_avg", "exp_avg_sq"} for state in trainer.optimizer.state.values())


# --- the two forms of an optimiser's state ----------------------------------------------------------------------------


def made(names: dict[str, Any], n_updates: int) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in names.values()]
    optimizer = AdamW().build(parameters)
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_updates):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


SHAPES = {"head": (3,), "body": (2, 2)}


@pytest.mark.parametrize("n_updates", [0, 3])
def test_by_name_and_by_number_are_the_same(n_updates: int) -> None:
    optimizer = made(SHAPES, n_updates)
    state = optimizer.state_dict()
    by_name = named(state, list(SHAPES))
    assert by_name["n_steps"] == n_updates and list(by_name["parameters"]) == (list(SHAPES) if n_updates else [])
    again = numbered(by_name, list(SHAPES), state["param_groups"])
    assert again["param_groups"] == state["param_groups"] and again["state"].keys() == state["state"].keys()
    for number, values in state["state"].items():
        assert all(torch.equal(values[key], again["state"][number][key]) for key in values)


def test_states_of_other_parameters_are_refused() -> None:
    state = made(SHAPES, 1).state_dict()
    with pytest.raises(ValueError, match="2 trained parameters, and here are 1"):
        named(state, ["head"])
    with pytest.raises(ValueError, match="body is in one of the two only"):
        numbered(named(state, list(SHAPES)), ["head", "tail"], state["param_groups"])
    del state["state"][0]
    with pytest.raises(ValueError, match="DeepSpeed counts them together"):
        named(state, list(SHAPES))


# --- with another recipe ---


def run_and_change(rank: int, folder: Path) -> list[str]:
    """Run, and resume the finished run with another rate, and then with more steps too."""
    told, values = [], yaml.safe_load((folder / "recipe.yaml").read_text())
    for i, changes in enumerate(({}, {"optimizer": test_revise.CONSTANT | {"lr": 1e-3}}, {"steps": 2})):
        values["stages"][1] |= changes
        path = folder / f"{rank}.yaml"
        path.write_text(yaml.safe_dump(values))
        try:
            told.append(runs.run(path, folder / "run", resume=i > 0).said)
        except RecipeError as error:
            told.append(str(error))
    return told


def test_processes_agree_on_what_changes(tmp_path: Path) -> None:
    path = test_revise.recipe(tmp_path, 1)
    values = yaml.safe_load(path.read_text())
    for stage in values["stages"]:
        stage["trainer"] = {"kind": "fsdp", "timeout_s": 60.0}
    path.write_text(yaml.safe_dump(values))
    both = together(run_and_change, tmp_path)
    assert all("this stage is finished" in told[1] for told in both)
    assert f"{test_revise.LR}: 0.001 instead of 0.003 from step 2 on" in both[0][2] and not both[1][2]
    assert {change.key for change in read_changes(tmp_path / "run")} == {test_revise.LR, "stages.1.steps"}
    assert runs.curve(tmp_path / "run", "optimizer/lr")[-2:] == [3e-3, 1e-3]
