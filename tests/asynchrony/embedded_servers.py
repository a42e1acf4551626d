"""`rlhf serve --embedded` in processes of their own, with the policy of a recipe that is made from scratch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from rlhf.processes import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
_LIMIT_S = 240.0


def start(recipe: Path, model: Path, port: int) -> subprocess.Popen[bytes]:
    """A server of the policy in a folder."""
    line = [sys.executable, "-m", "rlhf.cli", "serve", str(recipe), "--embedded", "--port", str(port)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = (model.parent / f"server-{port}.log").open("wb")
    return subprocess.Popen(
        [*line, "--checkpoint", str(model)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
        stdout=log,
        stderr=log,
    )


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)


@contextmanager
def servers(recipe: Path, model: Path, n: int) -> Iterator[tuple[Sequence[str], list[subprocess.Popen[bytes]]]]:
    """Inside, `n` servers run: their addresses, and their processes."""
    pytest.importorskip("aiohttp")
    ports = [free_port() for _ in range(n)]
    started = [start(recipe, model, port) for port in ports]
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url, process in zip(urls, started, strict=True):
            wait(url, process)
        yield urls, started
    finally:
        for process in started:
            process.kill()
            process.wait()
