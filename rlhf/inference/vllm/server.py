"""A vLLM server somewhere else, spoken to over HTTP: tokens in, tokens and log-probs out.

The server is vLLM's own; `rlhf serve` starts one with the right options. Besides `/inference/v1/generate` it must offer
its development routes, which pause it, give it weights and call its workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlhf.chat_api import load_aiohttp
from rlhf.data import Finish, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.transfer import Slice
from rlhf.inference.vllm.instance import (
    Adapter,
    InstanceDownError,
    InstanceStaleError,
    Load,
    PauseMode,
    Sampled,
    finish_of,
    sampling_options,
    update_rows,
)

#: The route to sample by.
_GENERATE = "/inference/v1/generate"
#: Log-probs that are not finite arrive as this.
_NOT_FINITE = -9999.0
#: Rounding may lift a log-prob this far.
_MOST = 1e-4
#: Lines of vLLM's metrics, in the text format of Prometheus, that tell the load; those of one name are added.
_COUNTED = ("num_requests_running", "num_requests_waiting", "num_preemptions_total")
_METRIC = re.compile(rf"^vllm:({'|'.join(_COUNTED)}|kv_cache_usage_perc)(?:{{[^}}]*}})? (\S+)$", re.M)
#: Answers that say "not now": an overloaded or starting server.
_BUSY = (429, 502, 503, 504)


class _NotFoundError(EngineError):
    """The server has no such route, or no such adapter."""


class ServerInstance:
    """A client of one server.

    Args:
        url: such as http://127.0.0.1:8000.
        connect_timeout_s: most seconds until a connection stands.
        retry_s: seconds between two attempts at a server that is busy.
    """

    def __init__(self, url: str, *, connect_timeout_s: float = 10.0, retry_s: float = 0.5) -> None:
        self.name = url.rstrip("/")
        self._connect_timeout_s, self._retry_s = connect_timeout_s, retry_s
        self._session: Any = None

    async def sample(
        self,
        request_id: str,
        ids: Sequence[int],
        params: SamplingParams,
        stop_ids: Sequence[int],
        adapter: Adapter | None,
    ) -> Sampled:
        """Sample once."""
        body: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": list(ids),
            "sampling_params": sampling_options(params, stop_ids),
        }
        if adapter is not None:
            body["model"] = adapter.name
        try:
            answer = await self._post(_GENERATE, body)
        except _NotFoundError as error:
            if adapter is None:
                raise
            raise InstanceStaleError("the server has lost the adapter", where=self.name, got=error.got) from error
        try:
            choice = answer["choices"][0]
            token_ids = tuple(int(i) for i in choice["token_ids"])
            logprobs = tuple(float(entry["logprob"]) for entry in (choice["logprobs"] or {}).get("content") or ())
            spans = tuple((str(s["version"]), int(s["end"]) - int(s["start"])) for s in choice["weight_versions"] or ())
            finish: Finish = finish_of(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._garbage(_GENERATE, answer) from error
        if len(token_ids) != len(logprobs):
            got = f"{len(token_ids)} ids, {len(logprobs)} log-probs"
            raise EngineError("log-probs are missing", where=self.name, got=got)
        if any(x <= _NOT_FINITE or not x <= _MOST for x in logprobs):
            got = ", ".join(f"{x:g}" for x in logprobs[:8])
            raise EngineError("the server's log-probs are not finite numbers at most 0", where=self.name, got=got)
        return Sampled(token_ids, logprobs, finish, spans)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let requests end at once, with what they have."""
        names = [f"generate-tokens-{request_id}" for request_id in request_ids]
        await self._post("/inference/v1/abort_requests", {"request_ids": names})

    async def pause(self, mode: PauseMode) -> None:
        """Schedule nothing more."""
        await self._post(f"/pause?mode={mode}&clear_cache=true")

    async def resume(self) -> None:
        """Schedule again."""
        await self._post("/resume")

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""
        answer = await self._post("/collective_rpc", {"method": method, "args": list(args)})
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
            raise self._garbage("/collective_rpc", answer)
        return list(answer["results"])

    async def connect_transfer(self, info: Mapping[str, Any]) -> None:
        """Say how weights will arrive."""
        await self._post("/init_weight_transfer_engine", {"init_info": dict(info)})

    async def start_update(self) -> None:
        """Weights are about to arrive."""
        await self._post("/start_weight_update")

    async def put(self, place: int, data: bytes) -> None:
        """Take in a piece of the buffer."""
        # Most of the time goes into making and reading JSON: this route reads it once, and what is sent is made here.
        await self._post("/collective_rpc", b'{"method": "rlhf_put", "args": [%d, "%b"]}' % (place, data))

    async def update(self, slices: Sequence[Slice], address: Mapping[str, Any]) -> None:
        """Load what lies in the buffer."""
        await self._post("/update_weights", {"update_info": update_rows(slices, address)})

    async def finish_update(self) -> None:
        """All have arrived."""
        await self._post("/finish_weight_update")

    async def drop_cache(self) -> bool:
        """Forget all keys and values."""
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        return isinstance(answer, dict) and answer.get("success", True) is True

    async def set_version(self, version: str) -> None:
        """Name the weights."""
        await self._post("/update_weight_version", {"new_version": version})

    async def version(self) -> str:
        """Return the name of the weights."""
        answer = await self._request("GET", "/weight_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise self._garbage("/weight_info", answer)
        return str(answer["weight_version"])

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter beside those in use."""
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        await self._request("POST", "/v1/load_lora_adapter", body, is_json=False)

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Free an adapter."""
        with suppress(_NotFoundError):  # a server that was started again never had it
            await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": adapter.name}, is_json=False)

    async def load(self) -> Load | None:
        """Return its load; None where it does not report any."""
        text = await self._request("GET", "/metrics", is_json=False)
        sums: dict[str, float] = {}
        for name, value in _METRIC.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
        if "num_requests_running" not in sums:
            return None
        running, waiting, n_preempted = (int(sums.get(name, 0)) for name in _COUNTED)
        return Load(self.name, running, waiting, n_preempted, sums.get("kv_cache_usage_perc", 0.0))

    async def sleep(self) -> None:
        """Do nothing: a server's GPU is its own."""

    async def wake(self) -> None:
        """Do nothing."""

    async def is_up(self) -> bool:
        """True if the server answers within the connection timeout."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._request("GET", "/health")
        except (EngineError, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, path: str, body: Mapping[str, Any] | bytes | None = None) -> Any:
        return await self._request("POST", path, body)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None, *, is_json: bool = True
    ) -> Any:
        """HTTP request, body as values or as JSON; a busy server is retried until the caller's time is up."""
        aiohttp = load_aiohttp("engine.servers")
        # After an error, and after 5 s without a word, the server closes a connection. A call that finds it closing is
        # lost: sampling is asked for again, and nothing else uses a connection twice.
        headers = {} if path == _GENERATE else {"Connection": "close"}
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        while True:
            try:
                async with self._opened().request(method, self.name + path, headers=headers, **content) as response:
                    text = await response.text()
                    status = response.status
            except (aiohttp.ClientError, OSError) as error:  # refused, reset, cut off
                raise InstanceDownError(
                    "the server does not answer", where=self.name, got=f"{type(error).__name__}: {error}"
                ) from error
            if status not in _BUSY:
                break
            await asyncio.sleep(self._retry_s)
        if status >= 400:
            raise self._refused(path, status, text)
        try:
            return text if not is_json else json.loads(text) if text else None
        except ValueError as error:
            raise self._garbage(path, text) from error

    def _opened(self) -> Any:
        import aiohttp

        if self._session is None:
            key = os.environ.get("VLLM_API_KEY")
            # No limit on connections: the server queues, and a limit here would hold episodes back unseen.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else None,
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            )
        return self._session

    def _refused(self, path: str, status: int, text: str) -> EngineError:
        if status in (401, 403):
            return EngineError(
                "the server requires a key", where=self.name, hint="set VLLM_API_KEY to the server's key"
            )
        if status == 404:
            return _NotFoundError(
                "the server lacks a route",
                where=self.name + path,
                got=_reason(text),
                expected="a vLLM server with its development routes",
                hint="start it with `rlhf serve`, which sets them up",
            )
        if status == 500 and "EngineDead" in text:
            return InstanceDownError("the server's engine died", where=self.name, got=text[:200])
        return EngineError("the server refused", where=self.name + path, got=f"{status}: {_reason(text)}")

    def _garbage(self, path: str, answer: object) -> EngineError:
        return EngineError(
            "the server's answer cannot be understood",
            where=self.name + path,
            got=repr(answer)[:200],
            hint="check that the server is vLLM, of a supported version",
        )


def _reason(text: str) -> str:
    """The message inside an error answer."""
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:300]
    except (ValueError, AttributeError):
        return text[:300]
