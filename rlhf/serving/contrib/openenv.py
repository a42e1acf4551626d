"""OpenEnv server of any environment: a WebSocket, one episode at a time per connection.

    GET /health, /metadata, /schema    WS /ws

A `reset` takes `seed` (the task of that seed, or one by its remainder), or `task_id`; and `split`, by default `train`.
An action is `{"text": ...}`. An observation has `text`, `admissible_actions`, `valid`, `success`, `truncated`,
`state_key` and `task_id`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from environments.base import Environment, StepResult, properties_of
from environments.core.picked_tasks import listed
from rlhf.data import Task
from rlhf.errors import RlhfError
from rlhf.rollout.env_session import EnvSession, EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.executors import CallExecutor
from rlhf.rollout.limits import Limits

_ACTION = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["text"],
}
_OBSERVATION = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "admissible_actions": {"type": "array", "items": {"type": "string"}},
        "valid": {"type": "boolean"},
        "success": {"type": ["boolean", "null"]},
        "truncated": {"type": "boolean"},
        "state_key": {"type": ["string", "null"]},
        "task_id": {"type": "string"},
    },
}


class Refused(Exception):
    """Error of a client's request.

    Attributes:
        code: one of OpenEnv's codes of errors.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """Serves one environment to many connections.

    Args:
        environment: what is served; its calls run as in a rollout, under the same limits.
        limits: of time.
        max_sessions: connections at a time; the next one is told that there is no room.
        origins: of pages in a browser that may connect, such as `https://lab.example`; without any no page may.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        limits: Limits | None = None,
        max_sessions: int = 64,
        origins: Collection[str] = (),
    ) -> None:
        self.environment, self.limits, self.max_sessions = environment, limits or Limits(), max_sessions
        self.origins = frozenset(origins)
        self._executor: CallExecutor | None = None
        self._tasks: dict[str, Sequence[Task]] = {}
        self._n_sessions = 0

    def application(self) -> Any:
        """The aiohttp application."""
        from aiohttp import web

        @web.middleware  # type: ignore[untyped-decorator]  # aiohttp may be absent
        async def no_pages(request: Any, handler: Any) -> Any:
            """Refuse requests from browser pages, which reach this machine from anywhere."""
            if "Origin" in request.headers and request.headers["Origin"] not in self.origins:
                raise web.HTTPForbidden(text=f"{request.headers['Origin']} may not use this server")
            return await handler(request)

        app = web.Application(middlewares=[no_pages])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metadata", self._metadata)
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/ws", self._session)
        app.on_cleanup.append(self._close)
        return app

    async def _health(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"status": "healthy"})

    async def _metadata(self, request: Any) -> Any:
        from aiohttp import web

        declared = properties_of(self.environment)
        about = (type(self.environment).__doc__ or "").strip().partition("\n")[0]
        return web.json_response(
            {"name": type(self.environment).__name__, "description": about, "version": declared.package or "0"}
        )

    async def _schema(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"action": _ACTION, "observation": _OBSERVATION, "state": {"type": "object"}})

    async def _session(self, request: Any) -> Any:
        """Session of a connection, from its first message to its end."""
        from aiohttp import WSMsgType, web

        socket = web.WebSocketResponse(max_msg_size=2**20)
        await socket.prepare(request)
        if self._n_sessions >= self.max_sessions:
            await socket.send_str(_error("CAPACITY_REACHED", f"{self.max_sessions} sessions are open"))
            await socket.close()
            return socket
        self._n_sessions += 1
        self._executor = self._executor or executor_for(self.environment)
        session = _Session(self)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                answer = await session.answer(message.data)
                if answer is None:
                    break
                await socket.send_str(answer)
        finally:
            self._n_sessions -= 1
            await session.close()
        await socket.close()
        return socket

    async def _close(self, app: Any) -> None:
        if self._executor is not None:
            await self._executor.close()

    async def begin(self, task: Task) -> tuple[EnvSession, StepResult]:
        """Start an episode. Raises EpisodeEnded."""
        assert self._executor is not None
        live = EnvSession(self.environment, task, self.limits, self._executor.open())
        try:
            return live, await live.start()
        except BaseException:
            await live.close([])
            raise

    async def task(self, data: Mapping[str, Any]) -> Task:
        """The task that a reset names. Raises Refused."""
        split = data.get("split", "train")
        splits = properties_of(self.environment).splits
        if split not in splits:
            raise Refused("VALIDATION_ERROR", f"no split is called {split!r}; there are {', '.join(splits)}")
        if split not in self._tasks:
            self._tasks[split] = await asyncio.to_thread(lambda: listed(self.environment.tasks(split)))
        tasks = self._tasks[split]
        if not tasks:
            raise Refused("VALIDATION_ERROR", f"{split} has no tasks")
        if (wanted := data.get("task_id")) is not None:
            found = next((task for task in tasks if task.id == wanted), None)
            if found is None:
                raise Refused("VALIDATION_ERROR", f"no task of {split} is called {wanted!r}")
            return found
        seed = data.get("seed") or 0
        if not isinstance(seed, int):
            raise Refused("VALIDATION_ERROR", f"the seed is no whole number: {seed!r}")
        return next((task for task in tasks if task.seed == seed), tasks[seed % len(tasks)])


