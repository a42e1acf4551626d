"""The conversations of one session as a tree of messages, whose sampled replies keep their ids.

A request brings a whole history. Its prompt goes on from the deepest recorded path whose messages equal the beginning
of that history: replies on the path stand in it with the ids that were sampled, and only what is new is rendered. Where
a request leaves every path, a new row begins for the trainer; a `Fork` says why and shows the first differing message.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from agents.parsing import split_thoughts
from agents.tool_calls import Style, ToolCall, write_calls
from rlhf.data import Finish, Message, Role

#: Why a request begins a new row: `again`, another answer to a prompt that has one; `changed`, a message that is not
#: the recorded one; `tools`, the same messages with other tools; `cut`, it goes on from a reply that was cut; `fresh`,
#: another conversation, such as that of a subagent.
Reason = Literal["again", "changed", "tools", "cut", "fresh"]
_SHOWN = 200


@dataclass(frozen=True)
class ChatMessage:
    """One message of a request.

    Attributes:
        role: who speaks.
        text: what is said; of the assistant without reasoning and without calls.
        calls: of tools, parsed, so that spaces and the order of keys do not matter.
        ids: the client's of these calls; of a result that of its call.
    """

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[object, ...] = field(default=(), compare=False)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Key by which messages are compared."""
        if self.role is not Role.ASSISTANT:
            return self.role, self.text
        calls = tuple((call.name, json.dumps(_with_ints(call.arguments), sort_keys=True)) for call in self.calls)
        return self.role, split_thoughts(self.text).answer.strip(), calls

    def __str__(self) -> str:
        calls = f" {[call.text for call in self.calls]}" if self.calls else ""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"{self.role.value}: {text!r}{calls}"


