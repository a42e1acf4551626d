"""Messages: what is said between an environment and an agent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Roles of speakers."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    An assistant message that the policy sampled carries the sampled `token_ids`; a renderer uses those as they are and
    never tokenises `content` again.
    """

    role: Role
    content: str
    token_ids: tuple[int, ...] | None = None
