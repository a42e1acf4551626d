"""OpenEnv's protocol with the package's own server and client: theirs played here, ours played there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("openenv")

import uvicorn
from aiohttp import web
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment as TheirEnvironment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient

from environments.contrib.remote.openenv import OpenEnv
from environments.games.key_door import Keyhole
from rlhf.data import Outcome, SamplingParams
from rlhf.errors import EnvError
from rlhf.processes import free_port
from rlhf.serving.contrib.openenv import Server


class Guess(Action):
    message: str


class Told(Observation):
    said: str


class Guessing(TheirEnvironment):  # type: ignore[misc]
    """Guess a number that the seed decides."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.n = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Told:
        self.number, self.n = (seed or 0) % 5, 0
        return Told(said="Guess a number below 5.", done=False, reward=None)

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Told:
        self.n += 1
        if action.message == "explode":
            raise RuntimeError("the world has ended")
        right = action.message == str(self.number)
        return Told(said="Yes." if right else "No.", done=right, reward=float(right))

    @property
    def state(self) -> State:
        return State(episode_id="", step_count=self.n)


@pytest.fixture(scope="module")
def theirs() -> Iterator[str]:
    port = free_port()
    app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=8)
    # It asks now and then whether anybody is there, and hangs up where nobody answers in time.
    keeps = {"ws_ping_interval": 0.5, "ws_ping_timeout": 0.5}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", **keeps))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    port, ready, done = free_port(), threading.Event(), threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(Server(Keyhole(rows=2, columns=2), max_sessions=2).application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()
        while not done.is_set():
            await asyncio.sleep(0.05)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{port}"
    done.set()
    thread.join()


def settings(url: str, **keys: Any) -> OpenEnv:
    return OpenEnv(**{"url": url, "action_field": "message", "observation_field": "said", **keys})


async def play(environment: OpenEnv, actions: list[str], seed: int = 3) -> list[Any]:
    task = next(task for task in environment.tasks("train") if task.seed == seed)
    episode = await environment.start(task)
    try:
        return [episode.opening, *[await episode.step(action) for action in actions]]
    finally:
        await episode.close()


def test_an_environment_of_theirs_is_played_here(theirs: str) -> None:
    said = asyncio.run(play(settings(theirs), ["1", "3"]))
    assert [s.reply for s in said] == ["Guess a number below 5.", "No.", "Yes."]
    assert [(s.reward, s.terminated, s.success) for s in said[1:]] == [(0.0, False, None), (1.0, True, True)]
    cut = asyncio.run(play(settings(theirs, max_steps=2), ["1", "1"]))
    assert cut[-1].truncated and cut[-1].success is False


def test_whole_actions_and_observations_are_json(theirs: str) -> None:
    made = settings(theirs, action_field="", observation_field="")
    said = asyncio.run(play(made, ["guess", "[3]", '{"massage": "3"}', '{"message": "3"}']))
    assert [s.valid for s in said] == [True, False, False, False, True]
    assert said[3].reply == "Error: Invalid message", "the server's own words"
    assert json.loads(said[4].reply) == {"said": "Yes."} and said[4].success


def test_errors_of_the_server_are_errors_of_the_environment(theirs: str) -> None:
    with pytest.raises(EnvError, match="the world has ended"):
        asyncio.run(play(settings(theirs), ["explode"]))
    with pytest.raises(EnvError, match="no such field"):
        asyncio.run(play(settings(theirs, observation_field="text"), []))
    with pytest.raises(EnvError, match="cannot be reached"):
        asyncio.run(play(settings(f"http://127.0.0.1:{free_port()}"), []))


def test_a_rollout_goes_through_their_server(theirs: str) -> None:
    from agents.chat import ChatAgent
    from rlhf.inference.scripted import ScriptedEngine
    from rlhf.rollout.episode import run_episode
    from rlhf.rollout.limits import Limits
    from rlhf.rollout.renderer import Renderer
    from tests.training.tiny import policy

    environment, tokenizer = settings(theirs), policy().tokenizer
    task = environment.tasks("train")[2]
    engine = ScriptedEngine(lambda text: "2", tokenizer=tokenizer)
    parts = (environment, ChatAgent(system=""), engine, Renderer(tokenizer), Limits(), SamplingParams())
    assert asyncio.run(run_episode(task, *parts)).outcome is Outcome.SOLVED


def test_an_environment_of_ours_is_played_by_their_client(ours: str) -> None:
    environment = Keyhole(rows=2, columns=2)
    task = environment.tasks("test")[4]
    plan = environment.plan(task, ())
    assert plan

    async def go() -> list[Any]:
        async with GenericEnvClient(base_url=ours) as client:
            results = [await client.reset(seed=task.seed, split="test")]
            for action in plan:
                results.append(await client.step({"text": action}))
            state = await client.state()
            assert state["step_count"] == len(plan) and state["episode_id"] == task.id
            return results

    results = asyncio.run(go())
    assert results[0].observation["text"] == environment.start(task).opening.reply
    assert [r.done for r in results] == [False] * len(plan) + [True]
    assert results[-1].reward == 1.0 and results[-1].observation["success"] is True


