"""Whole runs on real Ray: rollout workers, servers and learners in processes of their own, and what kills come to."""

from __future__ import annotations

import json
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
from tests.asynchrony import embedded_servers
from tests.asynchrony.test_runs import holds, ledger, recipe, tasks
from tests.asynchrony.test_several_processes import model_of, with_engine
from tests.tiers import tiered
from tests.training import runs

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("aiohttp") is None, reason="Ray or aiohttp is not installed"
)

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 900.0
Values = dict[str, Any]
CLUSTER: Values = {"rollout_workers": 2, "servers": 1}


def on_ray(
    folder: Path,
    asynchrony: Values,
    cluster: Values,
    trainer: Values | None = None,
    *,
    stage: Values | None = None,
    **world: Any,
) -> Path:
    stage = (stage or {}) | ({"trainer": trainer} if trainer else {})
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


def evaluations(folder: Path) -> list[dict[str, float]]:
    """Lines of evaluations between steps, but for the seconds they took."""
    found = [line for line in runs.lines(folder) if "eval/success" in line and 0 < line["step"] < 6]
    return [{name: value for name, value in line.items() if not name.startswith("time")} for line in found]


@pytest.mark.extended
def test_servers_of_their_own_play_evaluations_of_one_version_while_training_goes_on(tmp_path: Path) -> None:
    keys, stage = {"staleness": 1, "weight_update": "deterministic"}, {"evaluate_every": 2, "checkpoint_every": 4}
    path = on_ray(tmp_path / "ray", keys, {**CLUSTER, "eval_servers": 1}, most_s=0.1, stage=stage)
    said = finished(path, tmp_path / "run")
    assert "step 2: success" in said and "version 4 of the policy" in said, said[-3000:]
    holds(tmp_path / "run", 1)
    alone = runs.run(recipe(tmp_path / "alone", keys, stage, most_s=0.1), tmp_path / "alone" / "run").folder
    assert runs.weights(runs.newest(tmp_path / "run")) == runs.weights(runs.newest(alone))
    assert evaluations(tmp_path / "run") == evaluations(alone) and len(evaluations(alone)) == 2
    order = [("eval/success" in line, line["step"]) for line in runs.lines(tmp_path / "run") if line["step"] > 1]
    assert order.index((True, 2)) > order.index((False, 3)), "a step was trained meanwhile"


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
    assert max(runs.curve(out, "asynchrony/staleness_max")) <= 1
    assert max(runs.curve(out, "delivery/canary_gap")) < 1e-3
    alone = recipe(tmp_path / "alone", {})
    assert tasks(out) == tasks(runs.run(alone, tmp_path / "alone" / "run").folder)
    found = ledger(out)
    assert found["generated"] == found["trained"] + found["discarded"] and found["queued"] == found["running"] == 0


@pytest.mark.extended
def test_ctrl_c_saves_and_leaves_no_process_and_the_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    keys = {"staleness": 1, "weight_update": "deterministic"}
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
    assert again.exit_code and "no run is training in this folder" in again.output


