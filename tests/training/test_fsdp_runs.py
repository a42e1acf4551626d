"""Whole runs under FSDP2 in two processes: the same as in one, stopped and gone on with, and by the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.errors import RlhfError
from rlhf.recipe import load
from rlhf.training.run import Interrupted
from tests.tiers import tiered
from tests.training import children, runs, words
from tests.training.alike import assert_alike
from tests.training.test_deepspeed_runs import ROOT, command, recipe
from tests.training.together import together
from tests.training.two_processes import assert_goes_on_exactly, assert_same_run, figures, run_and_stop, run_each

FSDP: runs.Values = {"kind": "fsdp", "timeout_s": 120.0}
SMOKE = ROOT / "recipes" / "fsdp" / "smoke-cpu.yaml"
#: A critic with a transformer of its own, which lies whole beside a policy in pieces.
CRITIC: runs.Values = {"advantage": {"kind": "gae"}, "critic": {}}


def with_critic(folder: Path, trainer: runs.Values) -> Path:
    path = recipe(folder, trainer)
    values = yaml.safe_load(path.read_text())
    values["stages"][1] |= CRITIC
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


RECIPES = {
    "full": lambda folder, trainer: recipe(folder, trainer, involved=True),
    "lora": lambda folder, trainer: recipe(folder, trainer, involved=True, lora=True),
    "critic": with_critic,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, str]]:
    RECIPES["full"](folder / "full", FSDP)
    return together(run_and_stop, folder, timeout_s=300.0)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs in two processes that take long."""
    folder = tmp_path_factory.mktemp("others")
    for name in set(RECIPES) - {"full"}:
        RECIPES[name](folder / name, FSDP)
    together(run_each, folder, timeout_s=300.0)
    return folder


# --- what came of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(RECIPES, "full"))
def test_a_run_in_two_processes_is_that_in_one(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    if name == "full":
        request.getfixturevalue("said")
    alone = runs.run(RECIPES[name](tmp_path / "recipe", {"kind": "torch"}), tmp_path / "run").folder
    both = request.getfixturevalue("folder" if name == "full" else "others") / f"{name}-run"
    assert_every_update_reached_the_engine(both)
    assert_same_run(both, alone, with_sampler=False)


def assert_every_update_reached_the_engine(run: Path) -> None:
    lines = runs.lines(run)
    gaps = [line["delivery/canary_gap"] for line in lines if "delivery/canary_gap" in line]
    moved = [line["delivery/canary_moved"] for line in lines if "delivery/canary_moved" in line]
    assert len(gaps) >= 4 and max(gaps) < 1e-3 < max(moved)


def test_a_stopped_run_goes_on_exactly(said: list[dict[str, str]], folder: Path) -> None:
    assert_goes_on_exactly(said, folder / "stopped-run", folder / "full-run")


@pytest.mark.extended
def test_plain_torch_goes_on_where_fsdp_stopped(said: list[dict[str, str]], folder: Path, tmp_path: Path) -> None:
    """Moments are saved whole, so one process takes up what two have left."""
    path, out = recipe(tmp_path, FSDP, involved=True), tmp_path / "run"
    path.write_text(path.read_text().replace("checkpoint_every: 2", "checkpoint_every: 1"))
    together(first, tmp_path, timeout_s=300.0)
    ended = children.run(
        tmp_path, "train", "--resume", out, "stages.1.trainer={kind: torch}", "stages.0.trainer={kind: torch}"
    )
    assert ended.code == 0, ended.err
    for (stage, got), (_, wanted) in zip(figures(out), figures(folder / "full-run"), strict=True):
        got = {k: v for k, v in got.items() if "/sampler_" not in k}
        assert_alike(got, {k: wanted[k] for k in got}, stage, atol=1e-4, rtol=1e-4)


def first(rank: int, folder: Path) -> None:
    told = False

    def stop() -> None:
        nonlocal told
        if not told and (folder / "run" / "checkpoints" / "1-policy_gradient-000002" / "state.json").is_file():
            told = True
            signal.raise_signal(signal.SIGTERM)

    with words.on_every_step(folder / "recipe.yaml", stop), pytest.raises(Interrupted):
        runs.run(folder / "recipe.yaml", folder / "run")


@pytest.mark.extended
def test_the_recipe_that_shows_whether_it_works(tmp_path: Path) -> None:
    ended = command(SMOKE, "--out", tmp_path / "run", "--json")
    assert ended.returncode == 0, ended.stderr
    [line] = ended.stdout.strip().splitlines()
    assert json.loads(line)["n_episodes"] == 3 * 4 * 4
    assert (tmp_path / "run" / "report.html").is_file()
    assert "FSDP2" not in ended.stderr
    alone = children.run(tmp_path, "train", SMOKE, "--out", tmp_path / "alone", "--json")  # no launcher: one process
    assert alone.code == 0, alone.err
    assert len(runs.lines(tmp_path / "alone")) == len(runs.lines(tmp_path / "run"))


# --- what is refused --------------------------------------------------------------------------------------------------

PG: runs.Values = {"kind": "policy_gradient", "steps": 1, "trainer": {"kind": "fsdp"}}


@pytest.mark.parametrize(
    ("stage", "changes", "where", "says"),
    [
        ({"trainer": {"kind": "fsdp", "precision": "float16"}}, {}, "stages[0].trainer.precision", "bfloat16"),
        (
            {"critic": {"backbone": "policy"}, "advantage": {"kind": "gae"}},
            {},
            "stages[0].critic.backbone",
            "kind: fsdp",
        ),
        (
            {},
            {"policy": {**runs.BASE["policy"], "lora": {"dora": True}}},
            "stages[0].trainer.kind",
            "whole base weights",
        ),
        (
            {},
            {"policy": {"kind": "pretrained", "path": "a/model", "dtype": "float16"}},
            "stages[0].trainer.kind",
            "float32 and bfloat16",
        ),
        (
            {"trainer": {"kind": "torch"}},
            {"policy": {"kind": "pretrained", "path": "a/model", "dtype": "float16"}},
            "stages[0].trainer.kind",
            "float32 and bfloat16",
        ),
    ],
)
def test_what_does_not_go_with_pieces_is_refused(
    tmp_path: Path, stage: dict[str, Any], changes: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(RlhfError) as error:
        load(runs.write(tmp_path, [{**PG, **stage}], **changes))
    assert error.value.where.startswith(where) and says in str(error.value)


def test_pairs_are_refused_beside_pieces(tmp_path: Path) -> None:
    with pytest.raises(RlhfError, match="sharded weights") as error:
        load(runs.write(tmp_path, [{"kind": "preference"}, PG]))
    assert error.value.where == "stages[0].kind" and "trainer.kind: fsdp" in str(error.value)
