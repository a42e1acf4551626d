"""The embedded engine behind the routes of vLLM's server that `ServerInstance` uses: for small models, without vLLM."""

from __future__ import annotations

import asyncio
from binascii import a2b_base64
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rlhf.build.engine import SHAPES, context_of, decoder_of
from rlhf.build.train import device, policy_of
from rlhf.data import Prompt, SamplingParams
from rlhf.errors import RecipeError, RlhfError
from rlhf.inference.embedded.paused import PausableEngine
from rlhf.inference.settings import EngineCapabilities, TransformersSettings
from rlhf.inference.transfer import RemoteReceiver, SharedMemoryReceiver, Slice, token_digest
from rlhf.recipe import Recipe
from rlhf.serving.vllm import refuse_used_port
from rlhf.terminal import CleanConsole
from rlhf.training.policy.lora import unadapted

#: How vLLM calls a request in what runs.
_PREFIX = "generate-tokens-"
#: Status of an answer that nobody reads.
_LEFT = 499
#: Seconds that running requests have when the server is to end.
_END_S = 5


def serve(recipe: Recipe, *, checkpoint: Path | None, host: str, port: int, console: CleanConsole) -> None:
    """Serve the policy until stopped.

    Raises:
        EngineError: the port is in use.
        RecipeError: adapters are to be delivered, which this engine has not.
    """
    refuse_used_port(host, port)
    policy = policy_of(recipe, checkpoint)
    if policy.is_lora and EngineCapabilities(recipe.engine).lora == "adapter":
        raise RecipeError(
            "the embedded engine accepts full weights only",
            where="engine.lora",
            got="adapter",
            expected="merged",
            hint="set engine.lora: merged, or serve with vLLM",
        )
    settings = recipe.engine if isinstance(recipe.engine, TransformersSettings) else TransformersSettings()
    engine = PausableEngine(
        (unadapted(policy.model) if policy.is_lora else policy.model).to(device()),
        max_context=context_of(recipe, policy),
        max_sessions=settings.max_sessions,
        max_batch_tokens=settings.max_batch_tokens,
        decode=decoder_of(policy),
    )
    config = policy.model.config.get_text_config()
    shapes = {name: getattr(config, name, None) for name in SHAPES}
    app = Served(engine, shapes).application()
    console.print(f"serving {recipe.name} at http://{host}:{port}; Ctrl-C stops it", highlight=False, soft_wrap=True)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_END_S,
    )


