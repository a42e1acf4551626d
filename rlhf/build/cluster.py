"""Runs on Ray: learners as ranks of a placement group, restarted from the last checkpointed state.

The first learner starts everything else (`rlhf.build.rollout_workers`), and what it starts ends when it does. So there
is one thing to do whatever ends a learner or the controller: end the rest, and go on from the newest checkpoint, as
`rlhf train --resume` does. Rollout workers and servers come back while the learners go on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf import processes
from rlhf.asynchrony.remote import actor_errors
from rlhf.build import stopping
from rlhf.build.processes import STOP_REQUEST, StopRequest
from rlhf.build.rollout_workers import learner_log
from rlhf.errors import EngineError, RecipeError, TrainingError
from rlhf.extras import import_optional
from rlhf.inference.settings import EngineCapabilities
from rlhf.inference.vllm.instance import NoInstanceError
from rlhf.processes import ProcessError
from rlhf.recipe import Recipe, load_values
from rlhf.recipe.model import values_of
from rlhf.recipe.text import escaped
from rlhf.terminal import CleanConsole
from rlhf.training.checkpoints.store import latest

#: Most seconds until the learners have a place, and until they have heard that they are to stop.
_PLACE_S, _STOP_S = 120.0, 120.0
#: Seconds in which it is known who died, once another process says that somebody has.
_REASON_S = 10.0
#: Times that the learners are started again without having written a checkpoint meanwhile.
_MAX_RESTARTS = 3
#: Memory of Ray's store of objects where this starts it: groups on their way, not weights.
_STORE_BYTES = 200 * 2**20
#: Seconds between two looks at the learners and at what they say.
_LOOK_S = 0.5
#: Lines of Ray's own log.
_OF_RAY = re.compile(rb"\[[^\]]*\] [\w./]+\.cc:\d+")


class PlainRecipe:
    """A recipe that is sent to another process and rebuilt there, with classes from its files."""

    def __init__(self, recipe: Recipe) -> None:
        self._values, self._name, self._base = escaped(values_of(recipe)), recipe.name, recipe.base

    def made(self) -> Recipe:
        """Return the recipe."""
        return load_values(self._values, name=self._name, base=self._base)


class Learner:
    """One of the processes that train; `rlhf.build.train.train` in a thread, so that it can be told to stop."""

    def __init__(self, rank: int, n: int) -> None:
        self._rank, self._n, self._stop = rank, n, StopRequest()

    def address(self) -> tuple[str, int]:
        """Return where the others find it."""
        import ray

        return ray.util.get_node_ip_address(), processes.free_port()

    def train(
        self, plain: PlainRecipe, folder: Path, is_resumed: bool, master: tuple[str, int]
    ) -> dict[str, Any] | None:
        """Train to the end; the first one returns the result."""
        given: dict[str, object] = {
            "RANK": self._rank,
            "WORLD_SIZE": self._n,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": self._n,
        }
        given |= {"MASTER_ADDR": master[0], "MASTER_PORT": master[1]}
        os.environ |= {name: str(value) for name, value in given.items()}
        from rlhf.build.train import train

        STOP_REQUEST.set(self._stop)
        found = train(
            plain.made(),
            None if is_resumed else folder,
            resume=folder if is_resumed else None,
            on_ray=True,
        )
        return found if self._rank == 0 else None

    def stop(self) -> None:
        """Have it write a checkpoint and end; several agree on the step."""
        here = processes.current()
        if here.n > 1:
            here.stops = True
        else:
            self._stop.make()


def train_on_ray(recipe: Recipe, folder: Path, *, is_resumed: bool, console: CleanConsole) -> dict[str, Any]:
    """Train a new or resumed run on the Ray cluster of RAY_ADDRESS, or on this machine.

    Raises:
        MissingPackageError: Ray is not installed.
        RecipeError: the cluster has less than the recipe asks for.
        TrainingError: a process ended again and again.
        KeyboardInterrupt: the user stopped it; a checkpoint is written.
    """
    with stopping.heard(folder), _ray(recipe, console) as ray, _interrupted_by_term():
        n_left, before = _MAX_RESTARTS, latest(folder / "checkpoints")
        while True:
            try:
                return _once(ray, recipe, folder, is_resumed, console)
            except (ProcessError, NoInstanceError) as error:
                newest = latest(folder / "checkpoints")
                n_left = _MAX_RESTARTS if newest != before else n_left - 1
                if n_left < 0:
                    raise TrainingError(
                        "a process of the run dies at every start",
                        where=error.where,
                        got=f"{error.what}: {error.got}",
                        hint=f"rlhf train --resume {folder}, once the reason is gone",
                    ) from error
                before, is_resumed = newest, (folder / "recipe.yaml").is_file()
                console.print(f"{error.what}; going on from {newest or 'the beginning'}", highlight=False)


@contextmanager
def _interrupted_by_term() -> Iterator[None]:
    """Context in which SIGTERM is a KeyboardInterrupt, as Ctrl-C is."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _once(ray: Any, recipe: Recipe, folder: Path, is_resumed: bool, console: CleanConsole) -> dict[str, Any]:
    """Start the learners, and wait for their end. Raises ProcessError where a process ends that should not."""
    n, plain = recipe.cluster.learners, PlainRecipe(recipe)
    group = _placed(ray, n)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    kind = ray.remote(num_cpus=1, num_gpus=_gpus(ray), max_concurrency=4, scheduling_strategy=strategy)(Learner)
    learners = [kind.remote(rank, n) for rank in range(n)]
    shown = ShownLog(learner_log(folder, 0), console)
    try:
        master = ray.get(learners[0].address.remote(), timeout=_PLACE_S)
        running = {
            learner.train.remote(plain, folder, is_resumed, master): rank for rank, learner in enumerate(learners)
        }
        try:
            return _ended(ray, running, folder, shown)
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):  # one that has ended already must not hide the interrupt
                ray.get([learner.stop.remote() for learner in learners], timeout=_STOP_S)
            with contextlib.suppress(Exception):
                wait_for_end(ray, list(running), shown)
            raise
    finally:
        shown.show()
        for learner in learners:
            ray.kill(learner)
        ray.util.remove_placement_group(group)


