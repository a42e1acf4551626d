"""`rlhf serve` as a user runs it, in a process of its own, and engines over such servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from rlhf.build.engine import SHAPES
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.server import ServerInstance
from rlhf.rollout.progress import Progress
from rlhf.training.policy.model import Policy
from tests import recipe_parts
from tests.rollout.vllm.real_vllm import MAX_CONTEXT

ROOT = Path(__file__).resolve().parents[3]

#: Longest that a server may take to start or to stop on a busy machine.
PATIENCE_S = 240.0


def write_recipe(folder: Path, policy: Policy) -> Path:
    """A policy's folder and a recipe that serves it, with room for adapters."""
    (policy.model.get_base_model() if policy.is_lora else policy.model).save_pretrained(folder / "policy")
    policy.tokenizer.save_pretrained(folder / "policy")
    given = recipe_parts.RECIPE.splitlines()
    kept = [line for line in given if not line.startswith("policy:") and "supervised" not in line]
    kept += [
        f"policy: {{kind: pretrained, path: {folder / 'policy'}, lora: {{rank: 4}}}}",
        "engine: {kind: vllm, kv_cache_gb: 0.03, max_sessions: 64}",
    ]
    return recipe_parts.write(folder, "\n".join(kept).replace("max_tokens: 8", f"max_context: {MAX_CONTEXT}"))


class Served:
    """A server of a recipe: `rlhf serve`, below it vLLM's own server, below that its engine.

    `inside` is a command that runs the command after it, in other circumstances.
    """

    def __init__(self, recipe: Path, port: int, log: Path, inside: Sequence[str] = ()) -> None:
        self.url, self.port, self.log = f"http://127.0.0.1:{port}", port, log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "rlhf.cli", "serve", str(recipe), "--port", str(port)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                stdout=file,
                stderr=file,
                # A shell starts what it puts into the background with Ctrl-C switched off, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self.family: list[psutil.Process] = []
        self.folder = Path()

    @property
    def said(self) -> str:
        """What it has written to the terminal."""
        return self.log.read_text()

    def wait_until_ready(self) -> None:
        """Return when it takes requests."""
        self._wait(lambda: f"at {self.url}" in self.said)
        assert self.process.poll() is None, self.said
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        line = self.server.cmdline()
        # Where the model was written for vLLM to load, as the server's own process sees it.
        self.folder = Path(f"/proc/{self.process.pid}/root" + line[line.index("--model") + 1])
        assert len(self.family) > 1 and self.folder.is_dir()

    @property
    def server(self) -> psutil.Process:
        """The process that speaks HTTP."""
        return self.family[0]

    @property
    def engine(self) -> psutil.Process:
        """The process that holds the model."""
        return self.family[-1]

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        return self.process.wait(PATIENCE_S)

    def n_left(self) -> int:
        """Processes of it that live."""
        return sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self.family)

    def stop(self) -> None:
        """End it, however."""
        if self.process.poll() is None:
            self.process.terminate()
            self.ended()

    def _wait(self, done: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not done() and self.process.poll() is None:
            assert time.monotonic() < give_up, self.said
            time.sleep(0.1)


@asynccontextmanager
async def engine_on(servers: Sequence[Any], policy: Policy, form: Any = "full", **settings: Any) -> Any:
    """An engine over running servers: addresses, or clients of them."""
    clients = [ServerInstance(server) if isinstance(server, str) else server for server in servers]
    engine = VllmEngine(clients, form=form, **settings)
    config = policy.model.config
    try:
        await engine.connect(
            shapes={name: getattr(config, name) for name in SHAPES},
            n_vocab=config.vocab_size,
            max_context=MAX_CONTEXT,
            lora_rank=4 if form == "adapter" else 0,
        )
        yield engine
    finally:
        await engine.close()


def post(url: str, **body: Any) -> dict[str, Any]:
    """What an OpenAI client would send and get."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


class Counting(ServerInstance):
    """A server's client that notes the prompts it was asked to go on with."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prompts: list[tuple[int, ...]] = []
        self.most = self.now = 0

    async def sample(self, request_id: str, ids: Any, *rest: Any) -> Any:
        self.prompts.append(tuple(ids))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().sample(request_id, ids, *rest)
        finally:
            self.now -= 1


@dataclass
class Cut:
    """Ends something once a few episodes are done and many run."""

    end: Callable[[], None]
    at: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.n_done >= 4 and self.at is None:
            self.at = progress
            self.end()
