"""Servers of the policy, rollout workers and controller that the first learner starts on Ray."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

from rlhf.asynchrony.controller import Job
from rlhf.asynchrony.pipeline import Rules
from rlhf.asynchrony.remote import ControllerActor, Delivered, RemoteController, RemotePlayer
from rlhf.build.engine import engine_dtype, fit_of
from rlhf.build.pair_data import check_parts
from rlhf.child_process import kill_group, python_command, python_environment
from rlhf.data import ScoredGroup
from rlhf.errors import EngineError
from rlhf.inference.settings import OF_START, EngineCapabilities, VllmSettings
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.server import ServerInstance
from rlhf.inference.vllm.together import FollowingEngine
from rlhf.processes import current, free_port
from rlhf.recipe import Recipe, load_values
from rlhf.recipe.model import values_of
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutRunner
from rlhf.training.policy.model import Policy, Pretrained
from rlhf.training.rollouts_ahead import places_of, played

#: Most seconds until a server answers, or a worker is there (again).
START_S = 600.0
_POLL_S, _STOP_S = 0.2, 20.0
#: Of Linux: the signal that a process gets when its parent has ended.
_PR_SET_PDEATHSIG = 1
#: Looked up here, as a child between fork and exec may load nothing.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
#: Ends of a server without an answer between them after which it is given up.
_MAX_ENDED = 3


@dataclass(frozen=True)
class Asked:
    """Settings of a rollout worker: the recipe, and the addresses of the policy's servers.

    Attributes:
        values: of the recipe.
        name: of the recipe.
        base: folder that its files are looked for in.
        stage: index of the stage whose groups are played.
        engine: settings with addresses.
        fit: shapes, vocabulary and context of the policy.
        dtype: of the servers' weights.
        tokenizer: of the policy.
        renderer: what else a `Renderer` is made of.
    """

    values: Mapping[str, Any]
    name: str
    base: Path
    stage: int
    engine: VllmSettings
    fit: Mapping[str, Any]
    dtype: torch.dtype
    tokenizer: Any
    renderer: Mapping[str, Any]


class RolloutWorker:
    """Plays and scores groups. It holds nothing that counts, so that Ray may start it again anywhere."""

    def __init__(self, asked: Asked) -> None:
        torch.set_num_threads(1)
        recipe = load_values(asked.values, name=asked.name, base=asked.base)
        check_parts([weighted.reward for weighted in recipe.rewards.values()], asked.tokenizer)
        settings = asked.engine
        engine = FollowingEngine(
            [ServerInstance(url) for url in settings.servers],
            dtype=asked.dtype,
            at_update=settings.at_update,
            request_timeout_s=settings.request_timeout_s,
            delivery_timeout_s=settings.delivery_timeout_s,
        )
        self._fit, self._engine, self._is_connected = asked.fit, engine, asyncio.Lock()
        self._weights: Delivered | None = None
        self._stage: Any = recipe.stages[asked.stage]
        self._collector = RolloutRunner(
            environment=recipe.environment,
            agent=recipe.agent,
            rewards=recipe.rewards,
            engine=engine,
            renderer=Renderer(asked.tokenizer, **asked.renderer),
            limits=recipe.limits,
            seed=recipe.seed,
        )

    async def ready(self) -> None:
        """Return once it is there."""

    async def play(self, job: Job, weights: Delivered) -> tuple[ScoredGroup, Mapping[int, int]]:
        """Return a group, and how many tokens each version has sampled for it, failed attempts included."""
        async with self._is_connected:
            if self._weights is None:
                await self._engine.connect(**self._fit)
            if self._weights != weights:
                await self._engine.follow(weights.sender, weights.version, weights.fingerprint)
                self._weights = weights
        sampled: Counter[int] = Counter()

        def count(version: int, n_tokens: int) -> None:
            sampled[version] += n_tokens

        return await played(self._collector, self._stage, job, count), dict(sampled)


class Server:
    """A server of the policy, `rlhf serve` in a process of its own, started again at its address when it ends."""

    def __init__(self, command: list[str]) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        port = free_port()
        self.url = f"http://{host}:{port}"
        self._command = [*command, "--host", host, "--port", str(port)]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the actor
        self._ended: list[int] = []  # exit codes since it last answered
        self._is_closed = threading.Event()
        # The thread that starts a process must live as long as it: what ends it is bound to its thread.
        threading.Thread(target=self._keep, name="server", daemon=True).start()

    def start(self) -> str:
        """Return its address once it answers. Raises EngineError."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    self._ended.clear()
                    return self.url
            except (URLError, OSError):
                time.sleep(_POLL_S)
            if len(self._ended) >= _MAX_ENDED:
                said = os.pread(self._log.fileno(), 2000, max(os.fstat(self._log.fileno()).st_size - 2000, 0))
                text = said.decode(errors="replace").strip()
                raise EngineError("a server ends as it starts", where=self.url, got=f"exit {self._ended[-1]}: {text}")
        raise EngineError("a server does not start", where=self.url, got=f"nothing in {START_S:g} s")

    def stop(self) -> None:
        """End it."""
        self._is_closed.set()
        if (process := self._process) is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            finally:
                kill_group(process)

    def _keep(self) -> None:
        while not self._is_closed.is_set():
            self._process = subprocess.Popen(
                self._command, env=python_environment(), start_new_session=True, preexec_fn=_end_with_parent,
                stdout=self._log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._ended.append(self._process.wait())
            self._is_closed.wait(min(_POLL_S * 2 ** min(len(self._ended), 8), 30.0))


def _end_with_parent() -> None:
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


class OnRay:
    """The actors of one run, as its first learner starts them; they end when it does.

    Args:
        recipe: with `cluster`.
        folder: of the run.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self._servers: list[Any] = []
        self._asked: list[Any] = []  # what workers are started again with lives as long as this holds it

    async def with_servers(self, policy: Policy) -> Recipe:
        """Return the recipe with addresses of servers, which are started where it names none; all learners call it."""
        here, urls = current(), list[str]()
        if here.is_main and self.recipe.cluster.servers:
            urls = await self._start_servers(policy)
        urls = await asyncio.to_thread(here.from_main, urls, "the addresses of servers")
        self.recipe = replace(self.recipe, engine=_on_servers(self.recipe.engine, urls)) if urls else self.recipe
        return self.recipe

    async def _start_servers(self, policy: Policy) -> list[str]:
        import ray

        recipe, given = self.recipe, list[str]()
        if not isinstance(recipe.policy, Pretrained):  # its vocabulary is nowhere else
            model = self.folder / "served" / "first"
            policy.save(model / "policy")
            given = ["--checkpoint", str(model)]
        is_vllm = isinstance(recipe.engine, VllmSettings)
        command = python_command("rlhf.cli", "serve", self.folder / "recipe.yaml", *given)
        command += [] if is_vllm else ["--embedded"]
        gpus = EngineCapabilities(recipe.engine).tensor_parallel if ray.cluster_resources().get("GPU") else 0
        kind = ray.remote(num_cpus=1, num_gpus=gpus)(Server)
        self._servers = [kind.remote(command) for _ in range(recipe.cluster.servers)]
        return list(await asyncio.gather(*(server.start.remote() for server in self._servers)))

    def controller(self, rules: Rules, stage: int, policy: Policy, collector: RolloutRunner) -> RemoteController:
        """Return the controller of a stage, whose workers are being started."""
        import ray

        recipe, engine = self.recipe, collector.engine
        assert isinstance(engine, VllmEngine) and isinstance(recipe.engine, VllmSettings)
        n = recipe.cluster.rollout_workers
        asked = ray.put(
            Asked(
                values=values_of(recipe) | {"cluster": {}},
                name=recipe.name,
                base=recipe.base,
                stage=stage,
                engine=recipe.engine,
                fit=fit_of(recipe, policy),
                dtype=engine_dtype(recipe.engine, policy),
                tokenizer=policy.tokenizer,
                renderer={
                    "chat_template_kwargs": policy.chat_template_kwargs,
                    "generation_config": policy.model.generation_config,
                },
            )
        )
        self._asked.append(asked)
        settings: Any = recipe.stages[stage]
        places = places_of(recipe.environment, recipe.limits, settings.group_size, n)
        worker = ray.remote(num_cpus=1, max_restarts=-1, max_concurrency=places + 2)(RolloutWorker)
        actors = [worker.remote(asked) for _ in range(n)]
        players = [RemotePlayer(f"rollout worker {i}", one, places, START_S) for i, one in enumerate(actors)]
        made = ray.remote(num_cpus=0, max_concurrency=100)(ControllerActor)
        actor = made.remote(rules, rules.n_per_step, players)

        def delivered() -> Delivered:
            return Delivered(engine.sender, engine.policy_version, engine.policy_fingerprint)

        return RemoteController(actor, delivered, actors)

    async def aclose(self) -> None:
        """End the servers in order."""
        import ray

        for server in self._servers:
            try:
                await asyncio.wait_for(server.stop.remote(), _STOP_S + 5)
            except Exception:  # it has ended already
                continue
            finally:
                ray.kill(server)


def _on_servers(engine: Any, urls: list[str]) -> VllmSettings:
    """Engine settings for servers that were started with all that says how."""
    if not isinstance(engine, VllmSettings):
        return VllmSettings(servers=tuple(urls))
    kept = {f.name: getattr(engine, f.name) for f in fields(engine) if f.name not in OF_START}
    return VllmSettings(**kept | {"servers": tuple(urls)})
