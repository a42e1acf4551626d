"""The way of a reply from the event loop of its session to the client, and whether it arrived."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from rlhf.gateway.request import ChatReply, Refusal
from rlhf.gateway.session import Session


class Exchange:
    """A request that a session answers, until its client has the whole reply or has gone.

    Args:
        request: of the client.
        session: that is asked.
        ask: asks it, given what passes the reply on.
    """

    def __init__(self, request: Any, session: Session, ask: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply: asyncio.Future[ChatReply] = self._loop.create_future()
        self._sent = concurrent.futures.Future[None]()
        self._asking = asyncio.ensure_future(on_run(session, ask(send=self._pass_on)))
        self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())  # if the run ends first
        self._gone = asyncio.ensure_future(gone(request))

    async def reply(self) -> ChatReply:
        """The reply, which is to be sent. Raises Refusal, also where the client goes away first."""
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({self._asking, self._reply, self._gone}, return_when=first)
            if self._gone.done():
                raise Refusal(499, "the client has gone.", "client_gone")
            return self._reply.result() if self._reply.done() else await self._asking
        except BaseException:
            self._asking.cancel()
            self._gone.cancel()
            raise

    async def send(self, written: Callable[[], Any], scope: Any, receive: Any, send: Any) -> None:
        """Send a response, and tell the session that the client has it, unless its connection is seen to close."""

        def arrived() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # the run is over
                self._sent.set_result(None)

        await send_whole(written, self._gone, arrived, self._asking.cancel, scope, receive, send)

    async def _pass_on(self, answered: ChatReply) -> None:
        """Have the reply sent, and wait until it is; called on the run's event loop."""
        self._loop.call_soon_threadsafe(self._take, answered)
        await asyncio.wrap_future(self._sent)

    def _take(self, answered: ChatReply) -> None:
        if not self._reply.done():
            self._reply.set_result(answered)


async def send_whole(
    written: Callable[[], Any],
    leaving: asyncio.Future[None],
    arrived: Callable[[], object],
    lost: Callable[[], object],
    scope: Any,
    receive: Any,
    send: Any,
) -> None:
    """Send a response, and say whether the client has it whole.

    Args:
        written: makes the response.
        leaving: done once the client has gone (`gone`); cancelled at the end.
        arrived: called once the response is sent, unless its connection is seen to close.
        lost: called otherwise.
        scope: of ASGI, as the next two.
        receive: takes a message.
        send: sends one.
    """
    has_arrived, last = False, b""

    async def watched(message: Any) -> None:
        nonlocal has_arrived, last
        if message["type"] == "http.response.body":
            # Who has it all may close the connection at once, so the last byte goes out alone, after a look.
            body = last + message.get("body", b"")
            body, last = body[:-1], body[-1:]
            await send({**message, "body": body, "more_body": True})
            if message.get("more_body"):
                return
            message = {**message, "body": last}
            await send({**message, "body": b"", "more_body": True})  # returns once the rest has left the buffer
            for _ in range(2):  # a failed write closes the connection in the next round, `leaving` ends after it
                await asyncio.sleep(0)
            if has_arrived := not leaving.done():
                arrived()
        await send(message)

    try:
        await written()(scope, receive, watched)
    finally:
        leaving.cancel()
        if not has_arrived:
            lost()


async def on_run(session: Session, work: Coroutine[Any, Any, Any]) -> Any:
    """Do something on the event loop that the session lives on. Raises Refusal where that is gone."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, session.loop)
    except RuntimeError as error:
        work.close()
        raise Refusal(409, "the run of this session is over.", "session_over") from error
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Refusal(409, "the request was given up: the session is over.", "session_over") from None


async def gone(request: Any) -> None:
    """Return once the client of a request has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
