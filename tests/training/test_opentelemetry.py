"""OpenTelemetry spans of episodes: in a run's folder, or at a collector that takes OTLP over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agents.tool_calls import ToolCall
from rlhf.data import Action, Outcome, Trajectory, Turn
from rlhf.evaluation.store import read_trajectories
from rlhf.rollout import telemetry
from rlhf.training.contrib.opentelemetry import OpenTelemetry
from rlhf.training.trackers import TrackedRun
from tests.training import runs

pytest.importorskip("opentelemetry.sdk")


def seconds(span: dict[str, Any], end: str) -> float:
    return datetime.fromisoformat(span[f"{end}_time"]).timestamp()


@contextmanager
def collector(seconds: float = 0.0) -> Iterator[tuple[str, list[Any]]]:
    """A receiver of OTLP over HTTP that takes `seconds` for each request: its address, and the spans that came."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            asked = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            spans.extend(span for of in asked.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


def values(span: Any) -> dict[str, Any]:
    """Attributes of a span that came as protobuf; of lists their number."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_run_has_a_span_for_each_episode_turn_and_step(tmp_path: Path) -> None:
    stage = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2, "group_size": 2}
    with collector() as (endpoint, came):
        trackers = [{"kind": "opentelemetry"}, {"kind": "opentelemetry", "endpoint": endpoint}]
        recipe = runs.write(tmp_path, [stage], evaluation={"n_tasks": 3}, trackers=trackers)
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
    # A collector is sent the same, episodes with their turns below them.
    assert sorted(s.name for s in came) == sorted(s["name"] for s in spans)
    sent = {s.span_id: s for s in came if s.name == "invoke_agent"}
    got = sorted((values(s)["rlhf.task"], values(s)["gen_ai.usage.output_tokens"]) for s in sent.values())
    assert got == told
    assert all(
        s.parent_span_id in sent and s.trace_id == sent[s.parent_span_id].trace_id for s in came if "turn" in s.name
    )


def test_tool_calls_arrive_whole_at_a_slow_collector(tmp_path: Path) -> None:
    calls = [ToolCall("look", {"at": "Fn(3), {x}"}).text, ToolCall("take", {"n": 2}).text]
    turn = Turn(Action("\n".join(calls), parts=tuple(calls)), "a lamp", 0.5, duration_s=1.5)
    plain = Turn(Action("{not a call}"), "what?", valid=False, duration_s=0.5)
    attempt = Trajectory("task", 0, "", (turn, plain), Outcome.SOLVED, duration_s=2.5)
    n = 1000  # 5,000 spans, more than twice what the SDK holds back by default
    with collector(0.05) as (endpoint, came):
        live = OpenTelemetry(endpoint=endpoint, with_text=True).begin(TrackedRun("run", tmp_path, {}, "1"))
        for i in range(n):
            telemetry.tell(telemetry.EndedEpisode(attempt, f"s{i}", 1_000_000.0 + i, 0.25))
        live.end()
    assert len(came) == 5 * n and len({s.span_id for s in came}) == 5 * n
    episode = next(s for s in came if values(s).get("gen_ai.conversation.id") == "s7")
    turns = sorted((s for s in came if s.parent_span_id == episode.span_id), key=lambda s: s.name)
    assert [s.name for s in turns] == ["turn 1", "turn 2"] and values(turns[0])["rlhf.reward"] == 0.5
    tools = [s for s in came if s.parent_span_id in {s.span_id for s in turns}]
    assert sorted(s.name for s in tools) == ["execute_tool look", "execute_tool take"]
    look = next(s for s in tools if s.name.endswith("look"))
    assert json.loads(values(look)["gen_ai.tool.call.arguments"]) == {"at": "Fn(3), {x}"}
    begun = 1_000_007.25
    assert (look.start_time_unix_nano, look.end_time_unix_nano) == (int(begun * 1e9), int((begun + 1.5) * 1e9))


def test_a_listener_that_raises_is_told_no_more() -> None:
    def broken(episode: telemetry.EndedEpisode) -> None:
        raise RuntimeError("no collector")

    leave = telemetry.listen(broken)
    episode = telemetry.EndedEpisode(Trajectory("t", 0, "", (), Outcome.FAILED), "s", 0.0, 0.0)
    with pytest.warns(UserWarning, match="no collector"):
        telemetry.tell(episode)
    telemetry.tell(episode)
    leave()
