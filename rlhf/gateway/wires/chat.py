"""OpenAI's chat completions: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data import Finish, Role
from rlhf.gateway.conversation import ChatMessage
from rlhf.gateway.request import ChatReply, ChatRequest, Refusal, digest_of
from rlhf.gateway.wires.parts import call_in, event, given, listed, pieces, text_in, tool, whole, wrong

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "tool": Role.TOOL}
#: Parameters that change what is sampled from, each with the values at which it does not.
_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "n": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "stop": ([], ""),
    "response_format": ({"type": "text"},), "tool_choice": ("auto",), "top_logprobs": (0,), "guided_json": (),
    "prediction": (), "modalities": (["text"],), "audio": (), "parallel_tool_calls": (True,),
}  # fmt: skip


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request. Raises Refusal."""
    if body.get("functions") or body.get("function_call"):
        raise Refusal(400, "functions is the form of 2023. Expected: tools. Do: send tools.")
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(listed(body, "messages", needed=True))),
        tools=tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(listed(body, "tools"))),
        max_tokens=whole(body, "max_completion_tokens", "max_tokens"),
        sampling=given(body, _SAMPLING),
        stream=bool(body.get("stream")),
        logprobs=bool(body.get("logprobs")),
        options={"usage": bool(options.get("include_usage")), "model": str(body.get("model") or "policy")},
        digest=digest_of("chat", body),
    )


def _message(message: Mapping[str, Any], where: str) -> ChatMessage:
    role = message.get("role")
    if role == "assistant":
        text = text_in(message.get("content"), f"{where}.content", ("text", "refusal"))
        ids = tuple(call.get("id") for call in listed(message, "tool_calls"))
        return ChatMessage(Role.ASSISTANT, text, tuple(_calls(message, where)), ids)
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, ", ".join([*_ROLES, "assistant"]))
    text = text_in(message.get("content"), f"{where}.content")
    return ChatMessage(_ROLES[role], text, ids=(message.get("tool_call_id"),))


def _calls(message: Mapping[str, Any], where: str) -> Iterator[Any]:
    for i, call in enumerate(listed(message, "tool_calls")):
        function = call.get("function") or {}
        yield call_in(function.get("name"), function.get("arguments"), f"{where}.tool_calls[{i}].function")


def _tool(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = found.get("function")
    if found.get("type") != "function" or not isinstance(function, dict):
        raise wrong(where, found.get("type"), "a tool of type function")
    return tool(function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function")


def reply(answered: ChatReply, asked: ChatRequest) -> dict[str, Any]:
    """The body of a reply."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answered.text or None if answered.calls else answered.text,
    }
    if answered.reasoning:
        message["reasoning_content"] = answered.reasoning
    if answered.calls:
        message["tool_calls"] = _written(answered)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _finish(answered),
        "logprobs": _logprobs(answered, asked),
    }
    return {**_head(answered, asked, "chat.completion"), "choices": [choice], "usage": _usage(answered)}


def stream(answered: ChatReply, asked: ChatRequest) -> Iterator[str]:
    """The events of a reply in pieces."""
    head = _head(answered, asked, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""}, None, _logprobs(answered, asked))
    for piece in pieces(answered.reasoning):
        yield chunk({"reasoning_content": piece})
    for piece in pieces(answered.text):
        yield chunk({"content": piece})
    for i, call in enumerate(_written(answered)):
        arguments = call["function"]["arguments"]
        begun = {**call, "index": i, "function": {**call["function"], "arguments": ""}}
        yield chunk({"tool_calls": [begun]})
        for piece in pieces(arguments):
            yield chunk({"tool_calls": [{"index": i, "function": {"arguments": piece}}]})
    yield chunk({}, _finish(answered))
    if asked.options.get("usage"):
        yield event({**head, "choices": [], "usage": _usage(answered)})
    yield "data: [DONE]\n\n"


def _head(answered: ChatReply, asked: ChatRequest, kind: str) -> dict[str, Any]:
    name = asked.options.get("model", "policy")
    return {"id": f"chatcmpl-{answered.id}", "object": kind, "created": answered.created, "model": name}


def _written(answered: ChatReply) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{name}", "type": "function", "function": {"name": call.name, "arguments": call.json_arguments}}
        for name, call in answered.calls
    ]


def _finish(answered: ChatReply) -> str:
    if answered.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if answered.calls else "stop"


def _logprobs(answered: ChatReply, asked: ChatRequest) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    listed_ = [
        {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []}
        for t in answered.tokens
    ]
    return {"content": listed_, "refusal": None}


def _usage(answered: ChatReply) -> dict[str, int]:
    read_, said = answered.n_prompt, answered.n_sampled
    return {"prompt_tokens": read_, "completion_tokens": said, "total_tokens": read_ + said}
