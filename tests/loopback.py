"""A server on the loopback, in a thread of its own, that answers chat completions as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

_LIMIT_S = 30


@contextmanager
def loopback(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Iterator[str]:
    """The address at which `answer` is asked, while the context lasts."""
    ready = threading.Event()
    place: dict[str, Any] = {}

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place["port"], place["stop"] = runner.addresses[0][1], (stop := asyncio.Event())
        place["loop"] = asyncio.get_running_loop()
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(_LIMIT_S)
    try:
        yield f"http://127.0.0.1:{place['port']}"
    finally:
        place["loop"].call_soon_threadsafe(place["stop"].set)
        thread.join(_LIMIT_S)
