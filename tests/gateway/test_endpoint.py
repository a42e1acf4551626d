"""The gateway in front of any OpenAI-compatible server: outside agents on suites, and demonstrations of its model."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from environments.games.key_door import Keyhole
from environments.workers.pool import Processes
from rewards.shaping.outcome import Outcome as OutcomeReward
from rlhf.build.train import train
from rlhf.evaluation.baselines import MessageIdRenderer, RandomSeedEngine
from rlhf.evaluation.store import read_trajectories
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.environment import External
from rlhf.gateway.programs import KEY
from rlhf.recipe import load
from rlhf.recipe.text import to_text
from rlhf.rollout.limits import Limits
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from rlhf.serving.gateway import Serving
from tests.commands import last_json, run
from tests.environments.troubled import Troubled
from tests.gateway.talks import post
from tests.gateway.test_examples import EXAMPLES
from tests.loopback import loopback

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
AGENT = f"{sys.executable} {EXAMPLES / 'openai_sdk.py'}"
WORLD = {"kind": "tools", "questions": ["price"], "max_steps": 6}


def knowing(body: dict[str, Any]) -> dict[str, Any]:
    """A model that calls tools as the wire has it: it looks a price up, and answers with it."""
    assert [tool["function"]["name"] for tool in body["tools"]] == ["lookup", "calculator", "answer"]
    last = body["messages"][-1]
    if last["role"] == "user":
        name, arguments = "lookup", {"name": last["content"].split()[3]}
    else:
        (call,) = body["messages"][-2]["tool_calls"]
        assert last["role"] == "tool" and last["tool_call_id"] == call["id"]
        name, arguments = "answer", {"value": int(last["content"].split()[-1])}
    call = {"id": f"of-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": "Well." if name == "lookup" else None, "tool_calls": [call]}
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": usage}


@pytest.fixture(scope="module")
def temperatures() -> list[float]:
    """Those that the model was asked at."""
    return []


@pytest.fixture(scope="module")
def server(temperatures: list[float]) -> Iterator[str]:
    """The address of such a model."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        temperatures.append(body["temperature"])
        return web.json_response(knowing(body))

    with loopback(answer) as url:
        yield url


def test_an_outside_agent_is_evaluated_on_a_suite_with_the_model_of_a_server(server: str, tmp_path: Path) -> None:
    words = ("--endpoint", server, "--model", "m", "--suite", "tools", "-n", "2", "--command", AGENT)
    # Of the suite's questions this model knows prices alone.
    suite = tmp_path / "prices.yaml"
    suite.write_text(to_text({"parts": {"prices": {"environment": WORLD}}, "tasks": {"n": 3}}))
    words = ("--endpoint", server, "--model", "m", "--suite", str(suite), "--command", AGENT, "--programs", "1")
    found = last_json(run("evaluate", *words, "--out", str(tmp_path / "out"), "--json"))
    assert found["n"] == 3 and found["success"] == 1.0 and found["n_errors"] == 0
    assert found["summary"]["tokens_mean"] is not None
    kept = list(read_trajectories(tmp_path / "out" / "trajectories"))
    assert all("Well.\n<tool_call>" in record.trajectory.turns[0].action.reply_text for record in kept)


def test_a_command_without_a_model_is_refused() -> None:
    done = run("evaluate", "random", "--suite", "tools", "--command", AGENT)
    assert done.exit_code == 2 and "--command" in done.stderr


