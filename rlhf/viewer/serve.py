"""A viewer that listens: its port, its address, and its end."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import UsageError
from rlhf.viewer.redaction import Redaction

#: Where a viewer listens first, and how many ports after it are tried.
PORT, TRIED = 8470, 50


@dataclass(frozen=True)
class Place:
    """A socket that is listened on, and the address that shows it.

    Attributes:
        socket: bound, not yet listened on.
        url: with the key, without which nothing is shown.
        key: of it.
        port: of it.
    """

    socket: socket.socket
    url: str
    key: str
    port: int


def bound(host: str, port: int) -> Place:
    """Bind the port, or the next one that is free.

    Raises:
        UsageError: this machine has no such address, or none of the ports is free.
    """
    wanted = range(port, port + TRIED) if port else range(1)
    for one in (p for p in wanted if p < 1 << 16):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.bind((host, one))
            found.listen(64)
        except OSError as error:
            found.close()
            if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
                raise UsageError(
                    "the viewer cannot listen at this address",
                    where=f"--host {host} --port {one}",
                    got=error.strerror or str(error),
                    expected="an address of this machine, and a port from 1024 on",
                    hint="leave out --host; over SSH: ssh -L PORT:127.0.0.1:PORT machine",
                ) from error
            continue
        key, port = secrets.token_urlsafe(12), found.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        return Place(found, f"http://{shown}:{port}/{key}/", key, port)
    raise UsageError("no port is free", where=f"--port {port}", got=f"{len(wanted)} in use", expected="a free port")


def serve(
    folders: Sequence[Path], place: Place, patterns: Sequence[str], said: Callable[[], None], *, with_parent: bool
) -> None:
    """Show runs until Ctrl-C.

    Args:
        folders: runs, evaluations, or folders that they are in.
        place: where to listen.
        patterns: what to black out, beside keys of known forms.
        said: called when it is about to listen.
        with_parent: end, too, when standard input closes, which its parent holds.
    """
    # Arrow's own pool keeps what each thread has read; it is chosen when Arrow is imported.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    import uvicorn

    from rlhf.viewer.app import create_app
    from rlhf.viewer.library import Library

    app = create_app(Library(folders), place.key, Redaction(patterns), is_ending=lambda: server.should_exit)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, proxy_headers=False
    )
    server = uvicorn.Server(config)
    if with_parent:
        threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    said()
    with suppress(KeyboardInterrupt):
        server.run(sockets=[place.socket])


def _end_with_parent(server: object) -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 1 << 10):
            pass
    server.should_exit = True  # type: ignore[attr-defined]
