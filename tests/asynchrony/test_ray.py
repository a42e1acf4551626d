"""Whole runs on real Ray: rollout workers, servers and learners in processes of their own, and what kills come to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.errors import RecipeError
from rlhf.processes import free_port
from rlhf.recipe import load
from tests.asynchrony.test_runs import holds, ledger, recipe, tasks
from tests.tiers import tiered
from tests.training import runs

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("aiohttp") is None, reason="Ray or aiohttp is not installed"
)

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 900.0
Values = dict[str, Any]
CLUSTER: Values = {"rollout_workers": 2, "servers": 1}


def on_ray(folder: Path, asynchrony: Values, cluster: Values, trainer: Values | None = None, **world: Any) -> Path:
    stage = {"trainer": trainer} if trainer else {}
    path = recipe(folder, asynchrony, stage, **{"most_s": 0.05, **world})
    values = yaml.safe_load(path.read_text()) | {"cluster": cluster}
    if trainer:
        values["stages"][0]["trainer"] = trainer
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@contextmanager
def training(*arguments: str | Path, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, `rlhf train` runs; what it began has ended afterwards, or the test fails."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "300", "PYTHONPATH": path}
    own["RLHF_TEST_MARK"] = mark = str(log)
    line = [sys.executable, "-m", "rlhf.cli", "train", *map(str, arguments)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            line,
            env=os.environ | own | variables,
            cwd=ROOT,
            stdout=file,
            stderr=file,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            yield process
            process.wait(LIMIT_S)
            deadline = time.monotonic() + 30
            while (left := family(mark)) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert not left, f"left behind: {[p.cmdline() for p in left]}"
        finally:
            process.kill()
            for one in family(mark):
                one.kill()


def family(mark: str) -> list[psutil.Process]:
    """All living processes that were begun with a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("RLHF_TEST_MARK") == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def finished(path: Path, out: Path, *more: str) -> str:
    log = path.parent / "log.txt"
    with training(path, "--out", out, *more, log=log) as process:
        pass
    assert process.returncode == 0, log.read_text()[-5000:]
    return log.read_text()


@pytest.mark.extended
def test_workers_servers_and_a_learner_train_what_one_process_trains(tmp_path: Path) -> None:
    path = on_ray(tmp_path / "ray", {"staleness": 2}, CLUSTER)
    finished(path, tmp_path / "run")
    holds(tmp_path / "run", 2)
    assert max(runs.curve(tmp_path / "run", "delivery/canary_gap")) < 1e-3
    alone = recipe(tmp_path / "alone", {})
    assert tasks(tmp_path / "run") == tasks(runs.run(alone, tmp_path / "alone" / "run").folder)


def named(title: str) -> Callable[[psutil.Process], bool]:
    return lambda process: title in " ".join(process.cmdline())


#: Whom to kill, and what is said of it.
KILLS = {
    "worker": (named("ray::RolloutWorker"), ""),
    "server": (named("rlhf.cli serve"), ""),
    "the only server": (named("rlhf.cli serve"), ""),
    "server actor": (named("ray::Server"), ""),
    "learner": (named("ray::Learner"), "learner 0 has died"),
    "controller": (named("ray::ControllerActor"), "the controller has died"),
}


def begun(process: subprocess.Popen[bytes], out: Path, log: Path) -> None:
    """Wait until a run has a checkpoint of two steps."""
    deadline = time.monotonic() + LIMIT_S
    while not list((out / "checkpoints").glob("1-*-00000[2-9]/state.json")):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.05)


def kill_one(log: Path, is_it: Callable[[psutil.Process], bool]) -> None:
    """SIGKILL one of a run's processes."""
    victims = [process for process in family(str(log)) if is_it(process)]
    assert victims, [process.cmdline() for process in family(str(log))]
    victims[0].kill()


@pytest.mark.parametrize("whom", tiered(KILLS, "worker"))
def test_a_killed_process_is_replaced_or_named(tmp_path: Path, whom: str) -> None:
    is_it, said = KILLS[whom]
    path = on_ray(
        tmp_path / "ray", {"staleness": 1}, {**CLUSTER, "servers": 1 + (whom != "the only server")}, most_s=0.3
    )
    out, log = tmp_path / "run", tmp_path / "log.txt"
    with training(path, "--out", out, log=log) as process:
        begun(process, out, log)
        kill_one(log, is_it)
    assert process.returncode == 0, log.read_text()[-5000:]
    assert said in log.read_text()
    assert max(runs.curve(out, "asynchrony/age_max")) <= 1
    assert max(runs.curve(out, "delivery/canary_gap")) < 1e-3
    alone = recipe(tmp_path / "alone", {})
    assert tasks(out) == tasks(runs.run(alone, tmp_path / "alone" / "run").folder)
    found = ledger(out)
    assert found["generated"] == found["trained"] + found["failed"] and found["stored"] == found["running"] == 0


@pytest.mark.extended
def test_ctrl_c_saves_and_leaves_no_process_and_the_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    keys = {"staleness": 1, "schedule": "fixed"}
    path = on_ray(tmp_path / "ray", keys, CLUSTER, most_s=0.2)
    finished(path, tmp_path / "whole")
    out, log = tmp_path / "run", tmp_path / "log.txt"
    with training(path, "--out", out, log=log) as process:
        begun(process, out, log)
        process.send_signal(signal.SIGINT)
    assert process.returncode and "rlhf train --resume" in log.read_text()
    with training("--resume", out, log=log) as process:
        pass
    assert process.returncode == 0, log.read_text()[-5000:]
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(tmp_path / "whole"))
    assert tasks(out) == tasks(tmp_path / "whole")


