"""Tools of an MCP server, and questions to be answered with them.

    environment:
      kind: mcp
      command: [python, my_server.py]
      questions: questions.jsonl

The server is started by its command and spoken to over standard input and output, or reached by its address over HTTP;
either way by the official package `mcp`. Each episode has a session of its own, and with `command` a process too.
An action is a call in JSON, `{"name": ..., "arguments": {...}}`, which is what `agent: {kind: tools}` writes. The tool
`answer` is added to those of the server and ends the episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.core.seed_splits import refuse_two_splits, refuse_unknown
from environments.tasks.dataset_files import json_lines
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_ANSWER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Gives the final answer.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
_HOW = 'Write a call as {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}.'
_MOST_CHARS = 100_000
#: Levels of lists and objects in arguments.
_DEEPEST = 100
_SPLITS = ("train", "dev", "test")
#: Bytes of a server's standard error, the last ones, that an error message has.
_TAIL = 1000

_asking = threading.Lock()
_known: dict[tuple[object, ...], tuple[Mapping[str, Any], ...]] = {}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class McpTools:
    """Questions from a file, to be answered with the tools of an MCP server."""

    offers_tools: ClassVar[bool] = True

    questions: Path
    """JSON lines with `question`, and if there is one `answer`; `id` and `split` (`train`, `dev`, `test`) may be given:
    without a split, of every ten questions the ninth is for `dev`, the tenth for `test`, the others for `train`."""
    command: tuple[str, ...] = ()
    """Command that starts the server, which then speaks over standard input and output."""
    url: str = ""
    """Address of a running server instead, such as `http://127.0.0.1:8000/mcp`."""
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the process; it is given no others but those that any program needs."""
    max_steps: Annotated[int, Field(ge=1)] = 12
    """The episode is cut after so many calls."""
    max_chars: Annotated[int, Field(ge=20)] = 2000
    """Longest reply of a tool; what goes beyond is cut, and said to be."""
    connect_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Longest wait for the server to begin, and to list its tools."""
    call_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """Longest wait for one call; after it the agent reads that the tool did not answer."""

    @model_validator(mode="after")
    def _names_one_server(self) -> McpTools:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either a command or a url: the server is started, or reached")
        return self

    @property
    def properties(self) -> Properties:
        """Properties of the environment: conservative, for an unknown server."""
        return Properties(thread_safe=True, splits=self._splits, package=f"mcp {version('mcp')}")

    @property
    def _splits(self) -> tuple[str, ...]:
        """Splits that the file has questions of; all of them where it cannot be read, which `tasks` says."""
        with suppress(EnvError):
            named = {row["split"] for row in _rows(self.questions)}
            return tuple(split for split in _SPLITS if split in named) or _SPLITS
        return _SPLITS

    @property
    def limits_defaults(self) -> Mapping[str, Any]:
        """A step of the run lasts longer than a call may, so that the agent reads that the tool did not answer."""
        return {"step_timeout_s": max(30.0, self.call_timeout_s + 10.0)}

    def tasks(self, split: str) -> Sequence[Task]:
        """List the questions of a split. The server is asked for its tools once in each process.

        Raises:
            EnvError: no such split or file, a split or line without a question, or a server that cannot be reached.
        """
        refuse_unknown(split, _SPLITS, "McpTools.tasks")
        rows = _rows(self.questions)
        own = [row for row in rows if row["split"] == split]
        if not own:
            raise EnvError(
                f"{self.questions.name} has no question of the split {split}",
                where="environment.questions",
                got=f"{self.questions} with {len(rows)} questions",
                expected="at least one question of each split that the recipe uses",
                hint="give rows a key `split`; without it, 10 questions are 8 of train, 1 of dev and 1 of test",
            )
        tools = [*_tools(self), _ANSWER]
        return [
            Task(id=f"mcp/{split}/{row['id']}", reference=row["answer"], info={"tools": tools, "ask": row["question"]})
            for row in own
        ]

    async def start(self, task: Task) -> McpEpisode:
        """Begin one attempt, with a session of its own. Raises EnvError where the server does not begin."""
        session = _Session(self)
        await session.open()
        return McpEpisode(self, task, session)

    def server(self, errors: Any) -> Any:
        """Server argument of the package's client; a started one writes its standard error to the file `errors`."""
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self.url:
            return self.url
        command, *arguments = self.command
        started = StdioServerParameters(command=command, args=arguments, env=dict(self.variables))
        return stdio_client(started, errlog=errors)


