"""The controller in an actor of Ray, and the rollout workers that it asks.

Ray is imported where an actor is made: nothing here needs it in a run of one process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlhf.asynchrony.admission import AdmissionLimit
from rlhf.asynchrony.controller import Controller, Counts, Job, ServersLostError, StepGroups, WorkerLostError
from rlhf.asynchrony.pipeline import Rules
from rlhf.data import ScoredGroup, Task
from rlhf.errors import EngineError, RlhfError
from rlhf.inference.vllm.instance import Load
from rlhf.inference.vllm.server import ServerInstance
from rlhf.processes import ProcessError

_WHO = "the controller"
#: Seconds between two looks at the load of the servers, and most that one takes.
_LOOK_S = 1.0
#: Seconds until a worker that is gone is asked again whether it is there.
_AGAIN_S = 0.5
#: Seconds between two questions to a worker whether it is alive, while it plays.
_PING_S = 10.0
#: Times that an evaluation is begun whose worker dies.
_MAX_EVALUATED = 3


@dataclass(frozen=True)
class Delivered:
    """Weights on the servers: their sender, version and fingerprint.

    Attributes:
        joined: addresses of servers that joined while the run went on, and hold them too.
    """

    sender: str
    version: int
    fingerprint: str
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Played:
    """Result of a rollout worker.

    Attributes:
        group: None where no server was left for some of its attempts.
        sampled: version -> tokens, those of failed attempts included.
        fault: why there is no group.
    """

    group: ScoredGroup | None
    sampled: Mapping[int, int]
    fault: str = ""


@dataclass
class RemoteWorker:
    """A rollout worker as the controller sees it: an actor that Ray starts again when it dies.

    Attributes:
        name: for messages.
        actor: with methods `play`, `evaluate`, `ready` and `alive`.
        places: groups that it plays at a time.
        limit_s: most seconds until it is there, or there again, and without a sign of life while it plays.
        weights: that it is told to sample from.
    """

    name: str
    actor: Any
    places: int
    limit_s: float
    weights: Delivered | None = None

    async def play(self, job: Job, count: Callable[[int, int], None]) -> ScoredGroup:
        """Return the group once it is over; what it sampled is known then, and not before."""
        found: Played = await self._while_alive(self.actor.play.remote(job, self.weights))
        for version, n_tokens in found.sampled.items():
            count(version, n_tokens)
        if found.group is None:
            raise ServersLostError("no server had the weights", where=self.name, got=found.fault)
        return found.group

    async def evaluate(self, weights: Delivered) -> Any:
        """Return what an evaluation by `weights` finds; it is begun again where the worker dies meanwhile.

        Raises:
            EngineError: the worker does not come back, or no server has the weights any more.
        """
        for n_left in reversed(range(_MAX_EVALUATED)):
            await self.wait_ready()
            try:
                return await self._while_alive(self.actor.evaluate.remote(weights))
            except WorkerLostError as error:
                if not n_left:
                    got = f"{_MAX_EVALUATED} times; the last time: {error.what}: {error.got}"
                    raise EngineError("it dies at every evaluation", where=self.name, got=got) from error

    async def _while_alive(self, call: Any) -> Any:
        """Return the answer to a call, however long it takes, while the worker shows signs of life.

        Raises:
            WorkerLostError: it has died, or shows none for `limit_s` seconds: then its process is killed. Ray starts
                another.
        """
        answer, heard = asyncio.ensure_future(answered(call)), time.monotonic()
        try:
            while not (await asyncio.wait([answer], timeout=_PING_S))[0]:
                with suppress(TimeoutError, *actor_errors()):  # a worker that has died fails `answer` itself
                    async with asyncio.timeout(self.limit_s):
                        await answered(self.actor.alive.remote())
                        heard = time.monotonic()
                if time.monotonic() - heard >= self.limit_s and not answer.done():
                    await asyncio.to_thread(_kill, self.actor)
                    got = f"nothing in {self.limit_s:g} s"
                    raise WorkerLostError("a rollout worker does not respond", where=self.name, got=got)
            return await answer
        except actor_errors() as error:
            first = str(error).splitlines()[0]
            raise WorkerLostError("a rollout worker has died", where=self.name, got=first) from error
        finally:
            answer.cancel()

    async def wait_ready(self) -> None:
        """Wait until it is there. Raises EngineError where it is not in time."""
        try:
            async with asyncio.timeout(self.limit_s):
                while True:
                    try:
                        await answered(self.actor.ready.remote())
                        return
                    except actor_errors() as error:
                        if "creation task" in str(error):
                            raise self._unbegun(error) from error
                        await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise EngineError(
                "a rollout worker did not restart",
                where=self.name,
                got=f"nothing in {self.limit_s:g} s",
                hint="read `ray logs`, and check whether a node was lost",
            ) from None

    def _unbegun(self, error: Exception) -> EngineError:
        *_, last = (line for line in str(error).splitlines() if line.strip())
        hint = "install on its node what the recipe's environment, agent and rewards need"
        return EngineError("a rollout worker cannot start", where=self.name, got=last.strip(), hint=hint)


class ControllerActor:
    """A `Controller` in a process of its own; the methods of both are the same.

    Args:
        rules: of the stage.
        workers: the rollout workers.
        most: groups at a time, of all workers together.
        servers: addresses, whose load limits how many of these there are.
    """

    def __init__(self, rules: Rules, workers: Sequence[RemoteWorker], most: int, servers: Sequence[str]) -> None:
        self.workers, n = list(workers), rules.n_per_step
        self.controller = Controller(rules, slice(0, n), n, self.workers, AdmissionLimit(most))
        self._given = tuple(servers)
        self._servers = {url: ServerInstance(url, connect_timeout_s=_LOOK_S) for url in servers}
        self._watching: asyncio.Task[None] | None = None

    async def call(self, name: str, *given: Any, **how: Any) -> Any:
        """Call a method of the controller."""
        found = getattr(self.controller, name)(*given, **how)
        return await found if asyncio.iscoroutine(found) else found

    async def ready(self) -> None:
        """Return once every worker is there."""
        await asyncio.gather(*(worker.wait_ready() for worker in self.workers))
        self._watching = self._watching or asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Report the load of the servers to the controller, once a second; one that does not answer is left out."""
        while True:
            await asyncio.sleep(_LOOK_S)
            found = await asyncio.gather(*(self._load_of(server) for server in self._servers.values()))
            self.controller.observe([load for load in found if load is not None])

    async def _load_of(self, server: ServerInstance) -> Load | None:
        try:
            async with asyncio.timeout(_LOOK_S):
                return await server.load()
        except (EngineError, TimeoutError):
            return None

    async def tell(self, weights: Delivered) -> None:
        """Have groups that begin from now on sampled from `weights`."""
        for worker in self.workers:
            worker.weights = weights
        for url in set(self._servers) - {*self._given, *weights.joined}:
            await self._servers.pop(url).close()
        for url in set(weights.joined) - set(self._servers):
            self._servers[url] = ServerInstance(url, connect_timeout_s=_LOOK_S)


