"""One byte that is changed at full length, in any file that a run goes on from: refused by name, or without effect."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf import digests
from rlhf.errors import CheckpointError, RlhfError
from rlhf.training.checkpoints import store
from tests.commands import run as command
from tests.test_resume import LORA, LOSS, POLICY_GRADIENT, SHORT, SUPERVISED, everything
from tests.training import runs

#: With a reference that is read from the stage's begin, a store, a critic; and with an adapter over a base of its own.
STORE = {"kind": "remembering", "inner": {"kind": "chat", "system": ""}, "store": {"kind": "cases"}}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"agent": STORE, "stage": {"loss": LOSS["gigpo"], "advantage": {"kind": "gae"}, "critic": {}}},
    "lora": {"lora": LORA, "stage": {"advantage": {"kind": "grpo"}, "keep_checkpoints": 3}},
}
#: Files of a run that nothing reads to go on: what is drawn from others.
_DRAWN = ("tensorboard", "report.html", "result.json")


def recipe(folder: Path, kind: dict[str, Any]) -> Path:
    stage = {**POLICY_GRADIENT, "steps": 4, **kind["stage"]}
    policy = runs.BASE["policy"] | {"hidden_size": 16} | ({"lora": kind["lora"]} if "lora" in kind else {})
    return runs.write(
        folder,
        [SUPERVISED, stage],
        policy=policy,
        agent=kind.get("agent", runs.BASE["agent"]),
        evaluation={"n_tasks": 6, "validation_n_tasks": 4},
        rewards={**runs.BASE["rewards"], "short": SHORT},
    )


@pytest.fixture(scope="module", params=KINDS)
def stopped(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recipe, a run of it that was stopped after two of four steps, and one that was not."""
    folder = tmp_path_factory.mktemp(request.param)
    path = recipe(folder, KINDS[request.param])
    runs.stop(path, folder / "run", "1-policy_gradient-000002")
    runs.run(path, folder / "whole")
    yield folder


def spoil(path: Path, draw: random.Random) -> None:
    """Give one byte of a file another value."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= draw.randrange(1, 256)
    path.write_bytes(bytes(content))


def outcome(folder: Path, name: str, draw: random.Random, work: Path) -> str:
    """What comes of a run that goes on after a byte of its file `name` was changed: `refused` or `equal`."""
    run = work / "run"
    shutil.copytree(folder / "run", run)
    try:
        spoil(run / name, draw)
        try:
            command_or_run(folder, run)
            found = everything(run)
        except RlhfError as error:
            assert Path(name).name in str(error), f"{name}: another file is named: {error}"
            return "refused"
        assert found == everything(folder / "whole"), f"a changed {name} changed the run"
        return "equal"
    finally:
        shutil.rmtree(run)


def command_or_run(folder: Path, run: Path) -> None:
    runs.run(folder / "recipe.yaml", run, resume=True)


def files(folder: Path, keep: Callable[[str], bool]) -> list[str]:
    run = folder / "run"
    names = (p.relative_to(run).as_posix() for p in sorted(run.rglob("*")) if p.is_file() and p.stat().st_size)
    return [name for name in names if keep(name)]


def of_newest(name: str) -> bool:
    return name.startswith("checkpoints/1-policy_gradient-000002/")


def fuzzed(folder: Path, names: list[str], n: int, work: Path) -> dict[str, int]:
    draw = random.Random(n)
    found = [outcome(folder, names[i % len(names)], draw, work) for i in range(n)]
    return {"refused": found.count("refused"), "equal": found.count("equal")}


def test_a_changed_byte_in_any_file_of_the_checkpoint(stopped: Path, tmp_path: Path) -> None:
    names = files(stopped, of_newest)
    assert {"policy/tokenizer.json", "trainer.pt", "state.json", "files.json"} <= {n.split("/", 2)[2] for n in names}
    found = fuzzed(stopped, names, len(names), tmp_path)
    assert found["refused"] >= len(names) - 1, found  # a byte of the list's own layout may say nothing


def test_a_changed_byte_in_any_other_file_that_is_read_again(stopped: Path, tmp_path: Path) -> None:
    names = files(stopped, lambda n: not n.startswith("checkpoints/") and not n.startswith(_DRAWN))
    assert {"recipe.yaml", "versions.json", "files.jsonl", "metrics.jsonl", "demonstrations/0.jsonl"} <= set(names)
    begin = "checkpoints/1-policy_gradient-000000/policy/"
    names += files(stopped, lambda n: n.startswith(begin) and n.endswith(".safetensors"))
    found = fuzzed(stopped, names, len(names), tmp_path)
    assert found["refused"] >= len(names) - 2, found


@pytest.mark.extended
def test_150_changed_bytes_of_each_checkpoint(stopped: Path, tmp_path: Path) -> None:
    found = fuzzed(stopped, files(stopped, of_newest), 150, tmp_path)
    print(f"\n{stopped.name}: {found}")
    assert sum(found.values()) == 150


# --- every reader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy/config.json", "policy/tokenizer.json", "files.json"])
def test_who_reads_a_checkpoint_refuses_a_changed_file(stopped: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(stopped / "whole", tmp_path / "run")
    folder = runs.newest(tmp_path / "run")
    path = folder / (name if (folder / name).is_file() else name.replace("config", "adapter_config"))
    content = path.read_text()
    path.write_text(content.replace("0", "1", 1) if "0" in content else content.swapcase())
    assert len(path.read_bytes()) == len(content.encode())
    for words_of in (
        ["evaluate", tmp_path / "run", "--n", "2"],
        ["evaluate", folder, "--n", "2"],
        ["export", folder, "--out", tmp_path / "model"],
        ["extrapolate", folder, "--out", tmp_path / "further"],
    ):
        ended = command(*words_of)
        assert ended.exit_code == 2 and path.name in ended.stderr, (words_of, ended.stderr)
        assert "has changed since it was written" in ended.stderr
    assert not (tmp_path / "model").exists()


def test_who_reads_a_run_refuses_a_changed_recipe(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "whole", tmp_path / "run")
    path = tmp_path / "run" / "recipe.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    for words_of in (["show"], ["train", "--resume"], ["evaluate", "--n", "2"], ["report"]):
        ended = command(*words_of, tmp_path / "run")
        assert ended.exit_code == 2 and "recipe.yaml: this file has changed since it was written" in ended.stderr, (
            ended.stderr
        )


def test_a_changed_store_is_refused_where_it_is_read(tmp_path: Path) -> None:
    runs.run(recipe(tmp_path, KINDS["full"]), tmp_path / "run")
    folder = runs.newest(tmp_path / "run")
    assert command("export", folder, "--out", tmp_path / "model").exit_code == 0
    spoil(folder / "store.sqlite", random.Random(0))
    for words_of in (
        ["evaluate", folder, "--n", "2"],
        ["memory", folder],
        ["export", folder, "--out", tmp_path / "no"],
    ):
        ended = command(*words_of)
        assert ended.exit_code == 2 and "store" in ended.stderr, (words_of, ended.stderr)


# --- what was not written with it, and what is older -----------------------------------------------------------------


def copy(stopped: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the stopped run, and its newest checkpoint."""
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy", runs.newest(tmp_path / "copy" / "run")