@pytest.fixture(scope="module")
def recorded(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three attempts that a program outside makes with the model of the server, by `rlhf gateway`."""
    folder = tmp_path_factory.mktemp("recorded")
    stages = [{"kind": "policy_gradient", "steps": 1, "temperature": t} for t in (0.9, 0.7)]
    recipe = {"policy": {"kind": "from_scratch"}, "environment": WORLD, "agent": {"kind": "chat"}, "stages": stages}
    recipe |= {"name": "prices", "rewards": {"success": {"kind": "outcome"}}}
    (folder / "prices.yaml").write_text(to_text(recipe))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serving = [sys.executable, "-m", "rlhf.cli", "gateway", str(folder / "prices.yaml"), "--endpoint", server]
    serving += [
        "--model",
        "m",
        "-n",
        "3",
        "--reward",
        "environment",
        "--port",
        str(port),
        "--out",
        str(folder / "kept"),
    ]
    variables = os.environ | {KEY: "known", "RLHF_GATEWAY": f"http://127.0.0.1:{port}"}
    process = subprocess.Popen(serving, env=variables, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "gateway at" in line:
                break
        rest = threading.Thread(target=process.stderr.read, daemon=True)
        rest.start()
        subprocess.run([sys.executable, str(EXAMPLES / "openai_sdk.py")], env=variables, timeout=120, check=True)
        assert process.wait(60) == 0
    finally:
        process.kill()
    return folder / "kept"


def test_solved_attempts_are_kept_as_chats(recorded: Path) -> None:
    assert len(list(read_trajectories(recorded / "trajectories"))) == 3
    rows = [json.loads(line) for line in (recorded / "chats.jsonl").read_text().splitlines()]
    assert len({row["task"] for row in rows}) == 3
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        assert row["messages"][2]["content"].startswith('Well.\n<tool_call>\n{"name": "lookup"')
        assert len(row["tools"]) == 3


def test_replies_are_sampled_at_the_temperature_of_the_last_stage(recorded: Path, temperatures: list[float]) -> None:
    assert 0.7 in temperatures and 0.9 not in temperatures


def opened(out: Path, environment: External, n: int) -> list[str]:
    """The tasks of `n` sessions that are open at once, of a gateway that keeps its attempts in `out`."""

    async def body() -> list[str]:
        parts: dict[str, Any] = {"environment": environment, "agent": ExternalAgent(), "engine": RandomSeedEngine()}
        parts |= {"renderer": MessageIdRenderer(), "limits": Limits(start_timeout_s=5.0), "seed": 0}
        runner = RolloutRunner(**parts, rewards={"success": WeightedReward("success", 1.0, OutcomeReward())})
        serving = Serving(runner, list(environment.tasks("train")), out, 1.0)
        gateway = await serving.start()
        try:
            found = [await asyncio.to_thread(post, f"{gateway.url}/sessions", gateway.key) for _ in range(n)]
            for mine in found:
                await asyncio.to_thread(post, f"{mine['url']}/fail", mine["key"], {"message": "enough"})
            async with asyncio.timeout(30):
                while serving.outcomes.total() < n:
                    await asyncio.sleep(0.01)
            return [mine["task"]["id"] for mine in found]
        finally:
            await serving.close()

    return asyncio.run(body())


def test_a_gateway_that_is_started_again_goes_on_with_the_next_tasks(tmp_path: Path) -> None:
    environment = External(environment=Keyhole())
    listed = [task.id for task in environment.tasks("train")[:5]]
    assert opened(tmp_path, environment, 3) == listed[:3]
    assert opened(tmp_path, environment, 2) == listed[3:]


def test_a_session_that_the_world_has_no_episode_for_is_told_to_come_again(tmp_path: Path) -> None:
    world = Processes(environment=Troubled(thread_safe=False), n_workers=1)
    try:
        with pytest.raises(urllib.error.HTTPError, match="429"):
            opened(tmp_path, External(environment=world, reward="environment"), 2)
    finally:
        world.close()


def test_a_supervised_stage_learns_from_recorded_chats(recorded: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "taught",
        "policy": {"kind": "from_scratch", "hidden_size": 32, "n_layers": 1, "n_heads": 2},
        "environment": WORLD,
        "agent": {"kind": "tools", "tool_format": "hermes", "tool_definitions": "chat_template"},
        "rewards": {"success": {"kind": "outcome"}},
        "limits": {"max_tokens": 8, "max_turns": 2},
        "evaluation": {"n_tasks": 1},
        "stages": [{"kind": "supervised", "data": {"path": str(recorded / "chats.jsonl")}, "epochs": 1}],
    }
    path = tmp_path / "taught.yaml"
    path.write_text(to_text(recipe))
    train(load(str(path)), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["supervised/n_demonstrations"] for line in lines if "supervised/loss" in line) == 3
