"""Engines of processes that sample from the same servers: one of them delivers, the others follow it.

Whoever delivers names the weights; the others learn the name, and refuse tokens of weights that it did not deliver.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
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
        await asyncio.to_thread(current().from_main, (self.sender, self._fingerprint), _WHAT)


class FollowingEngine(VllmEngine):
    """An engine over servers that another process delivers to."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._max_aborts = math.inf  # an abort is the other's update; the time of a call is limited all the same

    async def load(self, weights: PolicyWeights) -> None:
        """Give the first process this one's pieces of the weights, and hear what it has delivered."""

        def share() -> tuple[str, str]:
            if weights.parameters is not None:
                deque(weights.parameters(), maxlen=0)
            return current().from_main(("", ""), _WHAT)

        sender, fingerprint = await asyncio.to_thread(share)
        await self.follow(sender, weights.version, fingerprint)

    async def follow(self, sender: str, version: int, fingerprint: str) -> None:
        """Sample from weights that `sender` has delivered. Servers that were lost and have them now are taken back."""
        self._deliverer.sender, self._fingerprint = sender, fingerprint
        await self._seats.look_after(
            self._max_context, is_delivered=True, limit_s=self._delivery_timeout_s, delivers=False
        )
        self._begin(version)

    async def found(self, wait_s: float) -> None:
        """Return once a server has the weights that this follows. Raises NoInstanceError after `wait_s`."""
        if self._fingerprint and not self._seats.in_use:
            await self._seats.look_after(
                self._max_context,
                is_delivered=True,
                limit_s=self._delivery_timeout_s,
                delivers=False,
                wait_s=wait_s,
            )
            self._seats.of("")
