"""A real MCP server, over standard input and output and over HTTP, as a tool environment."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from environments.contrib.remote.mcp_tools import McpTools, read
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.gateway.environment import External
from rlhf.processes import free_port
from rlhf.recipe.builder import plain_part
from rlhf.recipe.model import recipe_of

SERVER = '''
import os, sys, time
from mcp.server import MCPServer

server = MCPServer("people")
CITY = {"Mia": "Rome", "Ben": "Oslo"}
seen = []

@server.tool()
def city(name: str) -> str:
    """Where somebody lives."""
    seen.append(name)
    return CITY[name]

@server.tool()
def asked() -> str:
    """Whom this session has asked for."""
    return ", ".join(seen) or "nobody"

@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(60)
    return "late"

@server.tool()
def die() -> str:
    """Ends the server."""
    print("out of", "fuel", file=sys.stderr, flush=True)
    os._exit(3)

if len(sys.argv) > 1:
    server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run(transport="stdio")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mcp")
    (made / "server.py").write_text(SERVER)
    rows = [
        {"question": f"Where does {name} live?", "answer": city} for name, city in (("Mia", "Rome"), ("Ben", "Oslo"))
    ]
    (made / "questions.jsonl").write_text("".join(json.dumps(row | {"split": "test"}) + "\n" for row in rows))
    return made


def over_pipes(folder: Path, **keys: Any) -> McpTools:
    return McpTools(questions=folder / "questions.jsonl", command=(sys.executable, str(folder / "server.py")), **keys)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(folder / "server.py"), str(port)], stderr=subprocess.DEVNULL)
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


#: Two pages of tools; where it has an argument, the second names itself as the next.
PAGES = """
import asyncio, sys
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

def tool(name):
    return Tool(name=name, input_schema={"type": "object", "properties": {}})

async def listed(context, asked):
    if asked is None or asked.cursor is None:
        return ListToolsResult(tools=[tool("first")], next_cursor="2")
    return ListToolsResult(tools=[tool("second")], next_cursor="2" if len(sys.argv) > 1 else None)

async def called(context, asked):
    return CallToolResult(content=[TextContent(type="text", text=f"called {asked.name}")])

