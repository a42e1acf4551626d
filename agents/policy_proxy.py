"""Policy proxy: forwards calls and inspects the replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.base import PolicyHandle, Reply
from rlhf.data import Message


@dataclass
class PolicyProxy:
    """The policy as an agent within another sees it.

    Attributes:
        policy: of the episode.
        plain: role of the calls that ask for none.
    """

    policy: PolicyHandle
    plain: str = ""

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Sample a reply; see `agents.base.PolicyHandle`."""
        reply = await self.policy.generate(messages, max_tokens=max_tokens, role=role or self.plain, tools=tools)
        return self.received(reply, messages, role, tools)

    def received(
        self, reply: Reply, messages: Sequence[Message], role: str, tools: Sequence[Mapping[str, Any]]
    ) -> Reply:
        """Reply to a call, as the inner agent is to read it; the call asked for `role`."""
        return reply

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Length of the prompt that `messages` make."""
        return self.policy.n_tokens(messages)
