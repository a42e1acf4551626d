"""Servers that are not what they should be, or that misbehave: refused with a reason, asked again, or replaced.

The servers here answer to order; what real ones do is in `test_servers.py`.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from rlhf.data import Finish, Generation, PolicyWeights, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.server import ServerInstance
from tests.rollout.vllm.real_vllm import prompt_of

web = pytest.importorskip("aiohttp.web")

GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"
DESCRIPTION: dict[str, Any] = {
    "n_vocab": 300,
    "max_context": 64,
    "logprobs_mode": "processed_logprobs",
    "shapes": {"model_type": "qwen3", "hidden_size": 48},
    "lora_rank": 8,
}
CHOICE: dict[str, Any] = {
    "token_ids": [5, 6],
    "logprobs": {"content": [{"logprob": -1.5}, {"logprob": -0.5}]},
    "weight_versions": [{"version": "default", "start": 0, "end": 2}],
    "finish_reason": "stop",
}
Said = Any  # what a route answers: a status and a body, or a function of how often it was asked


class Server:
    """Answers every route as a good server does, but for those in `said`. Counts how often each was asked."""

    def __init__(self, said: dict[str, Said]) -> None:
        good = {RPC: (200, {"results": [DESCRIPTION]}), GENERATE: (200, {"choices": [CHOICE]})}
        self.said: dict[str, Said] = good | said
        self.n: Counter[str] = Counter()
        self.n_running = 0

    async def answer(self, request: Any) -> Any:
        """One exchange."""
        self.n[request.path] += 1
        said = self.said.get(request.path, (200, {}))
        self.n_running += 1
        try:
            said = said(self.n[request.path]) if callable(said) else said
            status, body = await said if isinstance(said, Awaitable) else said
        finally:
            self.n_running -= 1
        if status == "drop":
            request.transport.abort()
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=200 if status == "drop" else status, text=text)

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.runner.cleanup()


def engine_of(*urls: str, **settings: Any) -> VllmEngine:
    """An engine over servers at these addresses."""
    instances = [ServerInstance(url, connect_timeout_s=2.0, retry_s=0.01) for url in urls]
    return VllmEngine(instances, **{"request_timeout_s": 20.0, "delivery_timeout_s": 20.0, **settings})


async def connect(engine: VllmEngine, lora_rank: int = 0, **shapes: Any) -> None:
    await engine.connect(
        shapes={"model_type": "qwen3", "hidden_size": 48, **shapes}, n_vocab=300, max_context=64, lora_rank=lora_rank
    )


def sampled(*servers: Server, **settings: Any) -> Generation:
    """What one call gives over these servers."""

    async def go(*urls: str) -> Generation:
        engine = engine_of(*urls, **settings)
        try:
            await connect(engine)
            return await engine.generate(prompt_of(4), SamplingParams(max_tokens=8), "one")
        finally:
            await engine.close()

    return with_servers(go, *servers)


def with_servers(go: Callable[..., Coroutine[Any, Any, Any]], *servers: Server) -> Any:
    """`go` with the addresses of the servers, which run meanwhile."""

    async def run() -> Any:
        for server in servers:
            await server.__aenter__()
        try:
            return await asyncio.wait_for(go(*(server.url for server in servers)), 60)
        finally:
            for server in servers:
                await server.__aexit__()

    return asyncio.run(run())


def never(n: int) -> Awaitable[Any]:
    return asyncio.sleep(60, (200, {}))


def describing(**changes: Any) -> dict[str, Said]:
    return {RPC: (200, {"results": [DESCRIPTION | changes]})}


# --- refused at connect ----------------------------------------------------------------------------------------------

NO_METHOD = {"error": {"message": "Call to collective_rpc method failed: Method 'rlhf_describe' is not implemented."}}

#: What is wrong with a server, what is said about it, and what else is in the message.
REFUSED: dict[str, tuple[dict[str, Said], str, tuple[str, ...]]] = {
    "another width": (
        describing(shapes={"model_type": "qwen3", "hidden_size": 64}),
        "the server has another model",
        ("hidden_size 64", "hidden_size 48", "rlhf serve"),
    ),
    "another family": (
        describing(shapes={"model_type": "llama", "hidden_size": 48}),
        "the server has another model",
        ("model_type llama",),
    ),
    "fewer tokens": (describing(n_vocab=299), "the server has another model", ("vocabulary 299", "vocabulary 300")),
    "raw log-probs": (
        describing(logprobs_mode="raw_logprobs"),
        "the server's log-probs do not belong to its sampling distribution",
        ("--logprobs-mode raw_logprobs", "--logprobs-mode processed_logprobs"),
    ),
    "small adapters": (describing(lora_rank=2), "no room for adapters of this rank", ("--max-lora-rank 2", "4")),
    "no worker methods": (
        {RPC: (500, NO_METHOD)},
        "the server refused",
        ("not implemented", "--worker-extension-cls rlhf.inference.vllm.worker.Worker"),
    ),
    "no development routes": ({RPC: (404, {"detail": "Not Found"})}, "lacks a route", (RPC, "rlhf serve")),
    "no token routes": (
        {"/inference/v1/abort_requests": (404, {"detail": "Not Found"})},
        "lacks a route",
        ("/inference/v1/abort_requests",),
    ),
    "a key": (
        {"/inference/v1/abort_requests": (401, {"error": "Unauthorized"})},
        "the server requires a key",
        ("VLLM_API_KEY",),
    ),
    "a web page": (
        {RPC: (200, "<html>hello</html>")},
        "cannot be understood",
        ("<html>hello", "check that the server is vLLM, of a supported version"),
    ),
    "a list": ({RPC: (200, [1, 2])}, "cannot be understood", ("[1, 2]",)),
    "no results": ({RPC: (200, {"results": []})}, "does not report its model", ("[]", "same version")),
    "an empty description": ({RPC: (200, {"results": [{}]})}, "does not report its model", ("{}",)),
    "a wrong type": (describing(n_vocab="many"), "does not report its model", ("'many'",)),
    "a redirection": ({RPC: (302, "")}, "cannot be understood", (RPC,)),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_server_that_does_not_fit_is_refused(wrong: str) -> None:
    said, what, parts = REFUSED[wrong]
    server = Server(said)

    async def go(url: str) -> None:
        engine = engine_of(url)
        with pytest.raises(EngineError) as raised:
            await connect(engine, lora_rank=4)
        await engine.close()
        assert what in raised.value.what and url in raised.value.where
        assert all(part in str(raised.value) for part in parts), str(raised.value)

    with_servers(go, server)


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def go() -> None:
        engine = engine_of(f"http://127.0.0.1:{port}")
        with pytest.raises(EngineError, match="does not answer") as raised:
            await connect(engine)
        await engine.close()
        assert str(port) in raised.value.where and "Connect call failed" in raised.value.got
        assert "correct engine.servers" in raised.value.hint

    asyncio.run(go())


def test_an_address_that_is_none() -> None:
    async def go() -> None:
        engine = engine_of("127.0.0.1:nonsense")
        with pytest.raises(EngineError) as raised:
            await connect(engine)
        await engine.close()
        assert "correct engine.servers" in raised.value.hint

    asyncio.run(go())


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    async def go(url: str) -> None:
        engine = engine_of(url, delivery_timeout_s=0.2)
        with pytest.raises(EngineError, match="did not answer in time") as raised:
            await connect(engine)
        await engine.close()
        assert raised.value.got == "nothing in 0.2 s"

    with_servers(go, Server({RPC: never}))


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    seen = []

    class Locked(Server):
        async def answer(self, request: Any) -> Any:
            seen.append(request.headers.get("Authorization"))
            return await super().answer(request)

    sampled(Locked({}))
    assert set(seen) == {"Bearer sesame"}


# --- trouble while it samples ----------------------------------------------------------------------------------------


def test_what_a_server_samples_is_taken_over() -> None:
    found = sampled(Server({}))
    assert (found.token_ids, found.logprobs, found.finish) == ((5, 6), (-1.5, -0.5), Finish.STOP)
    assert (found.policy_version, found.version_spans) == (0, ())


@pytest.mark.parametrize("path", [GENERATE, RPC])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(path: str, status: int) -> None:
    good = Server({}).said[path]
    server = Server({path: lambda n: good if n > 3 else (status, {"error": "later"})})
    assert sampled(server).token_ids == (5, 6)
    assert server.n[path] == 4


def test_a_dropped_connection_is_made_again() -> None:
    server = Server({GENERATE: lambda n: (200, {"choices": [CHOICE]}) if n > 2 else ("drop", "")})
    assert sampled(server).token_ids == (5, 6)
    assert server.n[GENERATE] == 3


def test_a_connection_that_always_breaks_is_given_up() -> None:
    server = Server({GENERATE: ("drop", "")})
    with pytest.raises(EngineError, match="the connection broke repeatedly") as raised:
        sampled(server)
    assert 2 <= server.n[GENERATE] <= 10 and "ServerDisconnected" in raised.value.got


def test_another_server_takes_over_from_one_that_is_gone() -> None:
    dead, living = Server({GENERATE: ("drop", ""), "/health": ("drop", "")}), Server({})
    assert sampled(dead, living).token_ids == (5, 6)
    assert (dead.n[GENERATE], living.n[GENERATE]) == (1, 1)
    with pytest.raises(EngineError, match="no vLLM instance is left") as raised:
        sampled(Server({GENERATE: ("drop", ""), "/health": ("drop", "")}))
    assert "ServerDisconnected" in raised.value.got


def test_a_dead_engine_behind_a_living_server_is_left() -> None:
    dead = {"error": {"message": "EngineDeadError: EngineCore encountered an issue."}}
    first, other = Server({GENERATE: (500, dead), "/health": (500, "")}), Server({})
    assert sampled(first, other).token_ids == (5, 6)
    assert (first.n[GENERATE], other.n[GENERATE]) == (1, 1)


def choosing(**changes: Any) -> Server:
    return Server({GENERATE: (200, {"choices": [CHOICE | changes]})})


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{"logprob": value} for value in values]}


@pytest.mark.parametrize(
    ("server", "what"),
    [
        (choosing(logprobs=logprobs(-1.0, -9999.0)), "not finite numbers at most 0"),
        (choosing(logprobs=logprobs(-1.0, float("nan"))), "not finite numbers at most 0"),
        (choosing(logprobs=logprobs(-1.0, 0.7)), "not finite numbers at most 0"),
        (choosing(logprobs=logprobs(-1.0)), "log-probs are missing"),
        (choosing(logprobs=None), "log-probs are missing"),
        (choosing(logprobs=logprobs(-1.0, None)), "cannot be understood"),
        (choosing(token_ids=None), "cannot be understood"),
        (choosing(weight_versions=[{"version": "default"}]), "cannot be understood"),
        (Server({GENERATE: (200, {"choices": []})}), "cannot be understood"),
        (Server({GENERATE: (200, "half an ans")}), "cannot be understood"),
        (Server({GENERATE: (200, "")}), "cannot be understood"),
        (Server({GENERATE: (400, {"error": {"message": "too long"}})}), "the server refused"),
        (Server({GENERATE: (404, {"detail": "Not Found"})}), "lacks a route"),
        (Server({GENERATE: (500, "out of memory")}), "the server refused"),
    ],
)
def test_an_answer_that_is_none_is_an_error(server: Server, what: str) -> None:
    with pytest.raises(EngineError) as raised:
        sampled(server)
    assert what in raised.value.what and server.url in raised.value.where
    assert server.n[GENERATE] == 1  # asking again would not mend it


def test_an_answer_that_never_comes_ends_the_call_on_both_sides() -> None:
    server = Server({GENERATE: never})

    async def go(url: str) -> None:
        engine = engine_of(url, request_timeout_s=0.2)
        await connect(engine)
        with pytest.raises(EngineError, match="did not answer in time") as raised:
            await engine.generate(prompt_of(4), SamplingParams(max_tokens=8), "one")
        assert "0.2 s" in raised.value.got and "request_timeout_s" in raised.value.hint
        async with asyncio.timeout(5):  # the server is told, or it would sample for nobody
            while server.n_running:
                await asyncio.sleep(0.01)
        await engine.close()

    with_servers(go, server)


def test_a_delivery_to_a_server_that_refuses_it_says_so_and_ends_the_engine() -> None:
    server = Server({"/init_weight_transfer_engine": (500, {"error": {"message": "no such backend"}})})

    async def go(url: str) -> None:
        engine = engine_of(url)
        await connect(engine)
        with pytest.raises(DeliveryError, match="the delivery failed") as raised:
            await engine.load(PolicyWeights(1, "", lambda: iter(())))
        assert "no such backend" in raised.value.got and url in raised.value.got
        with pytest.raises(EngineError, match="the delivery of version 1 failed"):
            await engine.generate(prompt_of(4), SamplingParams(max_tokens=8), "one")
        await engine.close()

    with_servers(go, server)