@pytest.mark.extended
def test_a_run_that_is_stopped_saves_and_leaves_no_process(tmp_path: Path) -> None:
    path = on_ray(tmp_path / "ray", {"staleness": 1}, CLUSTER, most_s=0.3)
    out, log = tmp_path / "run", tmp_path / "log.txt"
    with training(path, "--out", out, log=log) as process:
        begun(process, out, log)
        stopped = CliRunner().invoke(app, ["stop", str(out)])
        assert stopped.exit_code == 0, stopped.output
        process.wait(LIMIT_S)
        assert not family(str(log))
    assert process.returncode and "rlhf train --resume" in log.read_text()
    assert "pid=" not in log.read_text(), "lines of Ray"
    assert "supervised 6/6" in log.read_text(), "what the learner says"
    again = CliRunner().invoke(app, ["stop", str(out)])
    assert again.exit_code and "nothing trains in this folder" in again.output


@pytest.mark.extended
def test_two_learners_under_zero_2(tmp_path: Path) -> None:
    trainer = {"kind": "deepspeed", "zero": 2, "timeout_s": 120.0}
    path = on_ray(tmp_path / "ray", {"staleness": 1}, {**CLUSTER, "learners": 2}, trainer)
    finished(path, tmp_path / "run")
    holds(tmp_path / "run", 1)


@pytest.mark.parametrize(
    ("asynchrony", "cluster", "engine", "where"),
    [
        pytest.param({}, CLUSTER, {}, "cluster.rollout_workers", id="in turn"),
        pytest.param({"staleness": 1}, {"rollout_workers": 2}, {}, "cluster.servers", id="no servers"),
        pytest.param(
            {"staleness": 1},
            CLUSTER,
            {"engine": {"kind": "vllm", "servers": ["http://a:1"]}},
            "cluster.servers",
            id="two kinds of servers",
        ),
        pytest.param({"staleness": 1}, {"servers": 2}, {}, "cluster.servers", id="servers alone"),
    ],
)
def test_clusters_that_cannot_work_are_refused(
    tmp_path: Path, asynchrony: Values, cluster: Values, engine: Values, where: str
) -> None:
    stage = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2}
    with pytest.raises(RecipeError) as caught:
        load(runs.write(tmp_path, [stage], asynchrony=asynchrony, cluster=cluster, **engine))
    assert caught.value.where == where and caught.value.hint


def test_show_says_what_processes_there_are(tmp_path: Path) -> None:
    path = on_ray(tmp_path, {"staleness": 1}, CLUSTER)
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "on Ray: 1 learner, 2 rollout workers of 8 groups at a time, 1 server; takes 4 CPUs" in text


def test_what_a_cluster_lacks_is_said_by_its_key(tmp_path: Path) -> None:
    from rlhf.build.cluster import refuse_missing

    loaded = load(on_ray(tmp_path, {"staleness": 1}, {"rollout_workers": 8, "servers": 2}))
    refuse_missing(loaded, {"CPU": 11.0})
    with pytest.raises(RecipeError, match="take 8 CPU; 7 of 10 left") as caught:
        refuse_missing(loaded, {"CPU": 10.0})
    assert caught.value.where == "cluster.rollout_workers"
    with pytest.raises(RecipeError, match=r"2, which take 2 GPU; 1 of 2 left"):
        refuse_missing(loaded, {"CPU": 11.0, "GPU": 2.0})


@pytest.mark.extended
def test_a_worker_that_cannot_start_is_said_with_its_reason() -> None:
    import asyncio

    import ray

    from rlhf.asynchrony.remote import RemotePlayer
    from rlhf.errors import EngineError, MissingPackageError

    class Broken:
        def __init__(self) -> None:
            raise MissingPackageError("minigrid is not installed", where="environment.kind", hint="install it")

        def ready(self) -> None: ...

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(num_cpus=1, max_restarts=-1)(Broken).remote()

        async def come() -> None:
            await RemotePlayer("rollout worker 3", actor, 1, 120.0).come_back()

        with pytest.raises(EngineError, match="cannot start") as caught:
            asyncio.run(come())
        assert caught.value.where == "rollout worker 3" and "install it" in caught.value.got
    finally:
        ray.shutdown()


@pytest.mark.extended
def test_two_nodes_of_one_machine_share_a_run(tmp_path: Path) -> None:
    path = on_ray(tmp_path / "ray", {"staleness": 1}, CLUSTER)
    log, port, sockets = tmp_path / "log.txt", free_port(), tempfile.mkdtemp()  # whose paths may not be long
    address, token = f"127.0.0.1:{port}", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    nodes = [
        [
            *start,
            "--head",
            "--include-dashboard=false",
            f"--port={port}",
            "--num-cpus=2",
            "--node-ip-address=127.0.0.1",
        ],
        [*start, f"--address={address}", "--num-cpus=2", "--node-ip-address=127.0.0.1"],
    ]
    environment = os.environ | {"RLHF_TEST_MARK": f"{log} nodes", "RAY_TMPDIR": sockets, **token}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    try:
        for node in nodes:
            subprocess.run(node, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        with training(path, "--out", tmp_path / "run", log=log, RAY_ADDRESS=address, **token) as process:
            pass
        assert process.returncode == 0, log.read_text()[-5000:]
    finally:
        for one in family(f"{log} nodes"):
            one.kill()
        shutil.rmtree(sockets, ignore_errors=True)
    holds(tmp_path / "run", 1)
