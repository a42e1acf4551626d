"""An environment that another process or machine serves, in the protocol of OpenEnv.

    environment: {kind: openenv, url: "http://127.0.0.1:8000", action_field: message, observation_field: echoed_message}

A connection is a session: `reset` with a seed begins an episode, `step` does an action, and both are answered with an
observation, a reward, and whether it is over (WebSocket, JSON; github.com/huggingface/openenv). The command
`rlhf serve-environment` serves any environment of ours in the same way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.core.seed_splits import FIRST_SEED, Seeded
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OpenEnv(Seeded):
    """Episodes of a server that speaks OpenEnv's protocol; a task is a seed."""

    offers_tools: ClassVar[bool] = True  # as far as anybody knows

    url: str
    """Address of the server, such as `http://127.0.0.1:8000`."""
    action_field: str = "text"
    """Field of the server's action that takes the agent's text; empty where the agent writes all of it in JSON."""
    observation_field: str = "text"
    """Field of its observation that the agent reads; empty shows the whole observation in JSON."""
    reset: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of `reset` beside, or instead of, `seed`, `split` and `episode_id`."""
    success_threshold: float = 1.0
    """Reward of the last step from which an episode counts as solved, where the observation has no field `success`."""
    max_steps: Annotated[int, Field(ge=1)] = 50
    """The episode is cut after so many actions."""
    connect_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """Longest wait for a connection; `limits` cut a reset and a step."""

    @property
    def properties(self) -> Properties:
        """Properties of the environment: conservative, for an unknown server."""
        return Properties(thread_safe=True, splits=tuple(FIRST_SEED), package=f"OpenEnv server {self.url}")

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split: one per seed. Raises EnvError where there is no such split."""
        return self.listed(split, "openenv", {"split": split})

    async def start(self, task: Task) -> OpenEnvEpisode:
        """Connect and reset. Raises EnvError where the server cannot be reached or refuses."""
        connection = _Connection(self.url, self.connect_timeout_s)
        try:
            await connection.open()
            named = {"split": task.info["split"], "seed": task.seed, "episode_id": task.id[:255]}
            data = named | dict(self.reset)
            first = await connection.ask({"type": "reset", "data": data})
            return OpenEnvEpisode(self, connection, first)
        except BaseException:
            await connection.close()
            raise


class OpenEnvEpisode:
    """Session with the server."""

    def __init__(self, settings: OpenEnv, connection: _Connection, first: Mapping[str, Any]) -> None:
        self._settings, self._connection, self._n_steps = settings, connection, 0
        self.opening = self._result(first)

    async def step(self, action: str) -> StepResult:
        """Send an action; one that cannot be sent, or that the server refuses, costs a step."""
        self._n_steps += 1
        try:
            data = self._action(action)
            answer = await self._connection.ask({"type": "step", "data": data})
        except _Refused as refused:
            over = self._n_steps >= self._settings.max_steps
            return StepResult(f"Error: {refused}", truncated=over, success=False if over else None, valid=False)
        return self._result(answer)

    async def close(self) -> None:
        """End the session."""
        await self._connection.close()

    def _action(self, text: str) -> dict[str, Any]:
        if self._settings.action_field:
            return {self._settings.action_field: text}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Refused(f"the action is no valid JSON: {str(error)[:80]}") from error
        if not isinstance(found, dict):
            raise _Refused("the action is no JSON object")
        return found

    def _result(self, answer: Mapping[str, Any]) -> StepResult:
        observation, reward = answer.get("observation"), answer.get("reward")
        if not isinstance(observation, Mapping) or not isinstance(answer.get("done"), bool):
            raise _wrong(self._settings.url, answer, "an observation, a reward, and done")
        field = self._settings.observation_field
        if field and field not in observation:
            raise EnvError(
                "the observation has no such field",
                where="environment.observation_field",
                got=field,
                expected=", ".join(map(str, observation)) or "fields",
            )
        earned, done = float(reward or 0.0), bool(answer["done"])
        cut = not done and self._n_steps >= self._settings.max_steps
        success = observation.get("success")
        if not isinstance(success, bool):
            success = done and earned >= self._settings.success_threshold
        admissible = observation.get("admissible_actions", ())
        key = observation.get("state_key")
        return StepResult(
            str(observation[field]) if field else json.dumps(observation, ensure_ascii=False),
            reward=earned,
            terminated=done and not observation.get("truncated", False),
            truncated=cut or (done and bool(observation.get("truncated", False))),
            state_key=key if isinstance(key, str) else None,
            success=success if done or cut else None,
            valid=observation.get("valid", True) is not False,
            admissible_actions=tuple(map(str, admissible)) if isinstance(admissible, list) else (),
        )


class _Refused(Exception):
    """The server rejected an action; the connection stays open."""


class _Connection:
    """A WebSocket to `url`/ws.

    Somebody reads all the time, also while the agent thinks: a server that asks whether anybody is there, as most do,
    is answered in reading, and would hang up.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client: Any = None
        self._socket: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[Any]

    async def open(self) -> None:
        """Connect. Raises EnvError."""
        import aiohttp

        self._client = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._client.ws_connect(f"{self._url.rstrip('/')}/ws", max_msg_size=_MOST_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EnvError(
                "the OpenEnv server cannot be reached",
                where="environment.url",
                got=f"{self._url}: {type(error).__name__}: {error}",
                expected="a server with a WebSocket at /ws",
            ) from error

        self._answers = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        import aiohttp

        is_open = True
        while is_open:
            answer = await self._socket.receive()
            is_open = answer.type is aiohttp.WSMsgType.TEXT
            self._answers.put_nowait(answer)

    async def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's answer. Raises _Refused where it refuses an action, EnvError where anything else is wrong."""
        import aiohttp

        try:
            await self._socket.send_str(json.dumps(message))
            answer = await self._answers.get()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvError("the OpenEnv server went away", where=self._url, got=str(error)) from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(
                "the OpenEnv server went away", where=self._url, got=f"{answer.type.name} {answer.extra or ''}"
            )
        try:
            found = json.loads(answer.data)
        except (ValueError, RecursionError) as error:
            raise _wrong(self._url, answer.data, "JSON") from error
        data = found.get("data") if isinstance(found, dict) else None
        if not isinstance(data, dict):
            raise _wrong(self._url, found, "a type and data")
        if found.get("type") == "error":
            said = str(data.get("message", data))[:500]
            if message["type"] == "step" and data.get("code") == "VALIDATION_ERROR":
                raise _Refused(said)
            raise EnvError("the OpenEnv server reports an error", where=self._url, got=f"{data.get('code')}: {said}")
        return data

    async def close(self) -> None:
        """Say goodbye where the server still listens."""
        import aiohttp

        socket, client, self._socket, self._client = self._socket, self._client, None, None
        try:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.wait({self._reader})
            if socket is not None and not socket.closed:
                await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
        except (aiohttp.ClientError, OSError):
            pass  # it has gone already
        finally:
            if client is not None:
                await client.close()


def _wrong(url: str, got: object, expected: str) -> EnvError:
    return EnvError("no answer in OpenEnv's protocol", where=url, got=str(got)[:200], expected=expected)
