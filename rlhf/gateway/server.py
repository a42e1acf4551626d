"""The gateway's server: HTTP on a thread of its own, so that it answers also while the run computes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from rlhf.errors import EngineError
from rlhf.gateway.exchange import Exchange, gone, on_run, send_whole
from rlhf.gateway.request import ChatReply, ChatRequest, Refusal
from rlhf.gateway.session import Reward, Session
from rlhf.gateway.wires import chat, messages, responses
from rlhf.gateway.wires.parts import whole

#: Where each wire is served, behind the address of a session.
WIRES: Mapping[str, ModuleType] = {
    "v1/chat/completions": chat,
    "v1/responses": responses,
    "v1/messages": messages,
}
#: Seconds for which a program that asks for an attempt is kept waiting, before it is told to ask again.
_CLAIM_S = 5.0
_MAX_BODY = 64 * 2**20
#: Makes a session for whoever asks for one by name: task, attempt.
Opens = Callable[[Any, int], Awaitable[Session]]
T = TypeVar("T")


class Gateway:
    """Serves the sessions of this process.

    Args:
        host: to listen on; whoever reaches it and has a key can ask the policy.
        port: 0 takes a free one.
        key: with which programs ask for attempts; empty makes one.
        opens: makes a session where a client names a task; None where attempts are the run's to begin.
        max_requests: at a time; more are told to come again.

    Attributes:
        key: with which programs ask for attempts.
        max_requests: at a time.
        waiting: sessions that no program has taken yet.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        key: str = "",
        opens: Opens | None = None,
        max_requests: int = 1024,
    ) -> None:
        self.host, self.port, self.key = host, port, key or secrets.token_urlsafe(24)
        self.waiting: deque[Session] = deque()
        self.claimed: Callable[[Session, str], None] = lambda session, key: None
        self.keys: set[str] = {self.key}
        self._opens, self.max_requests, self._n_requests = opens, max_requests, 0
        self._sessions: dict[str, Session] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the server."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def url_of(self, session: Session) -> str:
        """Address of a session; with /v1 behind it, that of OpenAI's wires."""
        return f"{self.url}/sessions/{session.id}"

    def start(self) -> None:
        """Listen. Raises EngineError where that is not possible."""
        import uvicorn

        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
            listening.listen(2048)  # who comes before the server runs waits
        except OSError as error:
            listening.close()
            raise EngineError(
                "the gateway cannot listen at this address",
                where=f"{self.host}:{self.port}",
                got=error.strerror or str(error),
                hint="give a free port, or port 0",
            ) from error
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            application(self),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            ws="none",
            log_level="critical",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="gateway", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5.0)

    def add(self, session: Session, *, waits: bool) -> None:
        """Serve a session; `waits` lets a program that asks for an attempt have it."""
        self._sessions[session.id] = session
        if waits:
            self.waiting.append(session)

    def note_refusal(self, name: str, refusal: Refusal) -> None:
        """Report a rejected request to its session; not of a disconnected client.

        One with a wrong key may be a stranger's: it is kept apart, for messages.
        """
        session = self._sessions.get(name)
        if session is not None and refusal.status == 401:
            session.wrong_key = refusal
        elif session is not None and refusal.status != 499:
            with contextlib.suppress(RuntimeError):  # the run is over
                session.loop.call_soon_threadsafe(session.note_refusal, refusal)

    def remove(self, session: Session) -> None:
        """Serve a session no longer."""
        self._sessions.pop(session.id, None)
        with contextlib.suppress(ValueError):
            self.waiting.remove(session)

    # --- what clients ask ---------------------------------------------------------------------------------------------

    def session(self, name: str, key: str) -> Session:
        """The session of an address and a key. Raises Refusal."""
        found = self._sessions.get(name)
        if found is None:
            raise Refusal(404, f"no session is called {name!r}: it is over, or never was.", "session_over")
        if not secrets.compare_digest(found.key.encode(), key.encode()):
            raise Refusal(401, "the key is not that of this session. Do: send the key that came with it.", "wrong_key")
        return found

    async def claim(self, key: str, body: Mapping[str, Any]) -> Session:
        """A session for a program that asks for one. Raises Refusal."""
        if not any(secrets.compare_digest(known.encode(), key.encode()) for known in tuple(self.keys)):
            raise Refusal(401, "the key is not the gateway's. Do: send that of RLHF_GATEWAY_KEY.", "wrong_key")
        if self._opens is not None:
            return await self._opens(body.get("task"), whole(body, "attempt", least=0) or 0)
        deadline = asyncio.get_running_loop().time() + _CLAIM_S
        while asyncio.get_running_loop().time() < deadline and not self._server.should_exit:
            with contextlib.suppress(IndexError):
                return self.waiting.popleft()
            await asyncio.sleep(0.02)
        raise Refusal(429, "no attempt waits for an agent now. Do: ask again.", "nothing_waits", after_s=1.0)

    def put_back(self, session: Session) -> None:
        """Take back a session whose client went away before it heard of it: another gets it, or it ends."""

        def end() -> None:
            if not session.is_over:
                session.end(failure="the client went away before the session began")

        if self._opens is None:
            self.waiting.appendleft(session)
            if session.id not in self._sessions:  # looked up last: it may be removed meanwhile, on the run's thread
                self.remove(session)
        else:
            with contextlib.suppress(RuntimeError):  # the run is over
                session.loop.call_soon_threadsafe(end)

    @contextlib.contextmanager
    def room(self) -> Any:
        """Room for one request. Raises Refusal where there is none."""
        if self._n_requests >= self.max_requests:
            raise Refusal(429, f"{self._n_requests} requests are under way. Do: ask again.", "busy", after_s=1.0)
        self._n_requests += 1
        try:
            yield
        finally:
            self._n_requests -= 1


