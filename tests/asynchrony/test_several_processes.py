"""Attempts made ahead in two processes that train together: bound, ledger, and what a killed run is worth."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.asynchrony.pipeline import Pipeline, Rules
from rlhf.errors import CheckpointError, RecipeError
from rlhf.inference.vllm.server import ServerInstance
from rlhf.processes import free_port
from rlhf.recipe import load
from rlhf.recipe.compatibility import check_processes
from tests.asynchrony import dying_words, embedded_servers, forked
from tests.asynchrony.test_runs import LABEL, holds, ledger, recipe, tasks
from tests.tiers import tiered
from tests.training import runs, words
from tests.training.together import together

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

Values = dict[str, Any]

FSDP: Values = {"kind": "fsdp", "timeout_s": 120.0}
TRAINERS = {
    **{
        f"zero{n}": {"kind": "deepspeed", "zero_stage": n, "param_persistence_threshold": 0, "timeout_s": 120.0}
        for n in (1, 2, 3)
    },
    "fsdp": FSDP,
}


def several(folder: Path, name: str, asynchrony: Values, steps: int = 6, **world: Any) -> Path:
    """A recipe for a trainer of several processes, three tasks a step, so that the shares are not even."""
    path = recipe(folder, asynchrony, {"trainer": TRAINERS[name], "evaluate_every": 2, "steps": steps}, **world)
    text = path.read_text().replace("kind: supervised", f"kind: supervised\n  trainer: {json.dumps(TRAINERS[name])}")
    path.write_text(text)
    return path


def run_each(rank: int, folder: Path) -> None:
    for path in sorted((*folder.glob("recipe.yaml"), *folder.glob("*/recipe.yaml"))):
        runs.run(path, path.parent / "run")


@pytest.mark.extended
@pytest.mark.parametrize("name", TRAINERS)
def test_bound_and_ledger_hold_in_two_processes(tmp_path: Path, name: str) -> None:
    path = several(tmp_path / name, name, {"staleness": 2}, most_s=0.1)
    together(run_each, tmp_path, timeout_s=120.0)
    holds(path.parent / "run", 2)
    assert max(runs.curve(path.parent / "run", "asynchrony/staleness_max")) >= 1
    alone = recipe(tmp_path / "alone", {}, {"checkpoint_every": 0})
    assert tasks(path.parent / "run") == tasks(runs.run(alone, tmp_path / "alone" / "run").folder)


def killed(folder: Path, trainer: str, kills: Sequence[tuple[int, int]], steps: int = 6) -> None:
    """Kill ranks in the steps of environments that are said, one after the other, and compare with a whole run."""
    found = {}
    for name in ("whole", "killed"):
        path = several(folder / name, trainer, {"staleness": 1, "weight_update": "deterministic"}, steps, most_s=0.02)
        shutil.copy(dying_words.__file__, path.parent / "dying_words.py")
        path.write_text(path.read_text().replace("./slow_words.py:SlowWords", "./dying_words.py:DyingWords"))
        (path.parent / "kills.json").write_text(json.dumps(kills if name == "killed" else []))
        out, n_died = path.parent / "run", 0
        while not (out / "result.json").exists():
            codes = forked.run(path, out)
            n_died += -signal.SIGKILL in codes
            assert codes == [0, 0] or -signal.SIGKILL in codes, out.with_suffix(".txt").read_text()
            assert n_died <= len(kills)
        assert n_died == (len(kills) if name == "killed" else 0)
        found[name] = out
    whole, cut = found["whole"], found["killed"]
    assert runs.weights(runs.newest(cut)) == runs.weights(runs.newest(whole))
    assert tasks(cut) == tasks(whole)
    for metric in ("loss/total", "asynchrony/staleness_mean", "rollout/return_mean"):
        assert runs.curve(cut, metric) == runs.curve(whole, metric)
    assert ledger(cut)["trained"] == ledger(whole)["trained"]
    holds(cut, 1)


@pytest.mark.parametrize("name", tiered(TRAINERS, "zero2"))
def test_a_killed_run_equals_a_whole_one(tmp_path: Path, name: str) -> None:
    killed(tmp_path, name, [(1, 24)])


@pytest.mark.extended
def test_ten_kills_equal_a_whole_run_under_zero_2(tmp_path: Path) -> None:
    draw = random.Random(0)
    killed(tmp_path, "zero2", [(draw.randrange(2), draw.randrange(3, 12)) for _ in range(10)], steps=20)


def test_a_process_without_a_group_is_refused(tmp_path: Path) -> None:
    loaded = load(several(tmp_path, "zero2", {"staleness": 1}))
    check_processes(loaded, 3)
    with pytest.raises(RecipeError, match="a process would have no group to generate ahead") as caught:
        check_processes(loaded, 4)
    assert caught.value.where == f"stages[{LABEL[0]}].tasks_per_step"


def test_another_number_of_processes_goes_on_but_not_where_each_chose(tmp_path: Path) -> None:
    from rlhf.asynchrony.shares import merged, split_state

    rules = Rules(2, 4, order="first_finished")
    shares = [slice(0, 2), slice(2, 4)]
    states = [Pipeline(rules).state() for _ in shares]
    both = merged(states, shares, 4)
    with pytest.raises(CheckpointError, match="each process chose the groups to train on among its own"):
        split_state(both, slice(0, 4), 4, 1)
    assert [split_state(both, share, 4, 2)["counts"] for share in shares] == [s["counts"] for s in states]


def served(folder: Path, name: str, urls: Sequence[str], asynchrony: Values) -> Path:
    """A recipe whose rollouts are made on servers."""
    path = several(folder / name, name, asynchrony, most_s=0.05)
    values = yaml.safe_load(path.read_text()) | {"engine": {"kind": "vllm", "servers": list(urls)}}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def model_of(folder: Path) -> tuple[Path, Path]:
    """A recipe and a checkpoint of it, of the architecture and vocabulary of all other runs here."""
    path = recipe(folder, {}, {"steps": 1})
    return path, runs.newest(runs.run(path, folder / "run").folder)


@pytest.mark.parametrize("name", tiered(["zero2", "zero3", "fsdp"], "zero3"))
def test_two_processes_sample_from_the_same_servers(tmp_path: Path, name: str) -> None:
    with embedded_servers.servers(*model_of(tmp_path / "model"), 2) as (urls, _):
        path = served(tmp_path, name, urls, {"staleness": 2})
        together(run_each, path.parent, timeout_s=120.0)
    holds(path.parent / "run", 2)
    assert max(runs.curve(path.parent / "run", "asynchrony/staleness_max")) >= 1
    assert max(runs.curve(path.parent / "run", "delivery/canary_gap")) < 1e-3


def with_engine(path: Path, urls: Sequence[str]) -> Path:
    """A recipe whose rollouts are made on servers by one process."""
    values = yaml.safe_load(path.read_text()) | {"engine": {"kind": "vllm", "servers": list(urls)}}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_a_server_joins_and_leaves_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []  # newest checkpoint, server
    sample = ServerInstance.sample

    async def counted(self: ServerInstance, *given: Any) -> Any:
        asked.append((n_saved(), self.name))
        return await sample(self, *given)

    out = tmp_path / "own" / "run"

    def n_saved() -> int:
        return max((int(path.parent.name[-6:]) for path in out.glob(f"checkpoints/{LABEL}-*/state.json")), default=0)

    monkeypatch.setattr(ServerInstance, "sample", counted)
    with embedded_servers.servers(*model_of(tmp_path / "model"), 2) as ((first, second), (_, process)):
        stage = {"steps": 8, "tasks_per_step": 4}
        path = with_engine(recipe(tmp_path / "own", {"staleness": 1}, stage, most_s=0.05), [first])
        nobody = f"http://127.0.0.1:{free_port()}"

        def change() -> None:
            if n_saved() >= 6:  # it left two deliveries ago
                process.kill()
            elif n_saved() >= 1:
                on_list = [nobody, f"{second}/  # of the night"] if n_saved() < 4 else [nobody]
                (out / "servers.txt").write_text("\n".join(on_list))

        with words.on_every_step(path, change), pytest.warns(UserWarning, match=f"{nobody} does not join") as told:
            runs.run(path, out)
    said = [str(warning.message) for warning in told]
    assert {f"{second} joins", f"{second} leaves"} <= set(said) and not any("vanished" in text for text in said)
    by = {url: {n for n, name in asked if name == url} for url in (first, second, nobody)}
    assert by[second] and by[second] <= set(range(1, 7)) and {0, 7} <= by[first] and not by[nobody]
    holds(out, 1)
    assert max(runs.curve(out, "delivery/canary_gap")) < 1e-3
