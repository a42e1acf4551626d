"""Servers of the policy, rollout workers and controller that the first learner starts on Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf.asynchrony.controller import Job
from rlhf.asynchrony.pipeline import Rules
from rlhf.asynchrony.remote import ControllerActor, Delivered, Played, RemoteController, RemoteWorker
from rlhf.build.engine import RETURN_S, engine_dtype, fit_of, make_publisher, vllm_engine
from rlhf.build.pair_data import check_parts
from rlhf.child_process import end_with_parent, is_healthy, kill_group, python_command, python_environment
from rlhf.data import Outcome
from rlhf.errors import EngineError
from rlhf.evaluation.evaluate import EvaluationResult, evaluate
from rlhf.inference.settings import OF_START, EngineCapabilities, VllmSettings
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import NoInstanceError
from rlhf.inference.vllm.multi_rank import FollowingEngine
from rlhf.inference.vllm.server import ServerInstance
from rlhf.processes import current, free_port
from rlhf.recipe import Recipe, load_values
from rlhf.recipe.model import values_of
from rlhf.recipe.text import escaped
from rlhf.rollout.counted_engine import CountedEngine
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutRunner
from rlhf.training.background_evaluation import BackgroundEvaluation
from rlhf.training.policy.model import Policy, Pretrained
from rlhf.training.rollouts_ahead import places_of, played

#: Most seconds until a worker is there (again); a bit more than it waits for a server itself.
_READY_S = RETURN_S + 30.0
_POLL_S, _STOP_S = 0.2, 20.0
#: Seconds that a server has to end, which gives vLLM twenty of its own.
_SERVER_STOP_S = 45.0
#: Ends of a server without an answer between them after which it is given up.
_MAX_ENDED = 5


@dataclass(frozen=True)
class WorkerSpec:
    """Settings of a rollout worker: the recipe, and the addresses of the policy's servers.

    Attributes:
        values: of the recipe.
        name: of the recipe.
        base: folder that its files are looked for in.
        stage: index of the stage whose groups are played.
        engine: settings with addresses.
        fit: shapes and vocabulary of the policy, and the context that all servers have room for.
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

    def __init__(self, asked: WorkerSpec) -> None:
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
        self._evaluation = recipe.evaluation
        self._runner = RolloutRunner(
            environment=recipe.environment,
            agent=recipe.agent,
            rewards=recipe.rewards,
            engine=engine,
            renderer=Renderer(asked.tokenizer, **asked.renderer),
            limits=recipe.limits,
            seed=recipe.seed,
        )

    async def ready(self) -> None:
        """Return once it is there, and a server has the weights. Raises NoInstanceError where none has in time."""
        await self._engine.found(RETURN_S)

    async def alive(self) -> None:
        """Return at once."""

    async def play(self, job: Job, weights: Delivered) -> Played:
        """Play a group; there is none where an attempt failed for want of a server, so that nothing trains on that."""
        await self._follow(weights)
        sampled = Counter[int]()

        def count(version: int, n_tokens: int) -> None:
            sampled[version] += n_tokens

        engine = CountedEngine(self._runner.engine, count)
        group = await played(replace(self._runner, engine=engine), self._stage, job)
        failed = [failure.message for failure in group.failures if failure.outcome is Outcome.ENGINE_ERROR]
        if failed and engine.n_refused:
            return Played(None, dict(sampled), failed[0])
        return Played(group, dict(sampled))

    async def evaluate(self, weights: Delivered) -> EvaluationResult:
        """Attempt the validation tasks. Raises NoInstanceError where no server was left for some of the attempts."""
        await self._follow(weights)
        engine, settings = CountedEngine(self._runner.engine, lambda version, n_tokens: None), self._evaluation
        split, n_tasks = settings.validation_split, settings.validation_n_tasks
        found = await evaluate(replace(self._runner, engine=engine), settings, split=split, n_tasks=n_tasks)
        if engine.n_refused:
            raise NoInstanceError("no server holds the weights any more", where=f"version {weights.version}")
        return found

    async def _follow(self, weights: Delivered) -> None:
        async with self._is_connected:
            if self._weights is None:
                await self._engine.connect(**self._fit, leaves_out=True)  # all were there when the run began
            if self._weights != weights:
                await self._engine.follow(weights.sender, weights.version, weights.fingerprint, weights.joined)
                self._weights = weights


