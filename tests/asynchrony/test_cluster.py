"""What a recipe for Ray is told before it runs, templates of clusters, and `rlhf stop`; none of it starts Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhf.asynchrony import admission, controller, pipeline, remote
from rlhf.build import cluster, rollout_workers, stopping
from rlhf.cli import app
from rlhf.errors import EngineError, RecipeError, RlhfError, TrainingError, UsageError
from rlhf.lock_owner import LOCK
from rlhf.processes import ProcessError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions
from rlhf.terminal import CleanConsole
from rlhf.training import rollouts_ahead
from tests.training import runs

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER = ROOT / "docs" / "cluster"
STAGE = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2}
ON_RAY: dict[str, Any] = {"asynchrony": {"staleness": 1}, "cluster": {"rollout_workers": 2, "servers": 1}}


def test_a_tracker_of_episodes_is_cautioned_that_they_are_made_elsewhere(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [STAGE], trackers=[{"kind": "opentelemetry"}], **ON_RAY)
    told = "trackers[0] has spans of steps and evaluations only: rollout workers make the attempts"
    assert told in cautions(load(path))
    assert told not in cautions(load(path, ["cluster={}"]))


def test_one_port_for_the_gateways_of_all_workers_is_refused(tmp_path: Path) -> None:
    world = {"kind": "external", "world": {"kind": "countdown"}, "command": ["true"], "port": 8123}
    path = runs.write(tmp_path, [STAGE], environment=world, agent={"kind": "external"}, **ON_RAY)
    with pytest.raises(RecipeError, match="rollout workers of one machine would all listen on the same port") as caught:
        load(path)
    assert caught.value.where == "environment.port" and caught.value.hint == "remove the key"


def test_processes_beside_those_of_ray_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = runs.write(tmp_path, [STAGE], **ON_RAY), tmp_path / "run"
    done = CliRunner().invoke(app, ["train", str(path), "--out", str(out), "--nproc", "2"])
    assert done.exit_code == 2 and "error --nproc: " in done.stderr and "cluster.learners=2" in done.stderr, done.stderr
    monkeypatch.setenv("WORLD_SIZE", "3")  # as torchrun does
    done = CliRunner().invoke(app, ["train", str(path), "--out", str(out)])
    assert done.exit_code == 2 and "error WORLD_SIZE: " in done.stderr and not out.exists(), done.stderr


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_full_store_of_ray_says_what_to_free() -> None:
    from ray.exceptions import OutOfDiskError

    with (
        pytest.raises(EngineError, match="Ray's object store has no room for the groups in transit") as caught,
        remote._told(),
    ):
        raise OutOfDiskError("Local disk is full")
    assert caught.value.hint


class _Killed:
    """Ray, as far as a wait for learners needs it, where one was killed to free memory."""

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return references, []

    def get(self, reference: str) -> Any:
        from ray.exceptions import OutOfMemoryError

        raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_an_actor_that_ray_kills_for_its_memory_has_died_as_any_other(tmp_path: Path) -> None:
    shown = cluster.ShownLog(tmp_path / "log", CleanConsole(quiet=True))
    with pytest.raises(ProcessError, match="learner 0 has died") as caught:
        cluster._ended(_Killed(), {"a reference": 0}, tmp_path, shown)
    assert "low on memory" in caught.value.got
    with pytest.raises(ProcessError, match="the controller has died"), remote._told("the controller"):
        _Killed().get("a reference")


class _Slow(_Killed):
    """Ray, where learners write their checkpoints for as long as it takes; a second Ctrl-C may come meanwhile."""

    def __init__(self, n_looks: int, interrupt_at: int = -1) -> None:
        self.n_looks, self.interrupt_at = n_looks, interrupt_at

    def wait(self, references: list[str], timeout: float, num_returns: int = 1) -> tuple[list[str], list[str]]:
        self.n_looks -= 1
        if self.n_looks == self.interrupt_at:
            raise KeyboardInterrupt
        return ([], references) if self.n_looks else (references, [])


def test_learners_that_are_to_stop_are_waited_for_however_long(tmp_path: Path) -> None:
    shown = cluster.ShownLog(tmp_path / "log", CleanConsole(quiet=True))
    ray = _Slow(1000)
    cluster.wait_for_end(ray, ["a", "b"], shown)
    assert ray.n_looks == 0
    with pytest.raises(KeyboardInterrupt):
        cluster.wait_for_end(_Slow(1000, interrupt_at=990), ["a"], shown)


def test_no_wait_asks_a_clock_that_may_jump() -> None:
    for module in (admission, controller, pipeline, remote, cluster, rollout_workers, rollouts_ahead, stopping):
        source = Path(str(module.__file__)).read_text()
        assert not re.search(r"\btime\.time\(|datetime\.now", source), module.__name__


def test_the_slurm_template_is_a_script_with_directives_before_it() -> None:
    path = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.split()[1].partition("=")[0] for line in lines if line.startswith("#SBATCH")]
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--signal", "--time"} <= set(options)
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "Slurm reads none behind the first command"


def test_the_kuberay_template_has_the_keys_of_a_ray_job() -> None:
    job = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["submissionMode"] == "HTTPMode"
    made = spec["rayClusterSpec"]
    groups = [made["headGroupSpec"], *made["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        [container], claims = pod["containers"], {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == claims
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups[1:])


def test_the_log_of_a_learner_is_shown_as_it_grows_without_lines_of_ray(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.log"
    path.write_text("of before\n")
    with (tmp_path / "out").open("w") as out:
        shown = cluster.ShownLog(path, CleanConsole(file=out, width=200))
        with path.open("a") as log:
            for text in (
                "step 1\n[2026-11-23 21:17:35,633 E 17503] core_worker.cc:2465: no\nst",
                "ep 2\nbar 1\rbar 2\n",
            ):
                log.write(text)
                log.flush()
                shown.show()
    assert (tmp_path / "out").read_text() == "step 1\nstep 2\n"


def test_stop_waits_for_the_end_of_a_run_on_ray_and_says_where_nothing_runs(tmp_path: Path) -> None:
    again = CliRunner().invoke(app, ["stop", str(tmp_path)])
    assert again.exit_code and "no run is training in this folder" in again.output
    assert CliRunner().invoke(app, ["stop", str(tmp_path / "none")]).exit_code
    heard, may_end = threading.Event(), threading.Event()

    def run() -> None:
        with stopping.heard(tmp_path):
            heard.set()
            while not stopping.is_asked(tmp_path):
                may_end.wait(0.01)
            may_end.wait(20)

    running = threading.Thread(target=run)
    running.start()
    heard.wait(20)
    assert {path.name for path in tmp_path.iterdir()} == {f"{LOCK}-ray"}
    with pytest.raises(TrainingError, match="has not ended yet"):
        stopping.stop(tmp_path, 0.2)
    threading.Timer(0.3, may_end.set).start()
    stopping.stop(tmp_path, 20)
    running.join()
    assert not list(tmp_path.iterdir())


def test_a_run_on_ray_that_is_begun_twice_keeps_what_it_was_asked(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, rlhf.build.stopping as stopping\n"
        "with stopping.heard(pathlib.Path(sys.argv[1])):\n"
        "    print('heard', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"heard\n"
        with pytest.raises(TrainingError, match="has not ended yet"):
            stopping.stop(tmp_path, 0.1)
        with pytest.raises(UsageError, match="under way on Ray"), stopping.heard(tmp_path):
            raise AssertionError("two runs in one folder")
        assert stopping.is_asked(tmp_path)
        process.communicate()
    with stopping.heard(tmp_path):
        assert not stopping.is_asked(tmp_path)


def test_stop_ends_a_run_of_this_machine_by_a_signal(tmp_path: Path) -> None:
    code = (
        "import signal, sys, pathlib, rlhf.locks as locks\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "with locks.held(pathlib.Path(sys.argv[1]), 'rlhf train'):\n"
        "    print('held', flush=True)\n"
        "    signal.pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        stopping.stop(tmp_path, 30)
    assert process.returncode
    with pytest.raises(RlhfError, match="no run is training"):
        stopping.stop(tmp_path, 1)