def test_ours_through_ours_is_the_same_transcript(ours: str) -> None:
    environment = Keyhole(rows=2, columns=2)
    task = environment.tasks("train")[7]
    plan = list(environment.plan(task, ()) or ())
    far = asyncio.run(play(OpenEnv(url=ours), ["dance", *plan], seed=task.seed))

    async def near() -> list[Any]:
        episode = environment.start(task)
        return [episode.opening, *[await episode.step(action) for action in ["dance", *plan]]]

    assert far == asyncio.run(near())


WORLD = """
import os
from dataclasses import dataclass
from pathlib import Path

from environments.base import Properties, StepResult
from rlhf.data import Task


@dataclass(frozen=True)
class Number:
    isolated: bool = False

    @property
    def properties(self):
        return Properties(isolated=self.isolated)

    def tasks(self, split):
        return [Task("number/3", seed=3)]

    def start(self, task):
        return Attempt()

    def close(self):
        Path("closed").write_text(str(os.getpid()))


class Attempt:
    def __init__(self):
        self.opening = StepResult(str(os.getpid()))

    async def step(self, action):
        return StepResult("", terminated=True, success=True)

    async def close(self):
        pass
"""


@pytest.mark.parametrize("isolated", ["false", "true"])
def test_the_command_serves_an_environment_as_a_run_does_and_closes_it(isolated: str, tmp_path: Path) -> None:
    (tmp_path / "number.py").write_text(WORLD)
    words = ["serve-environment", "./number.py:Number", f"isolated={isolated}", "--port", "0"]
    command = [sys.executable, "-m", "rlhf.cli", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "by OpenEnv's protocol at" in line)
            [opening] = asyncio.run(play(OpenEnv(url=line.split()[-1]), []))
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
    assert (int(opening.reply) == process.pid) == (isolated == "false")
    assert not psutil.pid_exists(int(opening.reply)) and (isolated == "true" or (tmp_path / "closed").exists())


def test_what_cannot_be_asked_is_refused_and_the_session_goes_on(ours: str) -> None:
    import aiohttp

    async def go() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{ours}/ws") as ws:
            answers = []
            asked: list[Any] = [
                "no json",
                "[" * 100_000,
                {"type": "dance"},
                {"type": "reset", "data": ["seed", 1]},
                {"type": "step", "data": {"text": "go east"}},
                {"type": "reset", "data": {"split": "moon"}},
                {"type": "reset", "data": {"task_id": "nobody"}},
                {"type": "reset", "data": {"seed": 1}},
                {"type": "step", "data": {"message": "go east"}},
                {"type": "step", "data": {"text": "look"}},
            ]
            for message in asked:
                await ws.send_str(message if isinstance(message, str) else json.dumps(message))
                answers.append(await ws.receive_json())
            return answers

    answers = asyncio.run(go())
    codes = [a["data"].get("code") for a in answers]
    assert codes == [
        "INVALID_JSON", "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "SESSION_ERROR", "VALIDATION_ERROR",
        "VALIDATION_ERROR", None, "VALIDATION_ERROR", None,
    ]  # fmt: skip


def test_sessions_beyond_the_limit_are_told(ours: str) -> None:
    async def go() -> None:
        made = OpenEnv(url=ours)
        async with contextlib.AsyncExitStack() as stack:
            for task in made.tasks("train")[:2]:
                episode = await made.start(task)
                stack.push_async_callback(episode.close)
            with pytest.raises(EnvError, match="CAPACITY_REACHED"):
                await made.start(made.tasks("train")[2])

    asyncio.run(go())


def test_a_connection_outlives_an_agent_that_thinks_for_long(theirs: str) -> None:
    async def go() -> Any:
        environment = settings(theirs)
        episode = await environment.start(environment.tasks("train")[3])
        try:
            await asyncio.sleep(1.5)
            return await episode.step("1")
        finally:
            await episode.close()

    assert asyncio.run(go()).reply in ("Yes.", "No.")


def test_a_split_is_asked_for_by_name(ours: str) -> None:
    far, near = OpenEnv(url=ours), Keyhole(rows=2, columns=2)
    task = near.tasks("dev")[3]
    same = next(t for t in far.tasks("dev") if t.seed == task.seed)

    async def opening() -> str:
        episode = await far.start(same)
        await episode.close()
        return episode.opening.reply

    assert asyncio.run(opening()) == near.start(task).opening.reply


def test_a_page_of_a_browser_may_not_connect() -> None:
    """A page reaches this machine from wherever it comes, and a name of its own may lead here: Host says nothing."""
    import aiohttp

    async def tried(server: Server, origin: str | None) -> int:
        runner = web.AppRunner(server.application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        headers = {} if origin is None else {"Origin": origin, "Host": origin.partition("//")[2]}
        try:
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/metadata", headers=headers) as found:
                    status = found.status
                try:
                    async with client.ws_connect(f"http://127.0.0.1:{port}/ws", headers=headers):
                        assert status == 200
                except aiohttp.WSServerHandshakeError as error:
                    assert error.status == status
                return status
        finally:
            await runner.cleanup()

    closed, opened = Server(Keyhole()), Server(Keyhole(), origins=["https://lab.example"])
    assert asyncio.run(tried(closed, None)) == 200
    for origin in ("https://evil.example", "http://127.0.0.1:8000", "null", ""):
        assert asyncio.run(tried(closed, origin)) == 403
    assert asyncio.run(tried(opened, "https://lab.example")) == 200
    assert asyncio.run(tried(opened, "https://lab.example.evil.com")) == 403
