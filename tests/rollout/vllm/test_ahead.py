"""Runs by the clock on a server of vLLM: which groups they train, whatever is stopped and whoever finishes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.evaluation.store import read_trajectories
from rlhf.processes import free_port
from tests.asynchrony.test_runs import LABEL, STAGE, holds, ledger, recipe, stop, tasks
from tests.rollout.vllm.served import Served
from tests.training import runs

pytestmark = pytest.mark.extended  # a server takes half a minute to start


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server, and the folder of the model that it began with."""
    path = recipe(tmp_path / "model", {}, {"steps": 1})
    values = yaml.safe_load(path.read_text())
    values["policy"]["head_dim"] = 32  # which vLLM can do
    path.write_text(yaml.safe_dump(values))
    model = runs.newest(runs.run(path, tmp_path / "model" / "run").folder) / "policy"
    serving = path.with_name("serving.yaml")
    engine = {"kind": "vllm", "kv_cache_gb": 0.03, "max_sessions": 64}
    serving.write_text(
        yaml.safe_dump({**values, "policy": of(model), "stages": values["stages"][1:], "engine": engine})
    )
    served = Served(serving, free_port(), tmp_path / "server.txt")
    try:
        served.wait_until_ready()
        yield served.url, model
    finally:
        served.stop()


def of(model: Path) -> dict[str, Any]:
    """The policy in a folder."""
    return {"kind": "pretrained", "path": str(model)}


def test_runs_by_the_clock_train_every_group_once(tmp_path: Path, server: tuple[str, Path]) -> None:
    url, model = server

    def ahead(name: str, salt: int, **keys: Any) -> Path:
        path = recipe(tmp_path / name, {"staleness": 2, **keys}, most_s=0.2, salt=salt)
        values = yaml.safe_load(path.read_text())
        values |= {"policy": of(model), "engine": {"kind": "vllm", "servers": [url]}}
        # The stage keeps its number, and with it its tasks.
        values["stages"][0] = {**values["stages"][0], "n_demonstrations": 1, "epochs": 1}
        path.write_text(yaml.safe_dump(values))
        return path

    whole = runs.run(ahead("whole", 1), tmp_path / "whole" / "run").folder
    again = ahead("again", 2, checkpoint="restart")
    stop(again, tmp_path / "again" / "run")
    runs.run(again, tmp_path / "again" / "run", resume=True)
    first = runs.run(ahead("first", 3, order="first_finished"), tmp_path / "first" / "run").folder
    assert tasks(whole) == tasks(tmp_path / "again" / "run")
    assert ledger(tmp_path / "again" / "run")["discarded"] > 0, "what ran was begun again"
    for folder in (whole, tmp_path / "again" / "run", first):
        holds(folder, 2)
        records = read_trajectories(folder / "trajectories", stage=LABEL, phase="train")
        played = Counter((record.step, record.task_id) for record in records)
        assert len(played) == STAGE["steps"] * STAGE["tasks_per_step"], "a group is missing, or was trained twice"
        assert set(played.values()) == {STAGE["group_size"]}
        assert Counter(chain(*tasks(folder))) == Counter(chain(*tasks(whole)))
    assert max(runs.curve(whole, "asynchrony/staleness_max")) >= 1
    assert max(runs.curve(whole, "delivery/canary_gap")) < 1e-3
