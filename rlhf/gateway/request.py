"""A request and its reply, whatever wire they came over."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agents.tool_calls import ToolCall
from rlhf.data import Finish, Role
from rlhf.gateway.conversation import ChatMessage, in_call_order

#: Code of OpenAI's for a conversation that leaves no room for a reply.
CONTEXT_FULL = "context_length_exceeded"


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: four parts in one text: what, got, expected, do.
        code: for programs.
        after_s: seconds after which to ask again; None where that does not help.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request", after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.after_s = status, message, code, after_s


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request of a client.

    Attributes:
        messages: the whole history.
        tools: OpenAI's definitions of functions.
        max_tokens: that the client allows; None for as many as the recipe does.
        sampling: parameters that may break the contract of log-probs, by their name on the wire.
        stream: whether the reply goes out in pieces.
        logprobs: whether the reply says log-probs.
        options: what the wire itself has to know when it writes the reply.
        digest: of the body, by which a repeated request is known.
        instructions: put before everything, and no part of what a later request goes on from.
        previous: name of the reply that the messages go on from; empty where they are the whole history.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    logprobs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    instructions: str = ""
    previous: str = ""

    def after(self, history: Sequence[ChatMessage]) -> ChatRequest:
        """The request with the history that it goes on from, and its instructions before that, `in_call_order`."""
        first = (ChatMessage(Role.SYSTEM, self.instructions),) if self.instructions else ()
        return replace(self, messages=in_call_order((*first, *history, *self.messages)))


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token as a reply shows it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Reply of the policy, as a wire writes it.

    Attributes:
        text: without reasoning and calls.
        reasoning: inside `<think>`; empty without.
        calls: id and call of each tool called.
        finish: why it ended.
        n_prompt: tokens read.
        n_sampled: tokens sampled.
        tokens: each sampled token, for those who ask for log-probs.
    """

    text: str
    reasoning: str
    calls: tuple[tuple[str, ToolCall], ...]
    finish: Finish
    n_prompt: int
    n_sampled: int
    tokens: tuple[Token, ...] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def said(self) -> ChatMessage:
        """The reply as a message of a later request."""
        ids = tuple(f"call_{name}" for name, _ in self.calls)
        return ChatMessage(Role.ASSISTANT, self.text, tuple(call for _, call in self.calls), ids)


def digest_of(wire: str, body: Mapping[str, Any]) -> str:
    """Digest of a request's body."""
    return hashlib.sha256(json.dumps([wire, body], sort_keys=True).encode("utf-8", "replace")).hexdigest()
