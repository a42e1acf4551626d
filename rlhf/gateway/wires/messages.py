"""Anthropic's messages: `/v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data import Finish, Role
from rlhf.gateway.conversation import ChatMessage
from rlhf.gateway.request import ChatReply, ChatRequest, Refusal, digest_of
from rlhf.gateway.wires.parts import call_in, event, given, listed, pieces, text_in, tool, whole, wrong

_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (1,), "top_k": (0,), "stop_sequences": ([],), "tool_choice": ({"type": "auto"},),
}  # fmt: skip
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request. Raises Refusal."""
    system = text_in(body.get("system"), "system")
    said = [ChatMessage(Role.SYSTEM, system)] if system else []
    for i, message in enumerate(listed(body, "messages", needed=True)):
        said += _message(message, f"messages[{i}]")
    thinking = body.get("thinking") or {}
    return ChatRequest(
        messages=tuple(said),
        tools=tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(listed(body, "tools"))),
        max_tokens=whole(body, "max_tokens"),
        sampling=given(body, _SAMPLING),
        stream=bool(body.get("stream")),
        options={
            "model": str(body.get("model") or "policy"),
            "thinking": thinking.get("type") in ("enabled", "adaptive"),
        },
        digest=digest_of("messages", body),
    )


def _message(message: Mapping[str, Any], where: str) -> list[ChatMessage]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", role, "user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(message, "content")
    if role == "assistant":
        return [_reply(blocks, where)]
    found: list[ChatMessage] = []
    texts: list[Any] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            text = text_in(block.get("content"), f"{where}.content[{i}].content")
            found.append(ChatMessage(Role.TOOL, text, ids=(block.get("tool_use_id"),)))
        else:
            texts.append(block)
    if texts or not found:
        found.append(ChatMessage(Role.SYSTEM if role == "system" else Role.USER, text_in(texts, f"{where}.content")))
    return found


def _reply(blocks: list[Any], where: str) -> ChatMessage:
    """A reply in the history, without its thinking."""
    texts, calls, ids = [], [], []
    for i, block in enumerate(blocks):
        kind, at = block.get("type"), f"{where}.content[{i}]"
        if kind == "tool_use":
            calls.append(call_in(block.get("name"), block.get("input"), at))
            ids.append(block.get("id"))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_in([block], at))
    return ChatMessage(Role.ASSISTANT, "\n".join(texts), tuple(calls), tuple(ids))


def _tool(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    if found.get("type", "custom") != "custom":
        raise wrong(where, found.get("type"), "a tool of one's own", "run other tools in the agent's own program")
    return tool(found.get("name"), found.get("description"), found.get("input_schema"), where)


def reply(answered: ChatReply, asked: ChatRequest) -> dict[str, Any]:
    """The body of a reply."""
    usage = {"input_tokens": answered.n_prompt, "output_tokens": answered.n_sampled}
    return {
        **_head(answered, asked),
        "content": list(_blocks(answered, asked)),
        "stop_reason": _stop(answered),
        "usage": usage,
    }


def _head(answered: ChatReply, asked: ChatRequest) -> dict[str, Any]:
    head = {"id": f"msg_{answered.id}", "type": "message", "role": "assistant", "model": asked.options.get("model")}
    return {**head, "stop_sequence": None}


def _stop(answered: ChatReply) -> str:
    if answered.finish is Finish.LENGTH:
        return "max_tokens"
    return "tool_use" if answered.calls else "end_turn"


def _blocks(answered: ChatReply, asked: ChatRequest) -> Iterator[dict[str, Any]]:
    if answered.reasoning and asked.options.get("thinking"):
        yield {"type": "thinking", "thinking": answered.reasoning, "signature": ""}
    if answered.text:
        yield {"type": "text", "text": answered.text}
    for name, call in answered.calls:
        yield {"type": "tool_use", "id": f"toolu_{name}", "name": call.name, "input": call.arguments}


def stream(answered: ChatReply, asked: ChatRequest) -> Iterator[str]:
    """The events of a reply in pieces."""
    for kind, data in _events(answered, asked):
        yield event({"type": kind, **data}, kind)


def _events(answered: ChatReply, asked: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {"input_tokens": answered.n_prompt, "output_tokens": 0}
    message = {**_head(answered, asked), "content": [], "stop_reason": None, "usage": usage}
    yield "message_start", {"message": message}
    for index, block in enumerate(_blocks(answered, asked)):
        name, kind, text, empty = _in_pieces(block, answered)
        yield "content_block_start", {"index": index, "content_block": {**block, **empty}}
        for piece in pieces(text):
            yield "content_block_delta", {"index": index, "delta": {"type": kind, name: piece}}
        yield "content_block_stop", {"index": index}
    ended = {"stop_reason": _stop(answered), "stop_sequence": None}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": answered.n_sampled}}
    yield "message_stop", {}


def _in_pieces(block: Mapping[str, Any], answered: ChatReply) -> tuple[str, str, str, dict[str, Any]]:
    """Name and kind of what a block's pieces are, their text, and the block's fields while it is empty."""
    if block["type"] == "tool_use":
        call = next(call for name, call in answered.calls if f"toolu_{name}" == block["id"])
        return "partial_json", "input_json_delta", call.json_arguments, {"input": {}}
    name = str(block["type"])
    return name, f"{name}_delta", str(block[name]), {name: ""}


def error(refusal: Refusal) -> dict[str, Any]:
    """The body of a refusal."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}
