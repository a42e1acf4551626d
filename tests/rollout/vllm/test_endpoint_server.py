"""`rlhf evaluate --endpoint` against vLLM's own OpenAI server, calm and behind a proxy that makes all sorts of trouble.

The server is started as its makers say, with nothing of this package in it, on a folder with a tiny model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp
import pytest
from aiohttp import web

from rlhf.evaluation.store import read_failures, read_trajectories
from rlhf.inference.vllm.start import engine_environment
from rlhf.processes import free_port
from tests.commands import last_json, run
from tests.loopback import loopback
from tests.rollout.vllm.real_vllm import MAX_CONTEXT, policy_like
from tests.rollout.vllm.served import PATIENCE_S

pytestmark = pytest.mark.extended  # tests/test_endpoint.py has servers that answer to order

NAME = "tiny"
SUITE = """
attempts: 2
sampling: {top_k: 50}
agent: {kind: chat, system: "", show_admissible: true}
limits: {max_turns: 3, max_tokens: 6, max_concurrent: 4, max_retries: 0}
tasks: {split: test, n: 6}
parts:
  small: {environment: {kind: keyhole, rows: 2, columns: 2, loops: 0, max_steps: 3}}
"""
SORTS = ("rate limit", "429", "500", "503", "dropped", "dropped halfway", "no JSON", "half of the JSON", "no message")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's server; all that it started ends with it."""
    folder, port = tmp_path_factory.mktemp("model"), free_port()
    policy = policy_like()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    # `vllm serve` of the CPU build finds no package of its name; this is the module that it runs.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", NAME]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(MAX_CONTEXT)]
    words += ["--kv-cache-memory-bytes", str(32 * 2**20), "--max-num-seqs", "16", "--enforce-eager"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words], env=os.environ | engine_environment(), stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + PATIENCE_S
        while not _is_healthy(url):
            assert process.poll() is None and time.monotonic() < give_up, (folder / "server.log").read_text()[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


@dataclass
class Trouble:
    """What a proxy did: each conversation's first requests meet trouble, all sorts in turn, before one gets through.

    Attributes:
        n_each: troubles that one conversation meets before it is let through.
        met: sort -> how often.
        n_let_through: requests that reached the server.
    """

    n_each: int = 2
    met: dict[str, int] = field(default_factory=dict)
    n_let_through: int = 0
    _tries: dict[str, int] = field(default_factory=dict)
    _n: int = 0

    def next(self, body: bytes) -> str | None:
        """The sort of trouble that this request meets; None lets it through."""
        key = body.decode()
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if tries > self.n_each:
            self.n_let_through += 1
            return None
        sort = SORTS[self._n % len(SORTS)]
        self._n += 1
        self.met[sort] = self.met.get(sort, 0) + 1
        return sort


@contextmanager
def proxy(target: str, trouble: Trouble) -> Iterator[str]:
    """A proxy before `target`, in a thread of its own."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        sort = trouble.next(body)
        if sort is None or sort in ("dropped halfway", "half of the JSON"):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{target}{request.path}", data=body, headers={"Content-Type": "application/json"}) as got,
            ):
                answer, status = await got.read(), got.status
            if sort is None:
                return web.Response(body=answer, status=status, content_type="application/json")
            if sort == "half of the JSON":
                return web.Response(body=answer[: len(answer) // 2], content_type="application/json")
            response = web.StreamResponse(headers={"Content-Length": str(len(answer))})
            await response.prepare(request)
            await response.write(answer[: len(answer) // 2])
        if sort in ("dropped", "dropped halfway"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response() if sort == "dropped" else response
        return _refusal(sort)

    def _refusal(sort: str) -> web.Response:
        if sort == "rate limit":
            return web.Response(status=429, headers={"Retry-After": "0.02"}, text="slow down")
        if sort in ("429", "500", "503"):
            return web.Response(status=int(sort), text="<html>try again</html>")
        return web.Response(text="<html>gateway</html>") if sort == "no JSON" else web.json_response({"choices": []})

    with loopback(pass_on) as url:
        yield url


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "houses.yaml"
    path.write_text(SUITE)
    return path


def evaluated(url: str, suite: Path, out: Path, *more: str) -> dict[str, Any]:
    words = ("--endpoint", url, "--model", NAME, "--suite", suite, "--out", out, *more, "--json")
    found: dict[str, Any] = last_json(run("evaluate", *words))["summary"]
    return found


def said(out: Path) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Attempt -> what the policy did and what it was told."""
    return {
        (r.task_id, r.trajectory.attempt): [(turn.action.text, turn.reply) for turn in r.trajectory.turns]
        for r in read_trajectories(out / "trajectories")
    }


def test_vllm_in_all_sorts_of_trouble_loses_no_attempt_and_changes_no_score(
    server: str, suite: Path, tmp_path: Path
) -> None:
    calm = evaluated(server, suite, tmp_path / "calm")
    assert (calm["n_attempts"], calm["n_errors"], calm["n_tasks"]) == (12, 0, 6)
    assert calm["turns_mean"] == 3 and len(said(tmp_path / "calm")) == 12  # a model that knows nothing solves nothing
    trouble = Trouble()
    with proxy(server, trouble) as url:
        found = evaluated(url, suite, tmp_path / "troubled")
    assert set(trouble.met) == set(SORTS) and sum(trouble.met.values()) == 2 * trouble.n_let_through
    assert trouble.n_let_through == 12 * 3  # every turn of every attempt, once
    assert said(tmp_path / "troubled") == said(tmp_path / "calm")
    assert found == calm


def test_a_server_that_is_never_let_through_to_is_an_error_and_no_failure(
    server: str, suite: Path, tmp_path: Path
) -> None:
    suite.write_text(SUITE.replace("max_retries: 0", "max_retries: 0, max_error_fraction: 1.0"))
    trouble = Trouble(n_each=1_000_000)
    with proxy(server, trouble) as url:
        found = evaluated(url, suite, tmp_path / "cut", "--tries", "2")
    assert (found["n_attempts"], found["errors"]["engine_error"], found["success"]["n"]) == (12, 12, 0)
    assert found["success"]["value"] is None and trouble.n_let_through == 0
    assert len(list(read_failures(tmp_path / "cut" / "trajectories"))) == 12