def application(gateway: Gateway) -> Any:
    """The application: routes of the gateway, of each session, and of each wire."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def refused(request: Any, refusal: Any) -> Any:
        gateway.note_refusal(request.path_params.get("name", ""), refusal)
        return JSONResponse(_error(refusal), refusal.status, _headers(refusal))

    def json_of(answer: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def route(request: Any) -> Any:
            return JSONResponse(await answer(request))

        return route

    def completing(wire: ModuleType) -> Callable[[Any], Awaitable[Any]]:
        async def route(request: Any) -> Any:
            return await _completed(gateway, wire, request)

        return route

    own = _Routes(gateway)
    plain = {"reward": own.reward, "finish": own.finish, "fail": own.fail, "step": own.step}
    routes = [
        Route("/health", json_of(own.health)),
        Route("/sessions", own.open, methods=["POST"]),
        Route("/sessions/{name}/v1/models", json_of(own.models)),
        *(Route(f"/sessions/{{name}}/{path}", json_of(route), methods=["POST"]) for path, route in plain.items()),
        *(Route(f"/sessions/{{name}}/{path}", completing(wire), methods=["POST"]) for path, wire in WIRES.items()),
    ]
    return Starlette(routes=routes, exception_handlers={Refusal: refused})


class _Routes:
    """Routes besides the wires: sessions, rewards, ends, steps."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Any) -> dict[str, str]:
        """Say that the server is there."""
        return {"status": "ok"}

    async def models(self, request: Any) -> dict[str, Any]:
        """List the one model there is."""
        self._session(request)
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "rlhf"}]}

    async def open(self, request: Any) -> Any:
        """Give a session to a program that asks for one; who goes before it is told leaves it to another."""
        from starlette.responses import JSONResponse

        gateway, key, body = self._gateway, _key(request), await _body(request, empty={})
        leaving = asyncio.ensure_future(gone(request))
        session = await _unless_gone(leaving, gateway.claim(key, body), gateway.put_back)
        url = f"{request.url.scheme}://{request.url.netloc}/sessions/{session.id}"
        told = {"id": session.id, "key": session.key, "url": url, "base_url": f"{url}/v1", "task": session.task}
        arrived, lost = partial(gateway.claimed, session, key), partial(gateway.put_back, session)
        return partial(send_whole, partial(JSONResponse, told), leaving, arrived, lost)

    async def reward(self, request: Any) -> dict[str, bool]:
        """Take a reward."""
        session, body = self._session(request), await _body(request)
        return await _ended(session, reward=_reward(body))

    async def finish(self, request: Any) -> dict[str, bool]:
        """End an attempt, perhaps with its reward."""
        session, body = self._session(request), await _body(request, empty={})
        found = _reward(body) if "reward" in body or "parts" in body else None
        return await _ended(session, reward=found, finished=True)

    async def fail(self, request: Any) -> dict[str, bool]:
        """End an attempt that says nothing of the policy."""
        session, body = self._session(request), await _body(request, empty={})
        why = str(body.get("message") or "the agent's program said that it failed")
        return await _ended(session, failure=why[:4000])

    async def step(self, request: Any) -> Any:
        """Do an action in the world of the task."""
        session, body = self._session(request), await _body(request)
        action = body.get("action")
        if session.step is None or not isinstance(action, str | dict):
            raise Refusal(400, "there is no world to step in, or no action. Expected: {'action': a text, or a call}.")
        return await on_run(session, session.step(action if isinstance(action, str) else json.dumps(action)))

    def _session(self, request: Any) -> Session:
        return self._gateway.session(request.path_params["name"], _key(request))