class _Session:
    """Episode of one connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._live: EnvSession | None = None
        self._task_id, self._n_steps, self._over = "", 0, True

    async def answer(self, text: str) -> str | None:
        """The answer to one message; None ends the session."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            return _error("INVALID_JSON", str(error))
        kind, data = (message.get("type"), message.get("data") or {}) if isinstance(message, dict) else (None, {})
        try:
            if not isinstance(data, dict):
                raise Refused("VALIDATION_ERROR", "data is no JSON object")
            if kind == "close":
                return None
            if kind == "reset":
                return _observation(await self._reset(data), self._task_id)
            if kind == "step":
                return _observation(await self._step(data), self._task_id)
            if kind == "state":
                return json.dumps({"type": "state", "data": {"episode_id": self._task_id, "step_count": self._n_steps}})
        except Refused as refused:
            return _error(refused.code, str(refused))
        except EpisodeEnded as ended:
            self._over = True
            return _error("EXECUTION_ERROR", f"{ended.outcome.value}: {ended.detail}")
        except RlhfError as error:
            return _error("EXECUTION_ERROR", str(error))
        return _error("UNKNOWN_TYPE", f"no message is of type {kind!r}; there are reset, step, state, close")

    async def close(self) -> None:
        """Free the episode."""
        live, self._live = self._live, None
        if live is not None:
            await live.close([])

    async def _reset(self, data: Mapping[str, Any]) -> StepResult:
        await self.close()
        task = await self._server.task(data)
        self._task_id, self._n_steps, self._over = task.id, 0, False
        self._live, first = await self._server.begin(task)
        return first

    async def _step(self, data: Mapping[str, Any]) -> StepResult:
        text = data.get("text")
        if not isinstance(text, str):
            raise Refused("VALIDATION_ERROR", "an action has a field `text`, which is a text")
        if self._live is None or self._over:
            raise Refused("SESSION_ERROR", "no episode is under way: reset first")
        result = await self._live.step(text)
        self._n_steps += 1
        self._over = result.terminated or result.truncated
        return result


def _observation(result: StepResult, task_id: str) -> str:
    shown = {
        "text": result.reply,
        "admissible_actions": list(result.admissible_actions),
        "valid": result.valid,
        "success": result.success,
        "truncated": result.truncated,
        "state_key": result.state_key,
        "task_id": task_id,
    }
    data = {"observation": shown, "reward": result.reward, "done": result.terminated or result.truncated}
    return json.dumps({"type": "observation", "data": data})


def _error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})