@dataclass
class RemoteController:
    """A controller in an actor, as the first learner sees it.

    Attributes:
        actor: a `ControllerActor`.
        delivered: says what the servers hold now.
        actors: of the workers.
        limit_s: most seconds until it answers, its start included.
    """

    actor: Any
    delivered: Callable[[], Delivered]
    actors: Sequence[Any] = ()
    limit_s: float = 600.0

    def snapshot(self) -> tuple[dict[str, Any], dict[int, ScoredGroup]]:
        """See `Controller.snapshot`."""
        found: tuple[dict[str, Any], dict[int, ScoredGroup]] = self._get("snapshot")
        return found

    def restore(self, state: Mapping[str, Any], groups: Mapping[int, ScoredGroup], n_controllers: int) -> None:
        """See `Controller.restore`."""
        self._get("restore", state, groups, n_controllers)

    async def open(self, version: int) -> None:
        """See `Controller.open`; all workers are there when this returns."""
        await self._answer("ready", self.actor.ready.remote(), 2 * self.limit_s)  # workers have a limit of their own
        await self._answer("tell", self.actor.tell.remote(self.delivered()))
        await self._call("open", version)

    async def offer(self, tasks: Mapping[int, Sequence[Task]]) -> None:
        """See `Controller.offer`."""
        await self._call("offer", tasks)

    async def hold(self) -> None:
        """See `Controller.hold`."""
        await self._call("hold")

    async def due(self, wait_s: float) -> StepGroups | str:
        """See `Controller.due`."""
        found: StepGroups | str = await self._call("due", wait_s)
        return found

    async def may_install(self, wait_s: float) -> bool | str:
        """See `Controller.may_install`."""
        found: bool | str = await self._call("may_install", wait_s)
        return found

    async def is_drained(self, wait_s: float) -> bool | str:
        """See `Controller.is_drained`."""
        found: bool | str = await self._call("is_drained", wait_s)
        return found

    async def train(self, ordinals: Sequence[int]) -> int:
        """See `Controller.train`."""
        found: int = await self._call("train", ordinals)
        return found

    async def install(self, version: int) -> None:
        """See `Controller.install`; groups that begin afterwards know the servers' versions."""
        await self._answer("tell", self.actor.tell.remote(self.delivered()))
        await self._call("install", version)

    async def counts(self) -> Counts:
        """See `Controller.counts`."""
        found: Counts = await self._call("counts")
        return found

    async def close(self) -> None:
        """End the actor and its workers."""
        import ray

        for actor in (self.actor, *self.actors):
            ray.kill(actor)

    def _get(self, name: str, *given: Any) -> Any:
        """Call while the event loop stands still."""
        import ray

        try:
            with _told(_WHO):
                return ray.get(self.actor.call.remote(name, *given), timeout=self.limit_s)
        except ray.exceptions.GetTimeoutError:
            raise self._silence(name) from None

    async def _call(self, name: str, *given: Any, **how: Any) -> Any:
        return await self._answer(name, self.actor.call.remote(name, *given, **how))

    async def _answer(self, name: str, call: Any, limit_s: float | None = None) -> Any:
        try:
            async with asyncio.timeout(limit_s or self.limit_s):
                return await answered(call, _WHO)
        except TimeoutError:
            raise self._silence(name, limit_s) from None

    def _silence(self, name: str, limit_s: float | None = None) -> EngineError:
        got = f"nothing in {limit_s or self.limit_s:g} s"
        return EngineError("the controller does not answer", where=f"controller.{name}", got=got)


def _kill(actor: Any) -> None:
    """End the process of an actor that Ray starts again."""
    import ray

    ray.kill(actor, no_restart=False)


def actor_errors() -> tuple[type[Exception], ...]:
    """Errors by which Ray says that an actor is gone, for want of memory too, which is no RayActorError."""
    from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError

    return RayActorError, ObjectLostError, OutOfMemoryError


@contextmanager
def _told(who: str = "") -> Iterator[None]:
    """Context that raises an actor's error as it was, and says where the actor `who` has ended."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise EngineError(
            "Ray's object store has no room for the groups in transit",
            where="Ray's object store",
            got=str(error).splitlines()[0],
            hint="free the disk of RAY_TMPDIR, or give more: ray start --object-store-memory BYTES",
        ) from error
    except RayTaskError as error:
        if isinstance(cause := error.cause, RlhfError):
            raise cause from error
        raise
    except actor_errors() as error:
        if not who:
            raise
        raise ProcessError(f"{who} has died", where=who, got=str(error).splitlines()[0]) from error


async def answered(reference: Any, who: str = "") -> Any:
    """Return what an actor answers; what it raised is raised as it was."""
    with _told(who):
        return await reference