async def _completed(gateway: Gateway, wire: ModuleType, request: Any) -> Any:
    """Answer one request of a wire."""
    from starlette.responses import JSONResponse

    try:
        session = gateway.session(request.path_params["name"], _key(request))
        asked = _read(wire, await _body(request))
        named = request.headers.get("idempotency-key", "")
        repeats = request.headers.get("x-stainless-retry-count", "") not in ("", "0")
        with gateway.room():
            exchange = Exchange(request, session, partial(session.ask, asked, named, repeats=repeats))
            answered = await exchange.reply()
    except Refusal as refusal:
        gateway.note_refusal(request.path_params["name"], refusal)
        body = messages.error(refusal) if wire is messages else _error(refusal)
        return JSONResponse(body, refusal.status, _headers(refusal))
    return partial(exchange.send, partial(_written, wire, answered, asked))


def _written(wire: ModuleType, answered: ChatReply, asked: ChatRequest) -> Any:
    """The response with a reply."""
    from starlette.responses import JSONResponse, StreamingResponse

    if asked.stream:
        return StreamingResponse(_streamed(wire, answered, asked), media_type="text/event-stream")
    return JSONResponse(wire.reply(answered, asked))


def _read(wire: ModuleType, body: Mapping[str, Any]) -> ChatRequest:
    try:
        asked: ChatRequest = wire.read(body)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:  # a field of another type
        raise Refusal(400, f"the request cannot be read. Got: {error}. Do: compare it with the API's form.") from error
    return asked


async def _streamed(wire: ModuleType, answered: ChatReply, asked: ChatRequest) -> AsyncIterator[str]:
    for piece in wire.stream(answered, asked):
        yield piece


async def _unless_gone(leaving: asyncio.Task[None], work: Coroutine[Any, Any, T], put_back: Callable[[T], object]) -> T:
    """Return what `work` returns. Where the client goes away first, `put_back` gets its result."""
    doing = asyncio.ensure_future(work)
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            doing.add_done_callback(partial(_hand_over, put_back))
            raise Refusal(499, "the client has gone.", "client_gone")
        return doing.result()
    except BaseException:
        leaving.cancel()
        raise


def _hand_over(to: Callable[[T], object], done: asyncio.Future[T]) -> None:
    if not done.cancelled() and done.exception() is None:
        to(done.result())


async def _ended(session: Session, **how: Any) -> dict[str, bool]:
    async def end() -> None:
        session.end(**how)

    await on_run(session, end())
    return {"ok": True}


def _key(request: Any) -> str:
    """The key of a request, as OpenAI's clients send it or as Anthropic's do."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return str(key) if kind.lower() == "bearer" and key else str(request.headers.get("x-api-key", ""))


async def _body(request: Any, empty: Mapping[str, Any] | None = None) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _MAX_BODY:
            raise Refusal(413, f"the body is too long. Expected: at most {_MAX_BODY} bytes.")
    if not raw and empty is not None:
        return dict(empty)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON. Got: {error}.") from error
    if not isinstance(found, dict):
        raise Refusal(400, "the body is no JSON object.")
    return found


def _reward(body: Mapping[str, Any]) -> Reward:
    """Parse a posted reward: a number, or parts by name, which add up. Raises Refusal."""
    parts, value, success = body.get("parts") or {}, body.get("reward"), body.get("success")
    numbers = list(parts.values()) if isinstance(parts, dict) else [None]
    numbers += [value] if value is not None or not parts else []
    if any(isinstance(x, bool) or not isinstance(x, int | float) or x - x != 0 for x in numbers):
        raise Refusal(
            400,
            f"no reward. Got: {str(dict(body))[:200]}. Expected: {{'reward': 1.0}} or {{'parts': {{'name': 1.0}}}}.",
        )
    if not isinstance(success, bool | None):
        raise Refusal(400, f"success is no truth value. Got: {success!r}. Expected: true, false, or nothing.")
    return Reward(
        float(sum(parts.values()) if value is None else value), {k: float(v) for k, v in parts.items()}, success
    )


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = "rate_limit_error" if refusal.status == 429 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "code": refusal.code, "param": None}}


def _headers(refusal: Refusal) -> dict[str, str]:
    """Headers that tell client libraries whether to try again."""
    again = {"Retry-After": f"{refusal.after_s:g}"} if refusal.after_s is not None else {}
    return {**again, "x-should-retry": "true" if again else "false"}