@dataclass
class Served:
    """Routes over one engine.

    Attributes:
        engine: samples.
        shapes: of its model, by which a client knows it for its own.
        receiver: where weights come from.
        running: engine session of each request.
        idle: tokens of sessions that no request runs in, the one used last at the end.
        most_running: requests that ran at once; as many sessions are kept.
    """

    engine: PausableEngine
    shapes: Mapping[str, Any]
    receiver: SharedMemoryReceiver | RemoteReceiver | None = None
    running: dict[str, str] = field(default_factory=dict)
    idle: dict[str, tuple[int, ...]] = field(default_factory=dict)
    most_running: int = 0

    def application(self) -> Starlette:
        """Return the application."""
        posts: dict[str, Callable[[Any, Mapping[str, str]], Awaitable[Any]]] = {
            "/inference/v1/generate": self.generate,
            "/inference/v1/abort_requests": self.abort,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.call,
            "/init_weight_transfer_engine": self.connect,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/reset_prefix_cache": self.drop_cache,
            "/update_weight_version": self.rename,
        }

        async def health(request: Request) -> Response:
            return Response()

        async def info(request: Request) -> Response:
            return JSONResponse({"weight_version": self.engine.version_name})

        async def metrics(request: Request) -> Response:
            found = {"num_requests_running": self.engine.n_running, "num_requests_waiting": self.engine.n_waiting}
            return PlainTextResponse("".join(f"vllm:{name} {value}\n" for name, value in found.items()))

        gets = [Route("/health", health), Route("/weight_info", info), Route("/metrics", metrics)]
        return Starlette(routes=[*gets, *(Route(path, _posted(do), methods=["POST"]) for path, do in posts.items())])

    async def generate(self, body: Any, query: Mapping[str, str]) -> Any:
        """Tokens in, tokens, log-probs and versions out; a continuation of an earlier request uses its cache."""
        given, name = body["sampling_params"], f"{_PREFIX}{body['request_id']}"
        params = SamplingParams(
            max_tokens=given["max_tokens"],
            temperature=given["temperature"],
            top_p=given["top_p"],
            top_k=given["top_k"],
            seed=given["seed"],
            stop_strings=tuple(given["stop"]),
        )
        prompt = Prompt(body["token_ids"], tuple(given["stop_token_ids"]))
        session = self.running[name] = self._begun_by(prompt.token_ids) or name
        self.most_running = max(self.most_running, len(self.running))
        await self._make_room()
        try:
            found = await self.engine.generate(prompt, params, session)
            self.idle[session] = found.full_ids
        except BaseException:
            await self.engine.release(session)
            raise
        finally:
            del self.running[name]
            await self._make_room()
        spans, end = [], 0
        for version, n in self.engine.spans(found):
            spans.append({"version": version, "start": end, "end": end + n})
            end += n
        choice = {
            "token_ids": list(found.token_ids),
            "logprobs": {"content": [{"logprob": x} for x in found.logprobs]},
            "finish_reason": found.finish.value,
            "weight_versions": spans,
        }
        return {"choices": [choice]}

    def _begun_by(self, ids: tuple[int, ...]) -> str:
        """Take the idle session whose tokens are the longest prefix of a prompt; empty if there is none."""
        begun = [name for name, known in self.idle.items() if ids[: len(known)] == known]
        found = max(begun, key=lambda name: len(self.idle[name]), default="")
        self.idle.pop(found, None)
        return found

    async def _make_room(self) -> None:
        """Release idle sessions, the oldest first: none are kept beyond `most_running`, nor a request's slot taken."""
        most = min(self.most_running, self.engine.options["max_sessions"] - len(self.running))
        while self.idle and len(self.idle) > most:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            await self.engine.release(oldest)

    async def abort(self, body: Any, query: Mapping[str, str]) -> Any:
        """End requests with what they have."""
        for name in body["request_ids"]:
            await self.engine.release(self.running.get(name, name))
        return {}

    async def pause(self, body: Any, query: Mapping[str, str]) -> Any:
        """Pause generation: keep what runs, let it end, or abort it."""
        await self.engine.pause(query["mode"])  # type: ignore[arg-type]
        return {}

    async def resume(self, body: Any, query: Mapping[str, str]) -> Any:
        """Schedule again."""
        self.engine.resume()
        return {}

    async def call(self, body: Any, query: Mapping[str, str]) -> Any:
        """Worker methods that a trainer calls, as vLLM's `/collective_rpc`."""
        method, args = body["method"], body.get("args", [])
        if method == "rlhf_describe":
            return {"results": [self._described(Path(args[0]))]}
        if method == "rlhf_fingerprint":
            return {"results": [self.engine.fingerprint]}
        if method == "rlhf_put" and isinstance(self.receiver, RemoteReceiver):
            self.receiver.write(args[0], a2b_base64(args[1], strict_mode=True))
            return {"results": [None]}
        raise ValueError(f"the embedded engine has no method {method}")

    def _described(self, token: Path) -> dict[str, Any]:
        return {
            "n_vocab": self.engine.n_vocab,
            "max_context": self.engine.max_context,
            "logprobs_mode": "processed_logprobs",
            "shapes": dict(self.shapes),
            "lora_rank": 0,
            "token": token_digest(token),
            "gpu": "",
        }

    async def connect(self, body: Any, query: Mapping[str, str]) -> Any:
        """Choose how weights arrive, by shared memory or HTTP; a broadcast is refused."""
        path = body["init_info"]["path"]
        if body["init_info"].get("group"):
            raise ValueError("the embedded engine joins no process group: set engine.delivery: auto")
        self.receiver = SharedMemoryReceiver(Path(path)) if path else RemoteReceiver()
        return {}

    async def start(self, body: Any, query: Mapping[str, str]) -> Any:
        """Weights are about to arrive."""
        self.engine.start_update()
        return {}

    async def update(self, body: Any, query: Mapping[str, str]) -> Any:
        """Load what lies in the buffer."""
        rows = body["update_info"]["slices"]
        if self.receiver is None:
            raise ValueError("no sender has announced itself")
        slices = [Slice(name, dtype, tuple(shape), at, size) for name, dtype, shape, at, size in rows]
        self.engine.put(self.receiver.read(slices))
        return {}

    async def finish(self, body: Any, query: Mapping[str, str]) -> Any:
        """End an update: what is sampled from now on is of the new weights."""
        self.engine.finish_update()
        return {}

    async def drop_cache(self, body: Any, query: Mapping[str, str]) -> Any:
        """Forget keys and values."""
        self.engine.drop_cache()
        return {"success": True}

    async def rename(self, body: Any, query: Mapping[str, str]) -> Any:
        """Name the weights."""
        self.engine.rename(body["new_version"])
        return {}


async def _unless_left(request: Request, work: Awaitable[Any]) -> Response:
    """Answer with the result of the work, which is cancelled if the client disconnects."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await working) if working.done() else Response(status_code=_LEFT)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _posted(do: Callable[[Any, Mapping[str, str]], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        content = await request.body()
        try:
            body = await request.json() if content else {}
            return await _unless_left(request, do(body, request.query_params))
        except (RlhfError, ValueError, KeyError, TypeError) as error:
            return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, status_code=400)

    return answer
