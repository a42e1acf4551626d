"""A model behind an OpenAI-compatible address, as a rollout engine: text goes out, text comes back.

Tools that a prompt has go out as the wire's own, and calls of them come back as text in the style that the agent reads.
What stays refused is an EngineError: the attempt is an error of a part, and never a failure of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from agents.tool_calls import Style, ToolCall, write_calls
from rlhf.chat_api import KEY, ChatServer, RetryableError, RetryPolicy, first_choice
from rlhf.data import Finish, Generation, Prompt, Role, SamplingParams
from rlhf.evaluation.baselines import MessageIdRenderer, StubEngine

__all__ = ["KEY", "EndpointEngine", "RetryPolicy"]

_SEEDS = 1 << 31


class EndpointEngine(StubEngine):
    """An engine that sends messages to `url` and takes the reply of `model`.

    Args:
        url: of the server, with or without /v1, such as http://127.0.0.1:8000 or https://host/v1.
        model: as the server names it.
        renderer: that the prompts were made with.
        patience: with a server in trouble.
        style: how calls of tools are written in a reply.
    """

    def __init__(
        self,
        url: str,
        model: str,
        renderer: MessageIdRenderer,
        patience: RetryPolicy | None = None,
        style: Style = "hermes",
    ) -> None:
        self.server, self.renderer, self._style = ChatServer(url, model, patience), renderer, style
        self._calls: dict[int, Mapping[str, Any]] = {}

    @property
    def n_tokens(self) -> tuple[int, int]:
        """(read, sampled) so far, as the server counts them."""
        return self.server.n_tokens

    @property
    def n_refused(self) -> int:
        """Requests that had to be asked again."""
        return self.server.n_refused

    @property
    def last_refusal(self) -> str:
        """Why the last of them had to be."""
        return self.server.last_refusal

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Ask once, and again where that may help.

        Raises:
            ContextFull: the server says that the messages are too long.
            EngineError: the server refuses for good, or was asked too often.
        """

        def read(answer: Any) -> Generation:
            content, reason, choice = first_choice(answer)
            if reason == "content_filter":
                raise RetryableError("the server's content filter withheld the reply (finish_reason content_filter)")
            calls = choice["message"].get("tool_calls") or ()
            text = "\n".join(filter(None, [content, self._written(calls)]))
            ids = self.renderer.encode_reply(text)
            if calls:
                self._calls[ids[0]] = {"role": "assistant", "content": content or None, "tool_calls": calls}
            finish = Finish.LENGTH if reason == "length" else Finish.STOP
            return Generation(prompt, ids, (0.0,) * len(ids), finish, 0, usage=_usage(answer.get("usage")))

        return await self.server.complete(self._body(prompt, params), read, seed=params.seed)

    async def close(self) -> None:
        """Close the connections."""
        await self.server.close()

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        tools = self.renderer.tools(prompt.token_ids)
        body: dict[str, Any] = {
            "messages": list(self._messages(prompt.token_ids[bool(tools) :])),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed % _SEEDS,
        }
        if tools:
            body["tools"] = list(tools)
        if params.top_p < 1:
            body["top_p"] = params.top_p
        if params.top_k:
            body["top_k"] = params.top_k  # no key of OpenAI's own; a server that does not know it refuses
        if params.stop_strings:
            body["stop"] = list(params.stop_strings)
        return body

    def _messages(self, ids: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """Messages of a prompt, with the calls of its replies and what they returned as the server knows them.

        Servers refuse calls without a result each. Where an agent told of several in one message, or refused a call,
        the reply is sent as its text, and what follows is the user's.
        """
        waiting: list[str] = []
        messages = self.renderer.messages(ids)
        for at, (i, message) in enumerate(zip(ids, messages, strict=True), start=1):
            said = self._calls.get(i) if message.role is Role.ASSISTANT else None
            results = takewhile(lambda m: m.role is Role.TOOL, islice(messages, at, None))
            if said is not None and len(said["tool_calls"]) == len(list(results)):
                waiting = [str(call.get("id", "")) for call in said["tool_calls"]]
                yield said
            elif message.role is Role.TOOL and waiting:
                yield {"role": "tool", "tool_call_id": waiting.pop(0), "content": message.content}
            else:
                role = Role.USER if message.role is Role.TOOL else message.role
                yield {"role": role.value, "content": message.content}

    def _written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls in the agent's style; those that cannot be read stay as they came, for the agent to say so."""
        try:
            functions = [call["function"] for call in calls]
            read = [ToolCall(str(f["name"]), json.loads(f.get("arguments") or "{}")) for f in functions]
            return write_calls(read, self._style) if read else ""
        except (KeyError, TypeError, ValueError):
            return json.dumps(list(calls))


def _usage(said: Any) -> tuple[int, int] | None:
    """Tokens (read, sampled) as the server counted them; None where it says nothing that can be read."""
    if not isinstance(said, dict):
        return None
    read, sampled = (said.get(name) for name in ("prompt_tokens", "completion_tokens"))
    return (read, sampled) if isinstance(read, int) and isinstance(sampled, int) else None
