"""Engines of several processes on the same servers: the first delivers weights, the others follow.

The leader names the weights; the followers learn the name, and refuse tokens of weights that it did not deliver.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from rlhf.data import PolicyWeights
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.processes import current

_WHAT = "a delivery to the servers"


class LeadingEngine(VllmEngine):
    """The engine of the first of several processes, which delivers for all."""

    async def load(self, weights: PolicyWeights) -> None:
        """Deliver, and tell the others."""
        await super().load(weights)
        await asyncio.to_thread(current().from_main, (self.sender, self.policy_fingerprint, self.joined), _WHAT)


class FollowingEngine(VllmEngine):
    """An engine over servers that another process delivers to."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._max_aborts = math.inf  # an abort is the other's update; the time of a call is limited all the same

    async def load(self, weights: PolicyWeights) -> None:
        """Give the first process this one's pieces of the weights, and hear what it has delivered."""

        def share() -> tuple[str, str, Sequence[str]]:
            if weights.parameters is not None:
                deque(weights.parameters(), maxlen=0)
            return current().from_main(("", "", ()), _WHAT)

        sender, fingerprint, joined = await asyncio.to_thread(share)
        await self.follow(sender, weights.version, fingerprint, joined)

    async def follow(self, sender: str, version: int, fingerprint: str, joined: Sequence[str] = ()) -> None:
        """Sample from weights that `sender` has delivered. Servers that were lost and have them now are taken back.

        Args:
            sender: what its names of weights begin with.
            version: of the weights.
            fingerprint: of the weights.
            joined: addresses of servers that take part beside those given.
        """
        self._deliverer.sender, self.policy_fingerprint = sender, fingerprint
        await self._replicas.reconcile(joined, self.max_context)
        await self._replicas.recover(
            self.max_context, is_delivered=True, limit_s=self._delivery_timeout_s, delivers=False, least=version
        )
        self._begin(version)

    async def found(self, wait_s: float) -> None:
        """Return once a server has the weights that this follows. Raises NoInstanceError after `wait_s`."""
        if self.policy_fingerprint and not self._replicas.in_use:
            await self._replicas.recover(
                self.max_context,
                is_delivered=True,
                limit_s=self._delivery_timeout_s,
                delivers=False,
                wait_s=wait_s,
                least=self.policy_version,
            )
            self._replicas.of("")
