"""OpenAI's responses: `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data import Finish, Role
from rlhf.gateway.conversation import ChatMessage
from rlhf.gateway.request import ChatReply, ChatRequest, Refusal, digest_of
from rlhf.gateway.wires.parts import call_in, event, given, listed, pieces, text_in, tool, whole, wrong

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_TEXTS = ("input_text", "output_text", "text", "refusal")
_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (1,), "tool_choice": ("auto",), "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "text": tuple(
        {**form, **length} for form in ({}, {"format": {"type": "text"}}) for length in ({}, {"verbosity": "medium"})
    ),
}  # fmt: skip
_UNKNOWN = ("background", "conversation", "prompt")
_LOGPROBS = "message.output_text.logprobs"


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request. Raises Refusal."""
    for name in _UNKNOWN:
        if body.get(name):
            raise Refusal(400, f"{name} is not served here. Do: leave it out, and send the history as input.")
    given_ = body.get("input")
    items = [{"role": "user", "content": given_}] if isinstance(given_, str) else listed(body, "input", needed=True)
    instructions = text_in(body.get("instructions"), "instructions")
    return ChatRequest(
        messages=tuple(_messages(items)),
        tools=tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(listed(body, "tools"))),
        max_tokens=whole(body, "max_output_tokens"),
        sampling=given(body, _SAMPLING),
        stream=bool(body.get("stream")),
        logprobs=_LOGPROBS in (body.get("include") or ()),
        options={"model": str(body.get("model") or "policy"), "tools": body.get("tools") or []},
        digest=digest_of("responses", body),
        instructions=instructions,
        previous=str(body.get("previous_response_id") or ""),
    )


def _messages(items: list[Any]) -> Iterator[ChatMessage]:
    """Messages of a list of items: text and calls that follow each other are one reply, and reasoning is left out."""
    texts: list[str] = []
    calls: list[Any] = []
    ids: list[Any] = []
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type") or "message"
        if kind == "reasoning":
            continue
        if kind == "function_call":
            calls.append(call_in(item.get("name"), item.get("arguments"), where))
            ids.append(item.get("call_id"))
            continue
        if kind == "message" and item.get("role") == "assistant":
            texts.append(text_in(item.get("content"), f"{where}.content", _TEXTS))
            continue
        if texts or calls:
            yield ChatMessage(Role.ASSISTANT, "\n".join(texts), tuple(calls), tuple(ids))
            texts, calls, ids = [], [], []
        if kind == "function_call_output":
            yield ChatMessage(
                Role.TOOL, text_in(item.get("output"), f"{where}.output", _TEXTS), ids=(item.get("call_id"),)
            )
        elif kind == "message" and item.get("role") in _ROLES:
            yield ChatMessage(_ROLES[item["role"]], text_in(item.get("content"), f"{where}.content", _TEXTS))
        else:
            expected = "message, function_call, function_call_output or reasoning"
            raise wrong(where, f"type {kind!r}, role {item.get('role')!r}", expected)
    if texts or calls:
        yield ChatMessage(Role.ASSISTANT, "\n".join(texts), tuple(calls), tuple(ids))


def _tool(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    if found.get("type") != "function":
        raise wrong(where, found.get("type"), "a tool of type function", "run other tools in the agent's own program")
    return tool(found.get("name"), found.get("description"), found.get("parameters"), where)


def reply(answered: ChatReply, asked: ChatRequest) -> dict[str, Any]:
    """The body of a reply."""
    return _response(answered, asked, list(_items(answered, asked)))


def _response(answered: ChatReply, asked: ChatRequest, output: list[Any], status: str = "") -> dict[str, Any]:
    was_cut = answered.finish is Finish.LENGTH
    read_, said = answered.n_prompt, answered.n_sampled
    usage = {
        "input_tokens": read_, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read_ + said,
    }  # fmt: skip
    return {
        "id": id_of(answered), "object": "response", "created_at": answered.created,
        "status": status or ("incomplete" if was_cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut and not status else None,
        "model": asked.options.get("model", "policy"), "output": output, "error": None, "metadata": {},
        "instructions": asked.instructions or None, "tool_choice": "auto",
        "parallel_tool_calls": asked.sampling.get("parallel_tool_calls", True),
        "tools": asked.options.get("tools", []), "previous_response_id": asked.previous or None,
        "usage": None if status else usage,
    }  # fmt: skip


def id_of(answered: ChatReply) -> str:
    """Id with which a later request continues from this reply."""
    return f"resp_{answered.id}"


def _items(answered: ChatReply, asked: ChatRequest) -> Iterator[dict[str, Any]]:
    if answered.reasoning:
        thought = [{"type": "reasoning_text", "text": answered.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{answered.id}", "summary": [], "content": thought}
    if answered.text or not answered.calls:
        logprobs = [
            {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []}
            for t in answered.tokens
        ]
        part = {"type": "output_text", "text": answered.text, "annotations": [], "logprobs": logprobs}
        status = "incomplete" if answered.finish is Finish.LENGTH else "completed"
        yield {
            "type": "message", "id": f"msg_{answered.id}", "role": "assistant", "status": status, "content": [part],
        }  # fmt: skip
    for name, call in answered.calls:
        yield {
            "type": "function_call", "id": f"fc_{answered.id}_{name}", "call_id": f"call_{name}", "name": call.name,
            "arguments": call.json_arguments, "status": "completed",
        }  # fmt: skip


def stream(answered: ChatReply, asked: ChatRequest) -> Iterator[str]:
    """The events of a reply in pieces."""
    for number, (kind, data) in enumerate(_events(answered, asked)):
        yield event({"type": kind, "sequence_number": number, **data}, kind)


def _events(answered: ChatReply, asked: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(answered, asked, [], "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    whole_ = reply(answered, asked)
    for index, item in enumerate(whole_["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {
            key: [] if key == "content" else "" if key == "arguments" else value for key, value in item.items()
        }
        yield "response.output_item.added", {"output_index": index, "item": {**empty, "status": "in_progress"}}
        if item["type"] == "message":
            yield from _text_events(item["content"][0], {**at, "content_index": 0})
        elif item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {**at, "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole_['status']}", {"response": whole_}


def _text_events(part: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
    yield "response.content_part.done", {**at, "part": part}