def wait_for_end(ray: Any, running: list[Any], shown: ShownLog) -> None:
    """Wait until learners that are to stop have written their checkpoint, however long; a second Ctrl-C ends this."""
    while running:
        _, running = ray.wait(running, num_returns=len(running), timeout=_LOOK_S)
        shown.show()


def _ended(ray: Any, running: dict[Any, int], folder: Path, shown: ShownLog) -> dict[str, Any]:
    """Return the result of the first learner; of several that fail the error that is no other's silence is raised.

    Raises:
        KeyboardInterrupt: `rlhf stop` asks for the end.
    """
    from ray.exceptions import RayTaskError

    found: dict[str, Any] = {}
    silent: ProcessError | None = None
    waiting, deadline = dict(running), float("inf")
    while waiting and time.monotonic() < deadline:
        done, _ = ray.wait(list(waiting), timeout=_LOOK_S)
        shown.show()
        if stopping.is_asked(folder):
            raise KeyboardInterrupt
        for reference in done:
            rank = waiting.pop(reference)
            try:
                found = ray.get(reference) or found
            except RayTaskError as error:
                if not isinstance(error.cause, ProcessError):
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                silent = silent or error.cause
            except actor_errors() as error:
                got = str(error).splitlines()[0]
                raise ProcessError(f"learner {rank} has died", where=f"learner {rank}", got=got) from error
            if silent is not None:  # who has died is known soon
                deadline = min(deadline, time.monotonic() + _REASON_S)
    if silent is not None:
        raise silent
    return found


def _placed(ray: Any, n: int) -> Any:
    group = ray.util.placement_group([{"CPU": 1, **({"GPU": 1} if _gpus(ray) else {})}] * n, strategy="PACK")
    if not group.wait(_PLACE_S):
        ray.util.remove_placement_group(group)
        raise EngineError(
            "the cluster has no room for the learners",
            where=f"cluster.learners: {n}",
            got=f"nothing free in {_PLACE_S:g} s, of {ray.available_resources()}",
            hint="wait for other jobs to end, or request less",
        )
    return group