class McpEpisode:
    """Attempt at a question: each action is a call."""

    def __init__(self, settings: McpTools, task: Task, session: _Session) -> None:
        self._settings, self._session, self._reference = settings, session, task.reference
        self._names = {tool["function"]["name"] for tool in task.info["tools"]}
        self._n_steps, self._over = 0, False
        self.opening = StepResult(str(task.info["ask"]))

    async def step(self, action: str) -> StepResult:
        """Make a call; an unreadable or refused one costs a step too."""
        if self._over:
            raise after_end("McpTools step", action)
        self._n_steps += 1
        call = read(action, self._names)
        if not isinstance(call, str) and call[0] == "answer":
            self._over = True
            right = self._reference is None or _plain(call[1].get("text", "")) == _plain(self._reference)
            solved = right and self._reference is not None
            return StepResult("The end.", reward=float(solved), terminated=True, success=solved)
        reply, valid = (call, False) if isinstance(call, str) else await self._session.call(*call)
        if len(reply) > self._settings.max_chars:
            reply = f"{reply[: self._settings.max_chars]}... ({len(reply)} characters)"
        self._over = self._n_steps >= self._settings.max_steps
        return StepResult(reply, truncated=self._over, success=False if self._over else None, valid=valid)

    async def close(self) -> None:
        """End the session, and the server where it was started for it."""
        await self._session.close()


def read(action: str, names: set[str]) -> tuple[str, dict[str, Any]] | str:
    """Name and arguments of a call, or a sentence about what is wrong with it. Never raises."""
    if len(action) > _MOST_CHARS:
        return f"Error: the call has {len(action)} characters, at most {_MOST_CHARS} are read."
    try:
        found = json.loads(action)
    except (ValueError, RecursionError) as error:
        return f"Error: no valid JSON: {str(error)[:80]}. {_HOW}"
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        return f"Error: the call has no name. {_HOW}"
    if name not in names:
        return f"Error: no tool is called {name[:80]!r}; there are {', '.join(sorted(names))}."
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"Error: `arguments` is no object. {_HOW}"
    return (name, arguments) if _can_be_sent(arguments) else "Error: the arguments cannot be sent."


