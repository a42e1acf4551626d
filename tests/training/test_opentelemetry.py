"""OpenTelemetry spans of episodes: a run's own, in its folder, in their places in time."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import Outcome, Trajectory
from rlhf.evaluation.store import read_trajectories
from rlhf.rollout import telemetry
from tests.training import runs

pytest.importorskip("opentelemetry.sdk")


def seconds(span: dict[str, Any], end: str) -> float:
    return datetime.fromisoformat(span[f"{end}_time"]).timestamp()


def test_a_run_has_a_span_for_each_episode_turn_and_step(tmp_path: Path) -> None:
    stage = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2, "group_size": 2}
    recipe = runs.write(tmp_path, [stage], evaluation={"n_tasks": 3}, trackers=[{"kind": "opentelemetry"}])
    done = runs.run(recipe, tmp_path / "run")
    spans = [json.loads(line) for line in (done.folder / "spans.jsonl").read_text().splitlines()]
    episodes = {s["context"]["span_id"]: s for s in spans if s["name"] == "invoke_agent"}
    stored = list(read_trajectories(done.folder / "trajectories"))
    assert len(episodes) == len(stored) == 2 * 4 + 2 * 3
    told = sorted(
        (s["attributes"]["rlhf.task"], s["attributes"]["gen_ai.usage.output_tokens"]) for s in episodes.values()
    )
    assert told == sorted((r.task_id, r.trajectory.n_tokens) for r in stored)
    turns = [s for s in spans if s["name"].startswith("turn ")]
    assert len(turns) == sum(len(r.trajectory.turns) for r in stored)
    for turn in turns:
        episode = episodes[turn["parent_id"]]
        assert seconds(episode, "start") <= seconds(turn, "start") <= seconds(turn, "end") + 1e-5
        assert seconds(turn, "end") <= seconds(episode, "end") + 0.05  # the two clocks are read one after the other
        assert "rlhf.action" not in turn["attributes"]
    assert {s["attributes"]["rlhf.step"] for s in spans if s["name"] == "step"} >= {1, 2}
    assert not telemetry._listeners


def test_a_listener_that_raises_is_told_no_more() -> None:
    def broken(episode: telemetry.EndedEpisode) -> None:
        raise RuntimeError("no collector")

    leave = telemetry.listen(broken)
    episode = telemetry.EndedEpisode(Trajectory("t", 0, "", (), Outcome.FAILED), "s", 0.0, 0.0)
    with pytest.warns(UserWarning, match="no collector"):
        telemetry.tell(episode)
    telemetry.tell(episode)
    leave()