class ShownLog:
    """Log of a learner, shown on the console as it grows.

    Args:
        path: of the log; what it holds already is not shown.
        console: that it is shown on.
    """

    def __init__(self, path: Path, console: CleanConsole) -> None:
        self._path, self._console, self._rest = path, console, b""
        self._at = path.stat().st_size if path.is_file() else 0

    def show(self) -> None:
        """Show whole lines that came since the last call; what Ray itself says, and bars, stay in the log."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
            self._at += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                if not _OF_RAY.match(line) and b"\r" not in line:
                    self._console.print(line.decode(errors="replace"), soft_wrap=True)


def _gpus(ray: Any) -> int:
    return int(ray.cluster_resources().get("GPU", 0) > 0)


@contextmanager
def _ray(recipe: Recipe, console: CleanConsole) -> Iterator[Any]:
    """Context of a connection to Ray, which is shut down afterwards if it was started here."""
    import_optional("ray.util.scheduling_strategies", "ray", "Ray is not installed", "cluster")
    import ray

    if ray.is_initialized():
        yield ray
        return
    how: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if "RAY_ADDRESS" in os.environ:
        context = _joined(ray, os.environ["RAY_ADDRESS"], how)
    else:  # processes share the cores of this machine, however many they are
        how |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        context = ray.init(address="local", num_cpus=max(recipe.cluster.n_cpus, os.cpu_count() or 1), **how)
    logs = f"{context.address_info['session_dir']}/logs"
    console.print(f"workers and the controller write into {logs}, learners into the run's folder", soft_wrap=True)
    try:
        refuse_missing(recipe, ray.cluster_resources())
        refuse_unlabelled(recipe, ray.nodes())
        yield ray
    finally:
        ray.shutdown()


def _joined(ray: Any, address: str, how: dict[str, Any]) -> Any:
    """Connect to a cluster that runs. Raises EngineError where it does not answer, or wants another token."""
    try:
        return ray.init(address=address, **how)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(
            "the Ray cluster cannot be joined",
            where=f"RAY_ADDRESS={address}",
            got=str(error).strip().splitlines()[-1][:300],
            expected="a running cluster, and its token",
            hint="see `ray status --address ADDRESS`; set RAY_AUTH_MODE and RAY_AUTH_TOKEN as its nodes have them",
        ) from error


def needs(recipe: Recipe, n_gpus: float) -> list[tuple[str, str, int]]:
    """Return (key, resource, number) that the recipe needs of a cluster with this many GPUs."""
    cluster, each = recipe.cluster, EngineCapabilities(recipe.engine).tensor_parallel
    found = [("learners", "CPU", cluster.learners), ("servers", "CPU", cluster.servers)]
    found.append(("rollout_workers", "CPU", cluster.rollout_workers))
    if cluster.eval_servers:  # and who plays on them
        found.append(("eval_servers", "CPU", cluster.eval_servers + 1))
    if n_gpus:
        found += [("learners", "GPU", cluster.learners), ("servers", "GPU", each * cluster.servers)]
        found += [("eval_servers", "GPU", each * cluster.eval_servers)] if cluster.eval_servers else []
    return found


def refuse_missing(recipe: Recipe, resources: dict[str, float]) -> None:
    """Raise RecipeError for the first key that asks for more than a cluster has."""
    left = dict(resources)
    for key, name, need in needs(recipe, resources.get("GPU", 0)):
        have = left.get(name, 0.0)
        if need > have:
            raise RecipeError(
                "the Ray cluster has less than the run needs",
                where=f"cluster.{key}",
                got=f"{getattr(recipe.cluster, key)}, which take {need} {name}; "
                f"{have:g} of {resources.get(name, 0):g} left",
                expected=f"at least {need} {name} for them",
                hint=f"add nodes with `ray start --address ...`, or lower cluster.{key}",
            )
        left[name] = have - need


def refuse_unlabelled(recipe: Recipe, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise RecipeError where the nodes that rollout workers may be placed on have too few CPUs for them."""
    cluster, wanted = recipe.cluster, recipe.cluster.worker_labels
    need, alive = cluster.rollout_workers + (cluster.eval_servers > 0), [node for node in nodes if node["Alive"]]
    fit = [node for node in alive if wanted.items() <= node["Labels"].items()]
    have = sum(node["Resources"].get("CPU", 0.0) for node in fit)
    if not wanted or have >= need:
        return
    said = {f"{key}={value}" for node in alive for key, value in node["Labels"].items() if "ray.io/" not in key}
    raise RecipeError(
        "the Ray cluster has too few CPUs on nodes with these labels",
        where="cluster.worker_labels",
        got=f"{wanted}, of {len(fit)} nodes with {have:g} CPU; labels there are: {', '.join(sorted(said)) or 'none'}",
        expected=f"at least {need} CPU for the rollout workers",
        hint="start nodes that have the environment's packages with `ray start --labels KEY=VALUE`",
    )
