"""Conversations of a session as chats, in the form that supervised stages read: `data: {path: chats.jsonl}`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhf.data import Role
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.conversation import Conversations


def chats_of(
    conversations: Conversations, agent: ExternalAgent, text_of: Callable[[Sequence[int]], str]
) -> Iterator[dict[str, Any]]:
    """Yield each conversation of a session to its last whole reply, as the policy was shown it.

    Args:
        conversations: of one session.
        agent: that told the policy of the tools, by the chat template or by the instruction.
        text_of: text of a sampled reply, thoughts and calls included.

    Yields:
        `messages`, and `tools` where the template is to show them. Replies that nobody sampled here, or that an earlier
        chat has too, have a `weight` of 0: they are not learnt.
    """
    for tools, path in conversations.paths():
        shown = agent.told([message for message, _ in path], tools)
        is_new = [False] * (len(shown) - len(path)) + [new for _, new in path]
        messages: list[dict[str, Any]] = []
        for message, new in zip(shown, is_new, strict=True):
            said = message.content if message.token_ids is None else text_of(message.token_ids)
            weight = {"weight": 0} if message.role is Role.ASSISTANT and not new else {}
            messages.append({"role": message.role.value, "content": said, **weight})
        yield {"messages": messages} | (
            {"tools": list(tools)} if tools and agent.tool_definitions == "chat_template" else {}
        )