class Server:
    """A server of the policy, `rlhf serve` in a process of its own, started again at its address when it ends.

    Args:
        command: without host and port.
        place: file with its address, so that this is the same when the actor is started again on its node; what the
            server says is in `place`.log.
    """

    def __init__(self, command: list[str], place: Path) -> None:
        import ray

        place.parent.mkdir(parents=True, exist_ok=True)
        host, port = ray.util.get_node_ip_address(), free_port()
        before, _, number = (place.read_text() if place.is_file() else "").rpartition(":")
        port = int(number) if before == host else port
        place.write_text(f"{host}:{port}")
        self.url, self._log = f"http://{host}:{port}", place.with_suffix(".log")
        self._command = [*command, "--host", host, "--port", str(port)]
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[str] = []  # how, since it last answered
        self._is_closed = threading.Event()
        # The thread that starts a process must live as long as it: what ends it is bound to its thread.
        threading.Thread(target=self._keep, name="server", daemon=True).start()

    def start(self) -> str:
        """Return its address once it answers. Raises EngineError."""
        deadline = time.monotonic() + RETURN_S
        while time.monotonic() < deadline:
            if is_healthy(self.url):
                return self.url
            time.sleep(_POLL_S)
            if len(self._ended) >= _MAX_ENDED:
                said = self._log.read_text(errors="replace")[-2000:].strip() if self._log.is_file() else ""
                got = f"{self._ended[-1]}: {said}"
                raise EngineError("a server exits at start", where=self.url, got=got, hint=f"see {self._log}")
        raise EngineError(
            "a server does not start", where=self.url, got=f"nothing in {RETURN_S:g} s", hint=f"see {self._log}"
        )

    def stop(self) -> None:
        """End it."""
        self._is_closed.set()
        if (process := self._process) is not None:
            process.terminate()
            try:
                process.wait(_SERVER_STOP_S)
            finally:
                kill_group(process, _STOP_S)

    def _keep(self) -> None:
        """Start it again and again, until it has ended several times without an answer in between."""
        while not self._is_closed.is_set() and len(self._ended) < _MAX_ENDED:
            try:
                process = self._process = self._begun()
            except OSError as error:  # no room for its log, or for a process
                self._ended.append(str(error))
                self._is_closed.wait(self._pause_s())
                continue
            while process.poll() is None and not is_healthy(self.url):
                self._is_closed.wait(_POLL_S)
            if process.poll() is None:
                self._ended.clear()
            self._ended.append(f"exit {process.wait()}")
            kill_group(process, _STOP_S)
            self._is_closed.wait(self._pause_s())

    def _begun(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, env=python_environment(), start_new_session=True, preexec_fn=end_with_parent,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _pause_s(self) -> float:
        return float(min(_POLL_S * 2 ** min(len(self._ended), 8), 30.0))


def learner_log(folder: Path, rank: int) -> Path:
    """Return the file with what a learner of a run says."""
    return folder / f"learner-{rank}.log"


def output_to(path: Path) -> None:
    """Append all that this process says from now on to a file, and not to Ray's."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # Ray's own streams write into its files, whatever the descriptors are.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


class OnRay:
    """The actors of one run, as its first learner starts them; they end when it does.

    Args:
        recipe: with `cluster`.
        folder: of the run.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self._servers: list[Any] = []
        self._of_evaluation: list[str] = []  # addresses of further servers
        self._evaluator: VllmEngine | None = None  # delivers to these
        self._asked: list[Any] = []  # what workers are started again with lives as long as this holds it

    async def with_servers(self, policy: Policy) -> Recipe:
        """Return the recipe with addresses of servers, which are started where it names none; all learners call it."""
        here, urls = current(), list[str]()
        if here.is_main and self.recipe.cluster.servers:
            urls = await self._start_servers(policy)
        urls = await asyncio.to_thread(here.from_main, urls, "the addresses of servers")
        n = self.recipe.cluster.servers
        urls, self._of_evaluation = urls[:n], urls[n:]
        self.recipe = replace(self.recipe, engine=_on_servers(self.recipe.engine, urls)) if urls else self.recipe
        return self.recipe

    async def _start_servers(self, policy: Policy) -> list[str]:
        import ray

        recipe, given = self.recipe, list[str]()
        n = recipe.cluster.servers + recipe.cluster.eval_servers
        if not isinstance(recipe.policy, Pretrained):  # its vocabulary is nowhere else
            model = self.folder / "served" / "first"
            policy.save(model / "policy")
            given = ["--checkpoint", str(model)]
        is_vllm = isinstance(recipe.engine, VllmSettings)
        command = python_command("rlhf.cli", "serve", self.folder / "recipe.yaml", *given)
        command += [] if is_vllm else ["--embedded"]
        gpus = EngineCapabilities(recipe.engine).tensor_parallel if ray.cluster_resources().get("GPU") else 0
        kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_concurrency=2)(Server)
        places = [self.folder / "served" / f"server-{number}" for number in range(n)]
        self._servers = [kind.remote(command, place) for place in places]
        try:
            async with asyncio.timeout(_READY_S):  # an actor that has no place on the cluster is never made
                return list(await asyncio.gather(*(server.start.remote() for server in self._servers)))
        except TimeoutError:
            raise EngineError(
                "the cluster has no room for the servers",
                where=f"cluster.servers: {recipe.cluster.servers}, eval_servers: {recipe.cluster.eval_servers}",
                got=f"nothing in {_READY_S:g} s; free are {ray.available_resources()}",
                hint="wait for other jobs to end, or request less",
            ) from None

    def controller(self, rules: Rules, stage: int, policy: Policy, runner: RolloutRunner) -> RemoteController:
        """Return the controller of a stage, whose workers are being started."""
        import ray

        recipe, engine = self.recipe, runner.engine
        assert isinstance(engine, VllmEngine) and isinstance(recipe.engine, VllmSettings)
        n = recipe.cluster.rollout_workers
        settings: Any = recipe.stages[stage]
        places = places_of(recipe.environment, recipe.limits, settings.group_size, n)
        actors = self._workers(n, places, recipe.engine, stage, policy, engine.max_context)
        workers = [RemoteWorker(f"rollout worker {i}", one, places, _READY_S) for i, one in enumerate(actors)]
        made = ray.remote(num_cpus=0, max_concurrency=100)(ControllerActor)
        most = max(1, recipe.limits.max_concurrent // settings.group_size)
        actor = made.remote(rules, workers, most, recipe.engine.servers)

        return RemoteController(actor, partial(_delivered, engine), actors)

    async def evaluations(self, policy: Policy) -> BackgroundEvaluation | None:
        """Return what plays evaluations on the servers for them; None without any. All learners call it."""
        if not self._of_evaluation:
            return None
        assert isinstance(self.recipe.engine, VllmSettings)
        settings = replace(self.recipe.engine, servers=tuple(self._of_evaluation))
        recipe, instances = replace(self.recipe, engine=settings), [ServerInstance(url) for url in settings.servers]
        engine = self._evaluator = vllm_engine(settings, instances, policy, form="full", return_s=RETURN_S)
        await engine.connect(**fit_of(recipe, policy))
        deliver = make_publisher(recipe, policy, engine).publish
        if not current().is_main:
            return BackgroundEvaluation(deliver, None)
        [actor] = self._workers(1, 1, settings, 0, policy, engine.max_context)
        worker = RemoteWorker("who plays evaluations", actor, 1, _READY_S)
        return BackgroundEvaluation(deliver, lambda: worker.evaluate(_delivered(engine)))

    def _workers(
        self, n: int, places: int, engine: VllmSettings, stage: int, policy: Policy, max_context: int
    ) -> list[Any]:
        """Start rollout workers on the servers of `engine`, which all have room for `max_context` tokens."""
        import ray

        recipe = self.recipe
        asked = ray.put(
            WorkerSpec(
                values=escaped(values_of(recipe)) | {"cluster": {}},
                name=recipe.name,
                base=recipe.base,
                stage=stage,
                engine=engine,
                fit=fit_of(recipe, policy) | {"max_context": max_context},
                dtype=engine_dtype(engine, policy),
                tokenizer=policy.tokenizer,
                renderer={
                    "chat_template_kwargs": policy.chat_template_kwargs,
                    "generation_config": policy.model.generation_config,
                },
            )
        )
        self._asked.append(asked)
        how = {"max_restarts": -1, "max_concurrency": places + 3, "label_selector": recipe.cluster.worker_labels}
        worker = ray.remote(num_cpus=1, **how)(RolloutWorker)
        return [worker.remote(asked) for _ in range(n)]

    async def aclose(self) -> None:
        """End the servers, all at the same time."""
        import ray

        if self._evaluator is not None:
            await self._evaluator.close()

        async def end(server: Any) -> None:
            try:
                async with asyncio.timeout(_SERVER_STOP_S + 5):
                    await server.stop.remote()
            except Exception:  # it has ended already
                return
            finally:
                ray.kill(server)

        await asyncio.gather(*map(end, self._servers))


def _delivered(engine: VllmEngine) -> Delivered:
    return Delivered(engine.sender, engine.policy_version, engine.policy_fingerprint, engine.joined)


def _on_servers(engine: Any, urls: list[str]) -> VllmSettings:
    """Engine settings for servers that were started with all that says how."""
    if not isinstance(engine, VllmSettings):
        return VllmSettings(servers=tuple(urls))
    kept = {f.name: getattr(engine, f.name) for f in fields(engine) if f.name not in OF_START}
    return VllmSettings(**kept | {"servers": tuple(urls)})
