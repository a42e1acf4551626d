"""Instances of an engine: those in use, their sessions, and losses and recoveries."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import EngineError
from rlhf.inference.vllm.compatibility import check_fit, describe
from rlhf.inference.vllm.delivery import Deliverer
from rlhf.inference.vllm.instance import Instance, InstanceDownError, InstanceStaleError, NoInstanceError
from rlhf.inference.vllm.receivers import Receivers
from rlhf.inference.vllm.server import ServerInstance

#: Seconds between two looks at whether an instance is there again.
_AGAIN_S = 0.5
#: Most seconds in which a server that is to join describes itself.
_JOIN_S = 10.0


@dataclass(eq=False)
class Replica:
    """An instance and what runs on it.

    Attributes:
        instance: that is asked.
        running: requests of it.
        fault: why it is out of use; empty while it is in use.
        has_joined: whether it joined later.
        has_left: whether it is a guest that is to take part no more.
    """

    instance: Instance
    running: set[str] = field(default_factory=set)
    fault: str = ""
    has_joined: bool = False
    has_left: bool = False


def listed(roster: Path) -> list[str]:
    """Return the addresses in a file, one a line; none where there is no file. What follows a # is a remark."""
    text = roster.read_text() if roster.is_file() else ""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line.rstrip("/") for line in lines if line]


