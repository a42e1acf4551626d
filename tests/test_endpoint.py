"""Evaluating a model behind an OpenAI-compatible address, over a real connection, with a server in trouble."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agents.tools import ToolAgent
from environments.base import StepResult
from rlhf.data import Finish, Message, Role, SamplingParams, Task, Trajectory
from rlhf.errors import ContextFull, EngineError
from rlhf.evaluation.baselines import MessageIdRenderer
from rlhf.evaluation.endpoint import EndpointEngine, RetryPolicy
from rlhf.evaluation.store import read_trajectories
from rlhf.rollout.episode import run_episode
from rlhf.rollout.limits import Limits
from tests.commands import last_json, run
from tests.loopback import loopback

Reply = Callable[[dict[str, Any], int], Any]
SUITE = """
attempts: 2
agent: {kind: chat, show_admissible: true}
limits: {max_turns: 6, max_tokens: 16, max_concurrent: 4}
tasks: {split: test, n: 8}
parts:
  small: {environment: {kind: keyhole, rows: 2, columns: 2, loops: 0, max_steps: 6}}
"""


def completion(text: str | None, reason: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def first_possible(body: dict[str, Any]) -> str:
    """A model that takes the first action that its last message lists."""
    listed = body["messages"][-1]["content"].partition("Possible actions:")[2]
    return listed.strip().splitlines()[0].removeprefix("- ")


def some_possible(body: dict[str, Any]) -> str:
    """A model that takes one of the listed actions by lot, and so comes to the goal now and then."""
    listed = body["messages"][-1]["content"].partition("Possible actions:")[2].strip().splitlines()
    return random.Random(json.dumps(body)).choice(listed).removeprefix("- ")


@contextmanager
def served(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server in a thread of its own; `reply` gives JSON, or a Response, or None to drop the connection."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append({**body, "authorization": request.headers.get("Authorization")})
        found = reply(body, len(asked) - 1)
        if found is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)

    with loopback(answer) as url:
        yield url, asked


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "houses.yaml"
    path.write_text(SUITE)
    return path


def ask(url: str, params: SamplingParams | None = None, n_tries: int = 5) -> tuple[Any, str, EndpointEngine]:
    renderer = MessageIdRenderer()
    engine = EndpointEngine(url, "m", renderer, RetryPolicy(n_tries=n_tries, first_s=0.01, most_s=0.02, request_s=5))

    async def once() -> Any:
        try:
            prompt = renderer.prompt([Message(Role.SYSTEM, "play"), Message(Role.USER, "a door")])
            return await engine.generate(prompt, params or SamplingParams())
        finally:
            await engine.close()

    generation = asyncio.run(once())
    return generation, renderer.reply_text(generation.token_ids), engine


def trouble(number: int) -> Any:
    """Every sort of trouble in turn, then an answer."""
    return [
        web.Response(status=429, headers={"Retry-After": "0.01"}, text="slow down"),
        web.Response(status=500, text="oh no"),
        None,
        web.Response(text="<html>bad gateway</html>"),
        {"choices": []},
        {"choices": [{"message": {"content": 7}}]},
        web.json_response(["nothing"]),
    ][number]


def test_a_server_in_trouble_changes_no_figure(suite: Path) -> None:
    with served(lambda body, _: completion(first_possible(body))) as (url, calm_requests):
        calm = last_json(run("evaluate", "--endpoint", url, "--model", "m", "--suite", suite, "--json"))
    tried: Counter[str] = Counter()

    def troubled(body: dict[str, Any], _: int) -> Any:
        key = json.dumps([body["messages"], body["seed"]])
        tried[key] += 1
        # Each third conversation meets one trouble before it is answered, all sorts in turn.
        if tried[key] == 1 and len(tried) % 3 == 0:
            return trouble(len(tried) // 3 % 7)
        return completion(first_possible(body))

    with served(troubled) as (url, requests):
        found = last_json(run("evaluate", "--endpoint", url, "--model", "m", "--suite", suite, "--json"))
    assert len(requests) > len(calm_requests) > 16
    assert found["n"] == 16 and found["n_errors"] == 0
    assert found["summary"] == calm["summary"]


def test_what_stays_refused_is_an_error_and_no_failure(suite: Path) -> None:
    suite.write_text(SUITE.replace("max_concurrent: 4", "max_concurrent: 4, max_error_fraction: 1.0, max_retries: 0"))
    whom: dict[str, int] = {}
    n_refused = 0

    def refused(body: dict[str, Any], _: int) -> Any:
        opening = body["messages"][1]["content"]
        nonlocal n_refused
        number = whom.setdefault(opening, len(whom))
        n_refused += number < 2
        return web.Response(status=503) if number < 2 else completion(first_possible(body))

    with served(refused) as (url, _):
        words = ("--endpoint", url, "--model", "m", "--suite", suite, "--tries", "1", "--json")
        summary = last_json(run("evaluate", *words))["summary"]
    n_errors = summary["errors"]["engine_error"]
    assert n_errors == summary["n_errors"] == n_refused > 0 and n_errors % 2 == 0  # --tries 1: asked once each
    assert summary["n_attempts"] == 16 and summary["success"]["n"] == 16 - n_errors
    assert summary["if_errors_failed"]["value"] <= summary["success"]["value"]


@pytest.mark.parametrize("sort", range(7))
def test_each_sort_of_trouble_is_asked_again(sort: int) -> None:
    with served(lambda _, n: trouble(sort) if n == 0 else completion("go north")) as (url, requests):
        _, text, engine = ask(url)
    assert (text, len(requests), engine.n_refused, engine.n_tokens) == ("go north", 2, 1, (7, 3))


def test_a_wait_that_the_server_asks_for_is_kept() -> None:
    slow_down = web.Response(status=429, headers={"Retry-After": "0.5"}, text="slow down")
    with served(lambda _, n: slow_down if n == 0 else completion("go")) as (url, _):
        begun = time.monotonic()
        _, text, engine = ask(url)  # whose longest wait of its own is 0.02 s
    assert text == "go" and time.monotonic() - begun >= 0.5
    assert engine.last_refusal == "status 429: slow down"


def test_trouble_without_end_is_said() -> None:
    reply = lambda _, n: web.Response(status=500, text="oh no")  # noqa: E731
    with served(reply) as (url, requests), pytest.raises(EngineError, match="did not answer") as caught:
        ask(url, n_tries=3)
    assert len(requests) == 3 and "status 500: oh no, after 3 tries" in caught.value.got


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (404, "--model")])
def test_a_refusal_for_good_is_not_asked_again(status: int, hint: str) -> None:
    reply = lambda _, n: web.Response(status=status, text="no")  # noqa: E731
    with served(reply) as (url, requests), pytest.raises(EngineError, match="refuses") as caught:
        ask(url)
    assert len(requests) == 1 and hint in caught.value.hint


def test_messages_that_are_too_long_end_the_episode_as_a_full_context_does() -> None:
    answer = web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)
    with served(lambda _, n: answer) as (url, _), pytest.raises(ContextFull):
        ask(url)


def test_what_is_sent_and_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    params = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=40, seed=1 << 40, stop_strings=("\n",))
    with (
        served(lambda _, n: completion("go", "length")) as (url, [*_]),
        served(lambda _, n: completion(None)) as (b, sent),
    ):
        cut, _, _ = ask(url, params)
        empty, text, _ = ask(f"{b}/v1/", params)
    assert (cut.finish, empty.finish, text) == (Finish.LENGTH, Finish.STOP, "")
    [body] = sent
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "play"}, {"role": "user", "content": "a door"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["\n"],
        "seed": 0,
        "authorization": "Bearer secret",
    }


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sums.yaml"
    path.write_text(
        "rewards: {right: {kind: exact_match}}\ntasks: {split: test, n: 8}\n"
        "limits: {max_turns: 1, max_tokens: 8, max_retries: 0, max_error_fraction: 0.5, episode_timeout_s: 6}\n"
        "parts: {sums: {environment: {kind: dataset, test: sums.jsonl}}}\n"
    )
    return path


def test_replies_that_are_cut_withheld_or_empty_are_told_apart(questions: Path) -> None:
    def reply(body: dict[str, Any], _: int) -> Any:
        first = int(body["messages"][-1]["content"].split()[0])
        ends = {0: ("1, as", "length"), 1: (None, "content_filter"), 2: (None, "stop"), 3: ("", "length")}
        return completion(*ends.get(first, (str(first + 1), "stop")))

    with served(reply) as (url, _):
        words = ("--endpoint", url, "--model", "m", "--suite", questions, "--tries", "2", "--json")
        result = run("evaluate", *words)
    found, said = last_json(result)["summary"], " ".join(result.stderr.split())
    assert (found["n_solved"], found["errors"]["engine_error"], found["n_errors"]) == (4, 1, 1)
    assert (found["n_replies"], found["n_cut_replies"], found["n_empty_replies"]) == (7, 2, 2)
    assert "caution parts.sums: 2 of 7 replies were cut before they ended, by limits.max_tokens: 8" in said
    assert "caution parts.sums: 2 of 7 replies are empty" in said
    assert f"2 requests to {url} failed" in said and "content filter withheld the reply" in said


def test_a_request_that_is_never_answered_is_asked_again(questions: Path) -> None:
    n = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal n
        n += 1
        is_first = n == 1
        transport = request.transport
        while is_first and transport is not None and not transport.is_closing():  # until the other side gives up
            await asyncio.sleep(0.05)
        body = await request.json()
        return web.json_response(completion(str(int(body["messages"][-1]["content"].split()[0]) + 1)))

    with loopback(answer) as url:
        found = last_json(run("evaluate", "--endpoint", url, "--model", "m", "--suite", questions, "--json"))
    assert (found["summary"]["n_solved"], found["n_errors"], n) == (8, 0, 9)


def test_trajectories_hold_what_was_said(suite: Path, tmp_path: Path) -> None:
    with served(lambda body, _: completion(first_possible(body))) as (url, _):
        last_json(
            run("evaluate", "--endpoint", url, "--model", "m", "--suite", suite, "--out", tmp_path / "out", "--json")
        )
    records = list(read_trajectories(tmp_path / "out" / "trajectories"))
    assert len(records) == 16 and all(turn.action.text and turn.valid for r in records for turn in r.trajectory.turns)


def test_tokens_and_cost_are_those_that_the_server_counts(suite: Path, tmp_path: Path) -> None:
    suite.write_text(SUITE.replace("max_turns: 6", "max_turns: 30").replace("max_steps: 6", "max_steps: 30"))
    prices = ("--price-in", "2", "--price-out", "100", "--json")
    with served(lambda body, _: completion(some_possible(body))) as (url, requests):
        words = ("evaluate", "--endpoint", url, "--model", "m", "--suite", suite, *prices)
        found = last_json(run(*words, "--out", tmp_path / "out"))["summary"]
    # each reply read 7 tokens and sampled 3: for each solved attempt so much of both, and of money
    n = len(requests) / found["n_solved"]
    spent = {"turns": n, "tokens": 3 * n, "prompt_tokens": 7 * n, "cost": (7 * 2 + 3 * 100) * n / 1e6}
    assert found["per_solved"] == pytest.approx(spent)
    assert found["tokens_mean"] == pytest.approx(3 * len(requests) / 16)
    uncounted = lambda body, _: {k: v for k, v in completion(some_possible(body)).items() if k != "usage"}  # noqa: E731
    with served(uncounted) as (url, _):
        result = run("evaluate", "--endpoint", url, "--model", "m", "--suite", suite, *prices)
    without = last_json(result)["summary"]
    assert set(without["per_solved"]) == {"turns"} and without["tokens_mean"] is None
    assert "the server counts no tokens" in result.stderr


def test_half_an_endpoint_is_refused(suite: Path) -> None:
    for arguments, message in (
        (["--endpoint", "http://127.0.0.1:1", "--suite", suite], "go together"),
        (["--suite", suite], "no policy is named"),
        (["random", "--endpoint", "http://127.0.0.1:1", "--model", "m", "--suite", suite], "exclude each other"),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m"], "this target defines no tasks"),
    ):
        result = run("evaluate", *arguments)
        assert result.exit_code == 2 and message in result.stderr and "a recipe, a run" not in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [('{"at": 1}', "[look(at=1)]"), ("{broken", '"arguments": "{broken"')])
def test_calls_of_tools_come_back_in_the_style_of_the_agent(arguments: str, said: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    tools = [{"type": "function", "function": {"name": "look"}}]
    renderer = MessageIdRenderer()

    def reply(body: dict[str, Any], n: int) -> Any:
        assert body["tools"] == tools
        if n == 0:
            return {"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]}
        assert body["messages"][1:] == [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a door"},
        ]
        return completion("done")

    async def talk(url: str) -> list[str]:
        engine = EndpointEngine(url, "m", renderer, style="python")
        try:
            asked = [Message(Role.USER, "look")]
            first = await engine.generate(renderer.prompt(asked, tools), SamplingParams())
            asked += [Message(Role.ASSISTANT, "", first.token_ids), Message(Role.TOOL, "a door")]
            prompt = renderer.prompt(asked, tools)
            assert prompt.extends(first) and first.finish is Finish.STOP
            second = await engine.generate(prompt, SamplingParams())
            return [renderer.reply_text(generation.token_ids) for generation in (first, second)]
        finally:
            await engine.close()

    with served(reply) as (url, _):
        first, second = asyncio.run(talk(url))
    assert said in first and second == "done"


def strict(calls: list[dict[str, Any]]) -> Reply:
    """A server that makes calls once, without a content, and wants a result of each of them right behind."""

    def reply(body: dict[str, Any], n: int) -> Any:
        if n == 0:
            return {"choices": [{"message": {"role": "assistant", "tool_calls": calls}}]}
        messages = body["messages"]
        for at, message in enumerate(messages):
            called = [call["id"] for call in message.get("tool_calls", ())]
            results = takewhile(lambda m: m["role"] == "tool", messages[at + 1 :])
            if called and called != [result["tool_call_id"] for result in results]:
                return web.json_response({"error": "tool_calls must be followed by tool messages"}, status=400)
        return completion("A door.")

    return reply


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        (['{"at": "a"}'], ["assistant with calls", "tool"]),
        (['{"at": "a"}', '{"at": "b"}'], ["assistant", "user"]),  # the agent joins the results
        (["{}"], ["assistant", "user"]),  # the agent refuses the call
    ],
)
def test_each_call_that_is_sent_again_has_its_result(called: list[str], shown: list[str]) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": a}} for i, a in enumerate(called)
    ]
    task = Task("look", info={"tools": tools, "plain_answer": True})
    agent, renderer = ToolAgent(tool_format="hermes", tool_definitions="chat_template"), MessageIdRenderer()

    async def play(url: str) -> Trajectory:
        engine = EndpointEngine(url, "m", renderer, RetryPolicy(n_tries=1))
        try:
            return await run_episode(task, Doors(), agent, engine, renderer, Limits(), SamplingParams())
        finally:
            await engine.close()

    with served(strict(calls)) as (url, asked):
        played = asyncio.run(play(url))
    assert played.solved and len(asked) == 2, played.detail
    sent = [f"{m['role']}{' with calls' * ('tool_calls' in m)}" for m in asked[1]["messages"]]
    assert sent[-2:] == shown


@dataclass(frozen=True)
class Doors:
    """An environment that answers calls, until it is told something."""

    inline = True

    def start(self, task: Task) -> Doors:
        return self

    opening = StepResult("Look around.")

    async def step(self, action: str) -> StepResult:
        is_call = action.startswith("{")
        return StepResult("a door") if is_call else StepResult("", 1.0, terminated=True, success=True)

    async def close(self) -> None:
        pass


def test_an_address_that_nobody_serves_is_told_with_its_name(suite: Path) -> None:
    with socket.socket() as taken:  # bound and not listened at: nothing else can be there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = run("evaluate", "--endpoint", url, "--model", "small", "--suite", suite)
    assert result.exit_code
    assert f"asking small at {url}" in result.stderr
    assert "nothing accepts connections at this address" in result.stderr and url in result.stderr