@pytest.mark.extended
def test_a_trial_has_the_learners_that_one_process_starts(tmp_path: Path) -> None:
    trainer = {"kind": "deepspeed", "zero_stage": 1, "param_persistence_threshold": 0, "timeout_s": 120.0}
    path = on_ray(tmp_path / "ray", {"staleness": 1}, {**CLUSTER, "learners": 2}, trainer)
    shown = CliRunner().invoke(app, ["show", str(path), "--trial", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    [_, stage] = json.loads(shown.stdout.splitlines()[-1])["trial"]["stages"]
    assert len(stage["step_s"]) == 2 and stage["peak_bytes"] > 0


@pytest.mark.extended
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_learners_of_which_one_is_killed_end_as_two_that_were_not_to_the_bit(tmp_path: Path, zero: int) -> None:
    trainer = {"kind": "deepspeed", "zero_stage": zero, "param_persistence_threshold": 0, "timeout_s": 120.0}
    keys = {"staleness": 1, "weight_update": "deterministic"}
    path = on_ray(tmp_path / "ray", keys, {**CLUSTER, "learners": 2}, trainer, most_s=0.2)
    finished(path, tmp_path / "whole")
    out, log = tmp_path / "run", tmp_path / "log.txt"
    with training(path, "--out", out, log=log) as process:
        begun(process, out, log)
        kill_one(log, named("ray::Learner"))
    assert process.returncode == 0 and "has died" in log.read_text(), log.read_text()[-5000:]
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(tmp_path / "whole"))
    assert tasks(out) == tasks(tmp_path / "whole")
    holds(out, 1)


@pytest.mark.extended
def test_a_run_goes_on_with_a_server_that_joined_when_its_own_is_gone(tmp_path: Path) -> None:
    with embedded_servers.servers(*model_of(tmp_path / "model"), 2) as ((first, second), (process_of_first, _)):
        path = on_ray(tmp_path / "ray", {"staleness": 1}, {"rollout_workers": 2}, most_s=0.3)
        with_engine(path, [first])
        out, log = tmp_path / "run", tmp_path / "log.txt"
        with training(path, "--out", out, log=log) as process:
            begun(process, out, log)
            (out / "servers.txt").write_text(second)
            while f"{second} joins" not in (out / "learner-0.log").read_text():
                assert process.poll() is None, log.read_text()[-5000:]
                time.sleep(0.05)
            n_saved = len(list((out / "checkpoints").glob("1-*/state.json")))
            while len(list((out / "checkpoints").glob("1-*/state.json"))) == n_saved and process.poll() is None:
                time.sleep(0.05)
            process_of_first.kill()
    assert process.returncode == 0, log.read_text()[-5000:]
    holds(out, 1)
    assert max(runs.curve(out, "delivery/canary_gap")) < 1e-3


@pytest.mark.extended
def test_an_evaluation_whose_server_is_killed_is_left_out_by_name_or_made_again(tmp_path: Path) -> None:
    stage = {"evaluate_every": 2, "steps": 8}
    path = on_ray(tmp_path / "ray", {"staleness": 1}, {**CLUSTER, "eval_servers": 1}, most_s=0.3, stage=stage)
    out, log = tmp_path / "run", tmp_path / "log.txt"
    with training(path, "--out", out, log=log) as process:
        begun(process, out, log)
        port = (out / "served" / "server-1").read_text().rpartition(":")[2]
        kill_one(log, lambda one: "serve" in one.cmdline() and port in one.cmdline())
    said = log.read_text()
    assert process.returncode == 0, said[-5000:]
    made = {line["step"] for line in runs.lines(out) if "eval/success" in line}
    for step in (2, 4, 6):
        assert (step in made) != (f"no evaluation of step {step}, version {step}" in said), (step, made, said[-3000:])
    assert 6 in made
    holds(out, 1)


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
        pytest.param({"staleness": 1}, {**CLUSTER, "eval_servers": 1}, {}, "cluster.eval_servers", id="no evaluation"),
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
    shown = CliRunner().invoke(app, ["show", str(path), "cluster.eval_servers=2"])
    assert "1 server, 2 for evaluations; takes 7 CPUs" in " ".join(shown.output.split())


def test_what_a_cluster_lacks_is_said_by_its_key(tmp_path: Path) -> None:
    from rlhf.build.cluster import refuse_missing

    loaded = load(on_ray(tmp_path, {"staleness": 1}, {"rollout_workers": 8, "servers": 2}))
    refuse_missing(loaded, {"CPU": 11.0})
    with pytest.raises(RecipeError, match="take 8 CPU; 7 of 10 left") as caught:
        refuse_missing(loaded, {"CPU": 10.0})
    assert caught.value.where == "cluster.rollout_workers"
    with pytest.raises(RecipeError, match=r"2, which take 2 GPU; 1 of 2 left"):
        refuse_missing(loaded, {"CPU": 11.0, "GPU": 2.0})


def test_labels_that_no_node_has_are_refused_with_those_there_are(tmp_path: Path) -> None:
    from rlhf.build.cluster import refuse_unlabelled

    def node(n_cpus: float, is_alive: bool = True, **labels: str) -> Values:
        return {"Alive": is_alive, "Resources": {"CPU": n_cpus}, "Labels": {"ray.io/node-id": "a", **labels}}

    loaded = load(on_ray(tmp_path, {"staleness": 1}, {**CLUSTER, "worker_labels": {"packages": "words"}}))
    refuse_unlabelled(loaded, [node(1, packages="words"), node(1, packages="words", disk="fast")])
    few = [node(8), node(8, packages="other"), node(1, packages="words"), node(8, False, packages="words")]
    with pytest.raises(RecipeError, match=r"1 nodes with 1 CPU; .*packages=other, packages=words") as caught:
        refuse_unlabelled(loaded, few)
    assert caught.value.where == "cluster.worker_labels" and "at least 2 CPU" in str(caught.value.expected)
    with pytest.raises(RecipeError, match="worker_labels"):
        load(on_ray(tmp_path / "in", {"staleness": 1}, {**CLUSTER, "worker_labels": {"packages": "in(a, b)"}}))


@pytest.mark.extended
def test_a_worker_that_cannot_start_is_said_with_its_reason() -> None:
    import asyncio

    import ray

    from rlhf.asynchrony.remote import RemoteWorker
    from rlhf.errors import EngineError, MissingPackageError

    class Broken:
        def __init__(self) -> None:
            raise MissingPackageError("minigrid is not installed", where="environment.kind", hint="install it")

        def ready(self) -> None: ...

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(num_cpus=1, max_restarts=-1)(Broken).remote()

        async def come() -> None:
            await RemoteWorker("rollout worker 3", actor, 1, 120.0).wait_ready()

        with pytest.raises(EngineError, match="cannot start") as caught:
            asyncio.run(come())
        assert caught.value.where == "rollout worker 3" and "install it" in caught.value.got
    finally:
        ray.shutdown()


def test_a_worker_without_a_sign_of_life_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import ray

    from rlhf.asynchrony import remote
    from rlhf.asynchrony.controller import Job, WorkerLostError
    from rlhf.data import Task

    class Sleeps:
        async def alive(self) -> None: ...

        async def ready(self) -> int:
            return os.getpid()

        async def play(self, job: Job, weights: None) -> remote.Played:
            await asyncio.sleep(3600)
            return remote.Played(None, {})

    monkeypatch.setattr(remote, "_PING_S", 0.2)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(num_cpus=1, max_restarts=-1, max_concurrency=4)(Sleeps).remote()
        worker = remote.RemoteWorker("rollout worker 0", actor, 1, 60.0)

        async def play() -> tuple[int, int]:
            await worker.wait_ready()
            first = await actor.ready.remote()
            playing = asyncio.create_task(worker.play(Job(0, Task("t/0", 0), 0), lambda version, n: None))
            await asyncio.sleep(1.0)
            assert not playing.done(), "it answers that it is alive"
            worker.limit_s = 2.0
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(WorkerLostError) as caught:
                await asyncio.wait_for(playing, LIMIT_S)
            assert (caught.value.where, caught.value.got) == ("rollout worker 0", "nothing in 2 s")
            worker.limit_s = 120.0
            await worker.wait_ready()
            return first, await actor.ready.remote()

        first, second = asyncio.run(play())
        assert first != second and not psutil.pid_exists(first)
    finally:
        ray.shutdown()


@pytest.mark.extended
def test_servers_without_a_place_are_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import ray

    from rlhf.build import rollout_workers
    from rlhf.errors import EngineError

    monkeypatch.setattr(rollout_workers, "_READY_S", 3.0)
    loaded = load(on_ray(tmp_path / "in", {"staleness": 1}, CLUSTER))
    ray.init(address="local", num_cpus=0, include_dashboard=False, log_to_driver=False)
    try:
        on = rollout_workers.OnRay(loaded, tmp_path)
        policy: Any = loaded.policy.build(0, ["words"])
        with pytest.raises(EngineError, match="the cluster has no room for the servers") as caught:
            asyncio.run(asyncio.wait_for(on._start_servers(policy), 60.0))
        assert "cluster.servers: 1" in caught.value.where
    finally:
        ray.shutdown()


@pytest.mark.extended
def test_two_nodes_of_one_machine_share_a_run_whose_workers_are_on_the_one_with_their_label(tmp_path: Path) -> None:
    path = on_ray(tmp_path / "ray", {"staleness": 1}, CLUSTER | {"worker_labels": {"packages": "words"}}, most_s=0.2)
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
        [*start, f"--address={address}", "--num-cpus=4", "--node-ip-address=127.0.0.1", "--labels=packages=words"],
    ]
    environment = os.environ | {"RLHF_TEST_MARK": f"{log} nodes", "RAY_TMPDIR": sockets, **token}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    try:
        for node in nodes:
            subprocess.run(node, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        with training(path, "--out", tmp_path / "run", log=log, RAY_ADDRESS=address, **token) as process:
            begun(process, tmp_path / "run", log)
            workers = [one for one in family(f"{log} nodes") if named("ray::RolloutWorker")(one)]
            homes = [" ".join(worker.parent().cmdline()) for worker in workers]
            assert len(homes) == 2 and all("raylet" in home and "words" in home for home in homes), homes
        assert process.returncode == 0, log.read_text()[-5000:]
    finally:
        for one in family(f"{log} nodes"):
            one.kill()
        shutil.rmtree(sockets, ignore_errors=True)
    holds(tmp_path / "run", 1)