class ReplicaSet:
    """All instances, in the order they were given.

    Args:
        instances: at least one.
        deliverer: knows which weights it gave them.
        timeout_s: most seconds for an instance to describe itself.
    """

    def __init__(self, instances: Sequence[Instance], deliverer: Deliverer, timeout_s: float) -> None:
        self.all = [Replica(instance) for instance in instances]
        self._deliverer, self._timeout_s = deliverer, timeout_s
        self._fit: tuple[Mapping[str, Any], int, int] = ({}, 0, 0)
        self._home: dict[str, Replica] = {}

    @property
    def in_use(self) -> list[Replica]:
        """Instances that can be sampled from."""
        return [replica for replica in self.all if not replica.fault]

    @property
    def faults(self) -> str:
        """Reasons why the other instances are out of use."""
        return "; ".join(f"{replica.instance.name}: {replica.fault}" for replica in self.all if replica.fault)

    async def connect(
        self, shapes: Mapping[str, Any], n_vocab: int, lora_rank: int, *, leaves_out: bool = False
    ) -> int | None:
        """The least context of all instances, which must fit a policy; see `VllmEngine.connect`.

        With `leaves_out` those that do not answer are out of use until they do; None where none does.
        """
        self._fit = (shapes, n_vocab, lora_rank)
        asked = (self._fitting(replica.instance) for replica in self.all)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for replica, answer in zip(self.all, answers, strict=True):
            if isinstance(answer, InstanceDownError) and leaves_out:
                replica.fault = f"{answer.what}: {answer.got}"
            elif isinstance(answer, BaseException):
                raise answer
        return min((answer for answer in answers if isinstance(answer, int)), default=None)

    def of(self, session: str) -> Replica:
        """Instance of a session, else the least busy one. Raises NoInstanceError where none is left."""
        home = self._home.get(session)
        if home is not None and not home.fault:
            return home
        if not self.in_use:
            raise NoInstanceError(
                "no vLLM instance is left",
                where="VllmEngine.generate",
                got=self.faults,
                hint="restart the servers: the next delivery uses them again; a local engine logs to engine.log",
            )
        replica = min(self.in_use, key=lambda s: len(s.running))
        if session:
            self._home[session] = replica
        return replica

    def leave(self, session: str) -> None:
        """Forget where a session lives."""
        self._home.pop(session, None)

    async def reconcile(self, urls: Sequence[str], max_context: int) -> None:
        """Set the joined servers, besides those given first; earlier ones that are not listed leave.

        A new one is out of use until weights are delivered to it; one that does not answer or fit is named, and tried
        again with the next call. One that leaves finishes what it runs.
        """
        joined = {replica.instance.name: replica for replica in self.all if replica.has_joined}
        known = {replica.instance.name for replica in self.all}
        for name, replica in joined.items():
            if replica.has_left is (name in urls):
                replica.has_left = not replica.has_left
                replica.fault = "it was taken off the list" if replica.has_left else "it joins again"
                warnings.warn(f"{name} {'leaves' if replica.has_left else 'joins again'}", stacklevel=2)
        new = [ServerInstance(url) for url in dict.fromkeys(urls) if url not in known]
        found = await asyncio.gather(*(self._join(instance, max_context) for instance in new))
        self.all += [replica for replica in found if replica is not None]

    async def _join(self, instance: Instance, max_context: int) -> Replica | None:
        try:
            async with asyncio.timeout(_JOIN_S):
                context = await self._fitting(instance)
            fault = "" if context >= max_context else f"its context is {context} tokens, not {max_context} or more"
        except TimeoutError:
            fault = f"nothing in {_JOIN_S:g} s"
        except (EngineError, ValueError) as error:
            fault = f"{error.what}: {error.got}" if isinstance(error, EngineError) else str(error)
        if fault:
            await instance.close()
            warnings.warn(f"{instance.name} does not join ({fault}); it is tried again later", stacklevel=2)
            return None
        warnings.warn(f"{instance.name} joins", stacklevel=2)
        return Replica(instance, fault="it joins", has_joined=True)

    async def lose(self, replica: Replica, error: EngineError) -> None:
        """Take an instance out of use, unless it still answers unchanged and only a connection broke."""
        if not replica.fault and (isinstance(error, InstanceStaleError) or not await replica.instance.is_up()):
            replica.fault = f"{error.what}: {error.got}"

    @property
    def joined(self) -> tuple[str, ...]:
        """Addresses of those that joined later and take part."""
        return tuple(replica.instance.name for replica in self.all if replica.has_joined and not replica.has_left)

    def receivers(self) -> Receivers:
        """Instances in use, as receivers of a delivery.

        Who vanishes meanwhile is out of use until a delivery finds it there again.
        """

        def lose(instance: Instance, error: EngineError) -> None:
            replica = next(replica for replica in self.all if replica.instance is instance)
            replica.fault = f"{error.what}: {error.got}"
            warnings.warn(
                f"{instance.name} was lost during a delivery of weights ({replica.fault}); the run goes on "
                "without it, and a later delivery takes it back if it is there again",
                stacklevel=2,
            )

        return Receivers([replica.instance for replica in self.in_use], lose)

    async def recover(
        self,
        max_context: int,
        *,
        is_delivered: bool,
        limit_s: float,
        delivers: bool = True,
        wait_s: float = 0.0,
        least: int = 0,
    ) -> None:
        """Use returned compatible servers again, drop lost ones; if none is left, wait for one.

        Args:
            max_context: tokens that an instance must have room for.
            is_delivered: whether weights were delivered before, so that each must hold some of this sender.
            limit_s: most seconds in which an instance says that it is up and what it holds.
            delivers: whether a delivery follows; else only who has weights of this sender is taken back.
            wait_s: most seconds to wait.
            least: oldest version of this sender's that is sampled from, where no delivery follows.

        Raises:
            TimeoutError: an instance hangs.
        """
        deadline = time.monotonic() + wait_s
        while True:
            for replica, has_weights in await self.check_health(
                is_delivered=is_delivered, limit_s=limit_s, least=least
            ):
                if replica.fault and (delivers or has_weights):
                    await self._readmit(replica, max_context)
            if self.in_use or time.monotonic() >= deadline:
                return
            await asyncio.sleep(_AGAIN_S)

    async def check_health(self, *, is_delivered: bool, limit_s: float, least: int = 0) -> list[tuple[Replica, bool]]:
        """Take out of use who is gone, was started again or missed a delivery; return who answers, and whether it fits.

        Args:
            is_delivered: whether each must have weights of this sender.
            limit_s: most seconds for an answer.
            least: oldest version of these weights.

        Raises:
            TimeoutError: an instance did not answer within `limit_s` seconds.
        """

        async def asked(instance: Instance) -> tuple[bool, str]:
            try:
                async with asyncio.timeout(limit_s):
                    is_up = await instance.is_up()
                    return is_up, await instance.version() if is_up and is_delivered else ""
            except InstanceDownError:
                return False, ""

        found = []
        present = [replica for replica in self.all if not replica.has_left]
        answers = await asyncio.gather(*(asked(replica.instance) for replica in present))
        for replica, (is_up, name) in zip(present, answers, strict=True):
            if not is_up:
                replica.fault = replica.fault or "it does not answer"
                continue
            version = self._deliverer.version_of(name)
            has_weights = version is not None and version >= least
            if is_delivered and not has_weights:
                why = "it was started again" if version is None else "it missed a delivery"
                replica.fault = replica.fault or why
            found.append((replica, has_weights))
        return found

    async def _readmit(self, replica: Replica, max_context: int) -> None:
        try:
            context = await self._fitting(replica.instance)
        except EngineError as error:
            replica.fault = f"{error.what}: {error.got}"
            return
        replica.fault = "" if context >= max_context else f"its context is {context} tokens"
        self._deliverer.forget_connections()

    async def _fitting(self, instance: Instance) -> int:
        """The context of an instance that can sample for the policy; raises EngineError for any other."""
        found = await describe(instance, self._timeout_s, self._deliverer.token)
        check_fit(instance.name, found, *self._fit)
        self._deliverer.register_instance(instance, found["token"], found["gpus"])
        return int(found["max_context"])