async def main():
    server = Server("pages", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

asyncio.run(main())
"""


@pytest.mark.parametrize("repeats", [(), ("repeats",)])
def test_tools_of_every_page_can_be_called(folder: Path, repeats: tuple[str, ...]) -> None:
    (folder / "pages.py").write_text(PAGES)
    command = (sys.executable, str(folder / "pages.py"), *repeats)
    environment = McpTools(questions=folder / "questions.jsonl", command=command)
    names = [tool["function"]["name"] for tool in environment.tasks("test")[0].info["tools"]]
    assert names == ["first", "second", "answer"]
    said = asyncio.run(play(environment, [call("second")]))
    assert said[-1].reply == "called second"


def call(tool: str, /, **arguments: Any) -> str:
    return json.dumps({"name": tool, "arguments": arguments})


async def play(environment: McpTools, actions: list[str], task: int = 0) -> list[Any]:
    episode = await environment.start(list(environment.tasks("test"))[task])
    try:
        return [episode.opening, *[await episode.step(action) for action in actions]]
    finally:
        await episode.close()


@pytest.mark.parametrize("way", ["pipes", "http"])
def test_questions_are_answered_with_tools(way: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if way == "pipes":
        environment = over_pipes(folder)
    else:
        environment = McpTools(questions=folder / "questions.jsonl", url=request.getfixturevalue("address"))
    task = environment.tasks("test")[0]
    assert [tool["function"]["name"] for tool in task.info["tools"]] == ["city", "asked", "hang", "die", "answer"]
    assert task.info["tools"][0]["function"]["parameters"]["required"] == ["name"]
    said = asyncio.run(play(environment, [call("city", name="Mia"), call("answer", text="rome.")]))
    assert [s.reply for s in said] == ["Where does Mia live?", "Rome", "The end."]
    assert said[-1].success is True and said[-1].reward == 1.0
    wrong = asyncio.run(play(environment, [call("answer", text="Oslo")]))
    assert wrong[-1].success is False and wrong[-1].terminated


def test_each_episode_has_a_server_of_its_own(folder: Path) -> None:
    environment = over_pipes(folder)
    for _ in range(2):
        said = asyncio.run(play(environment, [call("asked"), call("city", name="Ben"), call("asked")]))
        assert [s.reply for s in said[1:]] == ["nobody", "Oslo", "Ben"]


def test_what_a_tool_refuses_is_read_and_costs_a_step(folder: Path) -> None:
    actions = [call("city", name="Zoe"), call("city"), call("town", name="Mia"), "city Mia", "[1]", call("asked")]
    deep = call("city", name=json.loads("[" * 300 + "]" * 300))
    for unsent in ('{"name": "city", "arguments": {"name": "\\ud800"}}', deep):
        [_, said_of_it] = asyncio.run(play(over_pipes(folder), [unsent]))
        assert said_of_it.reply == "Error: the arguments cannot be sent." and not said_of_it.valid
    said = asyncio.run(play(over_pipes(folder, max_steps=6), actions))
    assert [s.valid for s in said[1:]] == [False] * 5 + [True]
    assert all(s.reply.startswith("Error") for s in said[1:6])
    assert said[-1].truncated and said[-1].success is False


def test_a_tool_that_hangs_is_given_up(folder: Path) -> None:
    begun = time.monotonic()
    said = asyncio.run(play(over_pipes(folder, call_timeout_s=1.0), [call("hang"), call("answer", text="Rome")]))
    assert "did not answer within 1 s" in said[1].reply and said[2].success
    assert time.monotonic() - begun < 30


def test_a_run_waits_longer_for_a_step_than_the_agent_for_a_call(folder: Path) -> None:
    environment = plain_part("environment", over_pipes(folder, call_timeout_s=50.0))
    shown = {"policy": {"kind": "from_scratch"}, "environment": environment, "rewards": {"r": {"kind": "outcome"}}}
    assert (
        recipe_of(shown | {"stages": [{"kind": "policy_gradient"}]}, name="mcp", base=folder).limits.step_timeout_s > 50
    )
    assert External(environment=over_pipes(folder, call_timeout_s=300.0)).environment_limits.step_timeout_s > 300


def test_a_server_that_dies_is_an_error_with_what_it_wrote(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvError, match="the MCP server") as raised:
        asyncio.run(play(over_pipes(folder, call_timeout_s=3.0), [call("die"), call("asked"), call("asked")]))
    assert "it wrote to standard error: out of fuel" in raised.value.got.replace("\n", " ")
    assert "out of fuel" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "command",
    [("no-such-program",), (sys.executable, "-c", "print('hello')"), (sys.executable, "-c", "raise SystemExit('no')")],
)
def test_a_server_that_does_not_begin_is_said_to(
    folder: Path, command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    made = McpTools(questions=folder / "questions.jsonl", command=command, connect_timeout_s=5.0)
    with pytest.raises(EnvError, match="the MCP server cannot be used") as raised:
        made.tasks("test")
    assert raised.value.got.endswith("it wrote to standard error: no") == ("SystemExit" in command[-1])
    assert "no\n" not in capfd.readouterr().err.splitlines(keepends=True)


def test_the_splits_are_those_that_the_file_has(folder: Path) -> None:
    some = folder / "some.jsonl"
    environment = McpTools(questions=some, command=(sys.executable, str(folder / "server.py")))
    assert environment.properties.splits == ("train", "dev", "test")  # `tasks` says that there is no file
    some.write_text("".join(json.dumps({"question": f"{i}?"}) + "\n" for i in range(8)))
    assert environment.properties.splits == ("train",)
    with pytest.raises(EnvError, match=r"some\.jsonl has no question of the split test") as raised:
        environment.tasks("test")
    assert "key `split`" in raised.value.hint
    some.write_text("".join(json.dumps({"question": f"{i}?"}) + "\n" for i in range(10)))
    assert environment.properties.splits == ("train", "dev", "test")
    assert [task.info["ask"] for task in environment.tasks("test")] == ["9?"]


def test_what_is_no_question_is_said_with_its_line(folder: Path) -> None:
    bad = folder / "bad.jsonl"
    bad.write_text('{"question": "a"}\n\n{"ask": 1}\n')
    with pytest.raises(EnvError, match=r"bad\.jsonl:3"):
        McpTools(questions=bad, command=(sys.executable, str(folder / "server.py"))).tasks("test")
    with pytest.raises(ValueError, match="either a command or a url"):
        McpTools(questions=bad)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 5000, "{}", '{"name": 1}', '{"name": "f", "arguments": 3}', "x" * 200_000]
)
def test_any_text_is_read_or_refused_in_a_sentence(text: str) -> None:
    assert str(read(text, {"f"})).startswith("Error: ")


def test_a_server_that_begins_too_late_is_ended(folder: Path) -> None:
    # It never speaks, and ends when nobody holds its input any more; the attempt ends before it is given up.
    waits = f"import sys; open({str(folder / 'begun')!r}, 'w').close(); sys.stdin.read(); sys.exit()"
    made = McpTools(questions=folder / "questions.jsonl", command=(sys.executable, "-c", waits))

    async def go() -> float:
        begun = asyncio.create_task(made.start(Task("t", info={"tools": [], "ask": "?"})))
        while not (folder / "begun").exists():
            await asyncio.sleep(0.05)
        begun.cancel()
        before = time.monotonic()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=20)
        return time.monotonic() - before

    assert asyncio.run(go()) < 10


def test_a_question_may_hold_any_character_and_has_an_id_of_its_own(folder: Path) -> None:
    odd = folder / "odd.jsonl"
    server = (sys.executable, str(folder / "server.py"))
    odd.write_text(json.dumps({"question": "a\u2028b", "split": "test"}, ensure_ascii=False), encoding="utf-8")
    assert McpTools(questions=odd, command=server).tasks("test")[0].info["ask"] == "a\u2028b"
    odd.write_text('{"question": "a", "id": 1, "split": "test"}\n{"question": "b", "id": "1", "split": "test"}')
    with pytest.raises(EnvError, match=r"one id"):
        McpTools(questions=odd, command=server).tasks("test")
    odd.write_text('{"question": "a", "split": "train"}\n{"question": "a", "split": "test"}')
    with pytest.raises(EnvError, match=r"one question is in two splits"):
        McpTools(questions=odd, command=server).tasks("test")