@pytest.mark.parametrize("name", ["policy/model.safetensors.index.json", "policy/added_tokens.json", "more.pt"])
def test_an_additional_file_is_refused(stopped: Path, tmp_path: Path, name: str) -> None:
    folder, newest = copy(stopped, tmp_path)
    (newest / name).write_text("{}")
    with pytest.raises(CheckpointError, match="not written with this checkpoint"):
        runs.run(folder / "recipe.yaml", folder / "run", resume=True)


def test_a_log_that_is_gone_is_said_and_one_that_is_cut_refused(stopped: Path, tmp_path: Path) -> None:
    folder, _ = copy(stopped, tmp_path)
    log = folder / "run" / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.rfind(b"\n", 0, -1) + 1])
    with pytest.raises(CheckpointError, match=r"mv .*metrics.jsonl .*damaged"):
        runs.run(folder / "recipe.yaml", folder / "run", resume=True)
    log.unlink()
    said = runs.run(folder / "recipe.yaml", folder / "run", resume=True).said
    assert f"caution: {log} is gone" in said


def older(folder: Path) -> None:
    """Make a run as it was written before there were digests."""
    for path in [*folder.glob("checkpoints/*/files.json")]:
        sizes = {name: mark[0] for name, mark in json.loads(path.read_text())["files"].items() if name != "state.json"}
        path.write_text(json.dumps(sizes))
    for path in [*folder.rglob(digests.MANIFEST)]:
        path.unlink()


def test_a_run_of_before_there_were_digests_goes_on_with_a_word(stopped: Path, tmp_path: Path) -> None:
    folder, newest = copy(stopped, tmp_path)
    older(folder / "run")
    done = runs.run(folder / "recipe.yaml", folder / "run", resume=True)
    assert f"caution: {newest} has no digests" in done.said and f"caution: {done.folder} has no digests" in done.said
    assert everything(done.folder) == everything(stopped / "whole")
    assert digests.has_digests(runs.newest(done.folder)), "from now on it has them"
    path = done.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    assert "has changed since it was written" in command("train", "--resume", done.folder).stderr


def test_an_older_checkpoint_is_evaluated_and_exported_with_a_word(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "whole", tmp_path / "run")
    older(tmp_path / "run")
    newest = runs.newest(tmp_path / "run")
    for words_of in (["evaluate", newest, "--n", "2"], ["export", newest, "--out", tmp_path / "model"]):
        ended = command(*words_of)
        assert ended.exit_code == 0 and ended.stderr.count("has no digests") == 1, ended.stderr


def test_a_checkpoint_that_is_damaged_before_the_newest_changes_nothing(stopped: Path, tmp_path: Path) -> None:
    folder, newest = copy(stopped, tmp_path)
    before = store.every(newest.parent)[-2]
    spoil(before / "policy" / "tokenizer.json", random.Random(1))
    runs.run(folder / "recipe.yaml", folder / "run", resume=True)
    assert everything(folder / "run") == everything(stopped / "whole")
