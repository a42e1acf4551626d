"""Trackers: what is logged arrives in the real packages, offline; one that fails is said and left."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.check_availability import refuse_absent_trackers
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.recipe import load_values
from rlhf.recipe.model import values_of
from rlhf.sinks import LogLine, Metrics
from rlhf.training.trackers import MLflow, SwanLab, TrackedRun, TrackerSink, Trackio, Wandb, sinks_of

LINES = [LogLine(step, "0-policy_gradient", 1e9 + step, {"rollout/success": step / 4, "loss": None}) for step in (1, 2)]
NAME = "0-policy_gradient/rollout/success"


def sent(tracker: Any, folder: Path) -> None:
    """Log a line, close, and go on with another, as a resumed run does."""
    said: list[str] = []
    for line in LINES:
        [sink] = sinks_of((tracker,), "run", folder, {"seed": 0, "stages": [{"kind": "policy_gradient"}]}, said.append)
        sink.write(line)
        sink.close()
    assert not said


def test_mlflow_has_each_step(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    sent(MLflow(experiment="e"), tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    [live] = client.search_runs([experiment.experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(live.info.run_id, NAME)] == [(1, 0.25), (2, 0.5)]
    assert live.info.status == "FINISHED"
    assert live.data.params == {"seed": "0", "stages.0.kind": "policy_gradient"}
    [sink] = sinks_of((MLflow(experiment="e"),), "run", tmp_path, {}, print)
    sink.write(LINES[0])
    assert client.get_run(live.info.run_id).info.status == "RUNNING"
    sink.fail()
    assert client.get_run(live.info.run_id).info.status == "FAILED"


def test_wandb_has_each_step_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    sent(Wandb(project="p", mode="offline"), tmp_path)
    end = time.monotonic() + 120  # a process of wandb's own writes the files
    while time.monotonic() < end:
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        held = [path.read_bytes() for path in files]  # records of protobuf, one after the other
        found = [any(NAME.encode() in data and value in data for data in held) for value in (b"0.25", b"0.5")]
        if all(found):
            break
        time.sleep(0.1)
    assert all(found) and len({path.stem for path in files}) == 1  # both go to one run


def test_trackio_has_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    sent(Trackio(project="p"), tmp_path)
    [name] = sqlite_storage.SQLiteStorage.get_runs("p")
    assert [row[NAME] for row in sqlite_storage.SQLiteStorage.get_logs("p", name)] == [0.25, 0.5]


def test_swanlab_has_each_step_offline(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")

    sent(SwanLab(project="p", mode="offline"), tmp_path)
    held = b"".join(path.read_bytes() for path in (tmp_path / "swanlab").rglob("*") if path.is_file())
    assert NAME.encode() in held  # records of protobuf


def test_a_tracker_that_fails_is_said_once_and_left(tmp_path: Path) -> None:
    class Bad:
        def begin(self, run: TrackedRun) -> Any:
            raise ConnectionError("no network")

    said: list[str] = []
    sink = TrackerSink(Bad(), TrackedRun("run", tmp_path, {}, "1"), said.append)
    for line in LINES:
        sink.write(line)
    sink.close()
    assert said == ["caution: the tracker Bad failed, and the run continues without it: ConnectionError: no network"]


def test_a_tracker_that_failed_is_ended_all_the_same(tmp_path: Path) -> None:
    calls: list[str] = []

    class Live:
        def write(self, line: Any) -> None:
            raise ConnectionError("no network")

        def end(self) -> None:
            calls.append("end")
            raise ConnectionError("no network either")

    class Bad:
        def begin(self, run: TrackedRun) -> Any:
            return Live()

    sink = TrackerSink(Bad(), TrackedRun("run", tmp_path, {}, "1"), calls.append)
    sink.write(LINES[0])
    sink.close()
    assert len(calls) == 2 and "no network" in calls[0] and calls[1] == "end"


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_run_that_failed_is_ended_as_such(tmp_path: Path, has_failed: bool) -> None:
    calls: list[str] = []

    class Live:
        def write(self, line: Any) -> None:
            calls.append("write")

        def end(self) -> None:
            calls.append("end")

    class Telling(Live):
        def fail(self) -> None:
            calls.append("fail")

    class Own:
        def __init__(self, live: Any) -> None:
            self.live = live

        def begin(self, run: TrackedRun) -> Any:
            return self.live

    run = TrackedRun("run", tmp_path, {}, "1")
    metrics = Metrics([TrackerSink(Own(live), run, calls.append) for live in (Live(), Telling())])
    metrics.log(1, "train", {"rollout/success": 1.0})
    metrics.close(has_failed=has_failed)
    metrics.close()  # what is closed stays so
    assert calls == ["write", "write", "end", "fail" if has_failed else "end"]


def test_trackers_are_keys_of_a_recipe(tmp_path: Path) -> None:
    values = {
        "policy": {"kind": "from_scratch"},
        "environment": {"kind": "countdown"},
        "rewards": {"o": {"kind": "outcome"}},
        "stages": [{"kind": "policy_gradient"}],
    }
    assert "trackers" not in values_of(load_values(values, name="r"))  # as recipes were written before
    with pytest.raises(RecipeError) as caught:
        load_values({**values, "trackers": [{"kind": "wandd"}]}, name="r")
    assert caught.value.where == "trackers[0].kind" and "'wandb'" in caught.value.hint
    with pytest.raises(RecipeError, match="wrong type"):
        load_values({**values, "trackers": {"kind": "wandb"}}, name="r")
    if find_spec("wandb") is None:
        with pytest.raises(MissingPackageError, match=r"trackers\[0\].kind: wandb is not installed"):
            refuse_absent_trackers(load_values({**values, "trackers": [{"kind": "wandb"}]}, name="r"))
    kept = {"kind": f"{__name__}:Kept"}
    assert values_of(load_values({**values, "trackers": [kept]}, name="r"))["trackers"] == [kept]


class Kept:
    """A tracker of one's own."""

    def begin(self, run: TrackedRun) -> Any: ...