def _can_be_sent(arguments: dict[str, Any]) -> bool:
    """True if a client can write the arguments: no half of a surrogate pair, and not too deep."""
    level: list[Any] = [arguments]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            break
    try:
        return not level and bool(json.dumps(arguments, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


class _Session:
    """Client of the server in its own task, as context managers must exit where they entered."""

    def __init__(self, settings: McpTools) -> None:
        self._settings = settings
        self._calls: asyncio.Queue[tuple[str, dict[str, Any], asyncio.Future[tuple[str, bool]]] | None]
        self._task: asyncio.Task[None] | None = None
        self._wrote = ""
        self.tools: list[dict[str, Any]] = []

    async def open(self) -> None:
        """Connect and ask for the tools. Raises EnvError."""
        self._calls = asyncio.Queue()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await asyncio.shield(ready)
        except BaseException as error:
            if isinstance(error, TimeoutError | asyncio.CancelledError):
                self._task.cancel()  # or nobody would ever end a server that begins late
            if not isinstance(error, Exception):
                raise
            await self.close()
            said = "no answer in time" if isinstance(error, TimeoutError) else _first(error)
            raise EnvError(
                "the MCP server cannot be used",
                where=_place(self._settings),
                got=said + self._wrote,
                expected=f"a server that lists its tools within {self._settings.connect_timeout_s:g} s",
                hint="start it by hand",
            ) from error

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Tool result, and whether the call was valid. Raises EnvError where the server is gone."""
        if self._task is None or self._task.done():
            raise EnvError("the MCP server is gone", where="McpTools step", got=f"a call of {name}{self._wrote}")
        answer: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        await self._calls.put((name, arguments, answer))
        waited: set[asyncio.Future[Any]] = {answer, self._task}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            error = self._task.exception() if not self._task.cancelled() else None
            where, got = f"McpTools call of {name}", _first(error) + self._wrote
            raise EnvError("the MCP server went away", where=where, got=got) from error
        return answer.result()

    async def close(self) -> None:
        """Leave; a server that does not end is left to the package, which ends its process."""
        task, self._task = self._task, None
        if task is None:
            return
        if task.done():
            if not task.cancelled():
                task.exception()  # which whoever called has been told
            return
        await self._calls.put(None)
        _, pending = await asyncio.wait({task}, timeout=10)
        for left in pending:
            left.cancel()
        if pending:
            await asyncio.wait(pending, timeout=5)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            with tempfile.TemporaryFile("w+", prefix="rlhf-mcp-") as errors:
                try:
                    await self._speak(errors, ready)
                finally:
                    self._wrote = _last_words(errors.fileno())
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _speak(self, errors: Any, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        server, wait_s = self._settings.server(errors), self._settings.call_timeout_s
        async with Client(server, read_timeout_seconds=wait_s) as client:
            self.tools = [_definition(tool) async for tool in _listed(client)]
            ready.set_result(None)
            while (wanted := await self._calls.get()) is not None:
                name, arguments, answer = wanted
                said = await self._made(client, name, arguments)
                if not answer.done():
                    answer.set_result(said)

    async def _made(self, client: Any, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, TextContent

        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                result = await client.call_tool(name, arguments)
        except TimeoutError:
            return f"Error: {name} did not answer within {self._settings.call_timeout_s:g} s.", False
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise
            return f"Error: {error.message}", False
        shown = (part.text if isinstance(part, TextContent) else f"({part.type})" for part in result.content)
        text = "\n".join(shown)
        return (f"Error: {text}", False) if result.is_error else (text or "(nothing)", True)


async def _listed(client: Any) -> AsyncIterator[Any]:
    """Yield the tools on every page of the server's list, which ends with no cursor or one that was already given."""
    cursors: list[str | None] = [None]
    while len(set(cursors)) == len(cursors):
        page = await client.list_tools(cursor=cursors[-1])
        for tool in page.tools:
            yield tool
        cursors.append(page.next_cursor or None)


def _definition(tool: Any) -> dict[str, Any]:
    """A tool of the server as a JSON schema of a function."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _tools(settings: McpTools) -> tuple[Mapping[str, Any], ...]:
    """Tools of a server, fetched once in a thread, as the caller may have an event loop."""
    key = (settings.command, settings.url, *sorted(settings.variables.items()))
    with _asking:
        if key not in _known:
            with ThreadPoolExecutor(1, "mcp-tools") as thread:
                found = thread.submit(asyncio.run, _ask(settings)).result()
            if any(tool["function"]["name"] == "answer" for tool in found):
                raise EnvError(
                    "the server has a tool `answer` of its own, which here ends the episode", where=_place(settings)
                )
            _known[key] = found
        return _known[key]


async def _ask(settings: McpTools) -> tuple[Mapping[str, Any], ...]:
    session = _Session(settings)
    await session.open()
    await session.close()
    return tuple(session.tools)


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    """Questions of a file, which is read again when it has changed. Raises EnvError with the number of the line."""
    if not path.is_file():
        raise EnvError("no such file", where="environment.questions", got=str(path), expected="JSON lines of questions")
    stat = path.stat()
    return _read_rows(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read_rows(path: Path, changed_ns: int, size: int) -> Sequence[Mapping[str, Any]]:
    rows: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    places: dict[str, str] = {}
    for number, given in json_lines(path):
        if not isinstance(given.get("question"), str):
            raise EnvError("no question", where=f"{path}:{number}", got=str(given)[:80], expected='{"question": "..."}')
        place = len(rows) % 10
        split = given.get("split", "dev" if place == 8 else "test" if place == 9 else "train")
        refuse_unknown(split, _SPLITS, f"{path}:{number}")
        answer = given.get("answer")
        row = {"id": str(given.get("id", number)), "question": given["question"], "split": split}
        if (row["split"], row["id"]) in seen:
            raise EnvError("two questions of a split have one id", where=f"{path}:{number}", got=row["id"])
        refuse_two_splits(places, row["question"], split, f"{path}:{number}")
        seen.add((row["split"], row["id"]))
        rows.append(row | {"answer": None if answer is None else str(answer)})
    return rows


def _last_words(file: int) -> str:
    """End of what a server wrote to the file of its standard error, to be added to a message; empty if nothing."""
    wrote = os.pread(file, _TAIL, max(0, os.fstat(file).st_size - _TAIL)).decode("utf-8", "replace").strip()
    return f"; it wrote to standard error: {wrote}" if wrote else ""


def _plain(text: object) -> str:
    return " ".join(str(text).casefold().split()).strip(" .!")


def _place(settings: McpTools) -> str:
    return settings.url or " ".join(settings.command)


def _first(error: BaseException | None) -> str:
    """First cause of an error or a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error is not None else "it ended"