def in_call_order(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Messages with the results of parallel calls in the order of the calls, where their ids say it."""
    found: list[ChatMessage] = []
    for is_result, run in itertools.groupby(messages, lambda message: message.role is Role.TOOL):
        several = list(run)
        asked = found[-1].ids if found else ()
        if is_result and all(message.ids and message.ids[0] in asked for message in several):
            several.sort(key=lambda message: asked.index(message.ids[0]))
        found += several
    return tuple(found)


def _with_ints(value: Any) -> Any:
    """JSON values with integral floats as ints: JavaScript clients serialise 5.0 as 5."""
    if isinstance(value, Mapping):
        return {key: _with_ints(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_ints(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, slots=True)
class Fork:
    """Reason for which a request began a new row.

    Attributes:
        reason: see `Reason`.
        at: index of the first message that differs.
        recorded: that message on the nearest path; empty where there is none.
        got: that message in the request; empty where there is none.
    """

    reason: Reason
    at: int
    recorded: str
    got: str

    def __str__(self) -> str:
        return f"{self.reason} at message {self.at}: recorded {self.recorded or 'nothing'}, got {self.got or 'nothing'}"


@dataclass(slots=True)
class _Node:
    """A message on a path, with the ids that stand for it in prompts; None for its text."""

    said: ChatMessage
    ids: tuple[int, ...] | None = None
    is_sampled: bool = False
    was_cut: bool = False
    after: list[_Node] = field(default_factory=list)
    goes_on: bool = False
    """True if a reply was sampled somewhere behind it."""
    key: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.key = self.said.key


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a request in the tree.

    Attributes:
        messages: for the renderer; sampled replies carry their ids.
        fork: why it begins a new row; None where it goes on with one, and for the first request.
    """

    messages: tuple[Message, ...]
    fork: Fork | None
    path: tuple[_Node, ...]
    rest: tuple[ChatMessage, ...]
    root: _Node


class Conversations:
    """Everything that one session has asked and was answered.

    Args:
        style: how calls that the policy did not sample are written.
        tools_as_text: whether the instruction tells of the tools, so that their results are the user's messages.
    """

    def __init__(self, style: Style = "hermes", *, tools_as_text: bool = False) -> None:
        self._style: Style = style
        self._tools_as_text = tools_as_text
        self._roots: dict[str, _Node] = {}
        self._sampled: dict[tuple[object, ...], tuple[int, ...]] = {}

    def place(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> Place:
        """Find the deepest path that the messages begin with; nothing is recorded yet."""
        name = json.dumps(list(tools), sort_keys=True)
        root = self._roots.get(name) or _Node(ChatMessage(Role.SYSTEM, ""))
        path = _deepest(root, [m.key for m in messages])
        shown = [self._message(node.said, node.ids) for node in path]
        for m in messages[len(path) :]:  # a reply that was sampled under another beginning keeps its ids too
            known = self._sampled.get(m.key) if m.role is Role.ASSISTANT and shown else None
            shown.append(self._message(m, known))
        return Place(tuple(shown), self._fork(name, root, path, messages), path, tuple(messages[len(path) :]), root)

    def record(
        self, place: Place, tools: Sequence[Mapping[str, Any]], reply: ChatMessage, ids: Sequence[int], finish: Finish
    ) -> None:
        """Put a request and its reply into the tree; a reply that was cut is never gone on from."""
        root = self._roots.setdefault(json.dumps(list(tools), sort_keys=True), place.root)
        path = [root, *place.path]
        for said, shown in zip(place.rest, place.messages[len(place.path) :], strict=True):
            same = (n for n in path[-1].after if not n.is_sampled and n.key == said.key and n.ids == shown.token_ids)
            found = next(same, None)  # another request at the same time may have put it there
            if found is None:
                found = _Node(said, shown.token_ids)
                path[-1].after.append(found)
            path.append(found)
        path[-1].after.append(_Node(reply, tuple(ids), is_sampled=True, was_cut=finish is not Finish.STOP))
        if finish is Finish.STOP:
            self._sampled[reply.key] = tuple(ids)
        for node in path:
            node.goes_on = True

    def paths(self) -> Iterator[tuple[list[Any], list[tuple[Message, bool]]]]:
        """Tools and messages of every conversation, to its last whole reply; and whether a reply is in none before."""
        seen: set[int] = set()
        for name, root in self._roots.items():
            whole = list(_whole(root))
            gone_on = {id(node) for path in whole for node in path[:-1]}
            for path in whole:
                if id(path[-1]) in gone_on:
                    continue
                is_new = [node.is_sampled and id(node) not in seen for node in path]
                seen.update(map(id, path))
                shown = [self._message(node.said, node.ids) for node in path]
                yield json.loads(name), list(zip(shown, is_new, strict=True))

    def _message(self, said: ChatMessage, ids: tuple[int, ...] | None) -> Message:
        text = said.text
        if said.calls and ids is None:
            text = "\n".join(filter(None, [text, write_calls(said.calls, self._style)]))
        role = Role.USER if said.role is Role.TOOL and self._tools_as_text else said.role
        return Message(role, text, ids)

    def _fork(self, name: str, root: _Node, path: Sequence[_Node], messages: Sequence[ChatMessage]) -> Fork | None:
        if not self._roots:
            return None
        n_kept = max((i + 1 for i, node in enumerate(path) if node.is_sampled), default=0)
        last = path[n_kept - 1] if n_kept else root
        keys = [m.key for m in messages]
        if not root.goes_on and (n := max(len(_deepest(other, keys)) for other in self._roots.values())):
            return Fork("tools", 0, f"{n} of these messages went with other tools", f"tools {name[:_SHOWN]}")
        if n_kept and not last.goes_on:
            return None
        node, at = (path[-1] if path else root), len(path)
        after = node.after[-1].said if node.after else None
        cut = at < len(messages) and any(n.was_cut and n.key == keys[at] for n in node.after)
        reason: Reason = "changed" if path else "fresh"
        if at == len(messages):
            reason = "again"
        elif cut:
            reason = "cut"
        return Fork(reason, at, str(after or ""), str(messages[at]) if at < len(messages) else "")


def _whole(root: _Node) -> Iterator[tuple[_Node, ...]]:
    """Paths from below `root` to each reply that was sampled and not cut."""
    ways: list[tuple[_Node, ...]] = [(child,) for child in reversed(root.after)]
    while ways:
        path = ways.pop()
        if path[-1].was_cut:
            continue
        if path[-1].is_sampled:
            yield path
        ways += [(*path, child) for child in reversed(path[-1].after)]


def _deepest(node: _Node, keys: Sequence[tuple[object, ...]]) -> tuple[_Node, ...]:
    """The longest path below `node` whose messages are the first of `keys`; of equal ones that recorded last."""
    best: list[_Node] = []
    ways: list[tuple[_Node, int, list[_Node]]] = [(node, 0, [])]
    while ways:
        node, i, path = ways.pop()
        found = [child for child in node.after if not child.was_cut and child.key == keys[i]] if i < len(keys) else []
        if not found and len(path) > len(best):
            best = path
        ways += [(child, i + 1, [*path, child]) for child in found]
    return tuple(best)
