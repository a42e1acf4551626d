"""Instances of an engine: those in use, their sessions, and losses and recoveries."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.errors import EngineError
from rlhf.inference.vllm.compatibility import check_fit, describe
from rlhf.inference.vllm.delivery import Deliverer
from rlhf.inference.vllm.instance import Instance, InstanceStaleError
from rlhf.inference.vllm.receivers import Receivers


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
        """Instance of a session, else the least busy one. Raises EngineError where none is left."""
        home = self._home.get(session)
        if home is not None and not home.fault:
            return home
        if not self.in_use:
            raise EngineError(
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

    async def look_after(self, max_context: int, *, is_delivered: bool) -> None:
        """Before a delivery: take back who answers again and still fits, leave out who is gone.

        Args:
            max_context: tokens that an instance must have room for.
            is_delivered: whether weights were delivered before, so that each must hold some of this sender.
        """
        for seat in self.all:
            if not await seat.instance.is_up():
                seat.fault = seat.fault or "it does not answer"
                continue
            if is_delivered and self._deliverer.version_of(await seat.instance.version()) is None:
                seat.fault = seat.fault or "it was started again"
            if seat.fault:
                await self._take_back(seat, max_context)

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
