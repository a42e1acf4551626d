"""Instances of an engine: those in use, their sessions, and losses and recoveries."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.errors import EngineError
from rlhf.inference.vllm.compatibility import check_fit, describe
from rlhf.inference.vllm.delivery import Deliverer
from rlhf.inference.vllm.instance import Instance, InstanceDownError, InstanceStaleError, NoInstanceError
from rlhf.inference.vllm.receivers import Receivers

#: Seconds between two looks at whether an instance is there again.
_AGAIN_S = 0.5


@dataclass(eq=False)
class Replica:
    """An instance and what runs on it. `fault` says why it is out of use; empty while it is in use."""

    instance: Instance
    running: set[str] = field(default_factory=set)
    fault: str = ""


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
        self.n_refused = 0  # calls that no instance was left for

    @property
    def in_use(self) -> list[Replica]:
        """Instances that can be sampled from."""
        return [seat for seat in self.all if not seat.fault]

    @property
    def faults(self) -> str:
        """Reasons why the other instances are out of use."""
        return "; ".join(f"{seat.instance.name}: {seat.fault}" for seat in self.all if seat.fault)

    async def connect(self, shapes: Mapping[str, Any], n_vocab: int, lora_rank: int) -> int:
        """The least context of all instances, which must fit a policy; see `VllmEngine.connect`."""
        self._fit = (shapes, n_vocab, lora_rank)
        return min([await self._fitting(seat.instance) for seat in self.all])

    def of(self, session: str) -> Replica:
        """Instance of a session, else the least busy one. Raises NoInstanceError where none is left."""
        home = self._home.get(session)
        if home is not None and not home.fault:
            return home
        if not self.in_use:
            self.n_refused += 1
            raise NoInstanceError(
                "no vLLM instance is left",
                where="VllmEngine.generate",
                got=self.faults,
                hint="start servers again, a delivery takes them back; of an engine of one's own see engine.log",
            )
        seat = min(self.in_use, key=lambda s: len(s.running))
        if session:
            self._home[session] = seat
        return seat

    def leave(self, session: str) -> None:
        """Forget where a session lives."""
        self._home.pop(session, None)

    async def lose(self, seat: Replica, error: EngineError) -> None:
        """Take an instance out of use, unless it still answers unchanged and only a connection broke."""
        if not seat.fault and (isinstance(error, InstanceStaleError) or not await seat.instance.is_up()):
            seat.fault = f"{error.what}: {error.got}"

    def receivers(self) -> Receivers:
        """Instances in use, as receivers of a delivery.

        Who vanishes meanwhile is out of use until a delivery finds it there again.
        """

        def lose(instance: Instance, error: EngineError) -> None:
            seat = next(seat for seat in self.all if seat.instance is instance)
            seat.fault = f"{error.what}: {error.got}"
            warnings.warn(
                f"{instance.name} vanished while weights were delivered to it ({seat.fault}); the run goes on without "
                "it, and a later delivery takes it back if it is there again",
                stacklevel=2,
            )

        return Receivers([seat.instance for seat in self.in_use], lose)

    async def look_after(
        self, max_context: int, *, is_delivered: bool, limit_s: float, delivers: bool = True, wait_s: float = 0.0
    ) -> None:
        """Take back who answers again and still fits, leave out who is gone; where nobody is left, wait for one.

        Args:
            max_context: tokens that an instance must have room for.
            is_delivered: whether weights were delivered before, so that each must hold some of this sender.
            limit_s: most seconds in which an instance says that it is up and what it holds.
            delivers: whether a delivery follows; else only who has weights of this sender is taken back.
            wait_s: most seconds to wait.

        Raises:
            TimeoutError: an instance hangs.
        """
        deadline = time.monotonic() + wait_s
        while True:
            for seat, has_weights in await self.judge(is_delivered=is_delivered, limit_s=limit_s):
                if seat.fault and (delivers or has_weights):
                    await self._take_back(seat, max_context)
            if self.in_use or time.monotonic() >= deadline:
                return
            await asyncio.sleep(_AGAIN_S)

    async def judge(self, *, is_delivered: bool, limit_s: float) -> list[tuple[Replica, bool]]:
        """Take out of use who is gone or was started again; return who answers, and whether it has this sender's.

        Raises:
            TimeoutError: an instance did not answer within `limit_s` seconds.
        """
        found = []
        for seat in self.all:
            try:
                async with asyncio.timeout(limit_s):
                    is_up, name = await seat.instance.is_up(), ""
                    if is_up and is_delivered:
                        name = await seat.instance.version()
            except InstanceDownError:
                is_up = False
            if not is_up:
                seat.fault = seat.fault or "it does not answer"
                continue
            has_weights = self._deliverer.version_of(name) is not None
            if is_delivered and not has_weights:
                seat.fault = seat.fault or "it was started again"
            found.append((seat, has_weights))
        return found

    async def _take_back(self, seat: Replica, max_context: int) -> None:
        try:
            context = await self._fitting(seat.instance)
        except EngineError as error:
            seat.fault = f"{error.what}: {error.got}"
            return
        seat.fault = "" if context >= max_context else f"its context is {context} tokens"
        self._deliverer.forget_connections()

    async def _fitting(self, instance: Instance) -> int:
        """The context of an instance that can sample for the policy; raises EngineError for any other."""
        found = await describe(instance, self._timeout_s, self._deliverer.token)
        check_fit(instance.name, found, *self._fit)
        self._deliverer.meet(instance, found["token"], found["gpu"])
        return int(found["max_context"])
