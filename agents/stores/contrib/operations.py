"""Operations of a memory manager in JSON: add, update, delete, or nothing.

    {"op": "ADD", "text": "has a dog, Rex"}
    [{"op": "UPDATE", "id": 1, "text": "has two dogs, Rex and Bo"}, {"op": "DELETE", "id": 4}]
    {"op": "NOOP"}

A reply is carried out whole or not at all: where one operation of it cannot be read or names an unknown id, nothing
changes, and the manager is told why.

Source: Memory-R1, arXiv 2508.19828.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.errors import nearest

_KEYS = {"ADD": ("text",), "UPDATE": ("id", "text"), "DELETE": ("id",), "NOOP": ()}
_FENCE = re.compile(r"^\s*`{3,}(?:json)?\s*\n(.*)\n\s*`{3,}\s*$", re.DOTALL)
_MOST_CHARS = 20_000


class BadOperation(ValueError):
    """Invalid operation in a reply; the message is for the manager to read."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Change of a memory.

    Attributes:
        op: `ADD`, `UPDATE`, `DELETE` or `NOOP`.
        id: of the entry that is changed; 0 where there is none.
        text: what the entry says from now on.
    """

    op: str
    id: int = 0
    text: str = ""

    @property
    def plain(self) -> dict[str, Any]:
        """The operation as JSON has it."""
        values = {"id": self.id, "text": self.text}
        return {"op": self.op, **{key: values[key] for key in _KEYS[self.op]}}


@dataclass(frozen=True, slots=True)
class Bank:
    """The memories of one conversation.

    Attributes:
        entries: (id, text), oldest first.
        n_given: ids given so far; none is given twice.
    """

    entries: tuple[tuple[int, str], ...] = ()
    n_given: int = 0

    def after(self, operations: Sequence[Operation]) -> Bank:
        """The bank after all `operations`, in order. Raises BadOperation for an id that it does not have by then."""
        bank = self
        for operation in operations:
            bank = bank._after(operation)
        return bank

    def _after(self, operation: Operation) -> Bank:
        if operation.op == "NOOP":
            return self
        if operation.op == "ADD":
            number = self.n_given + 1
            return Bank((*self.entries, (number, operation.text)), number)
        known = [number for number, _ in self.entries]
        if operation.id not in known:
            there = ", ".join(map(str, known[:20])) or "none, as nothing is stored"
            raise BadOperation(f"{operation.op}: there is no id {operation.id}; ids: {there}")
        if operation.op == "DELETE":
            return replace(self, entries=tuple(e for e in self.entries if e[0] != operation.id))
        changed = tuple((i, operation.text if i == operation.id else text) for i, text in self.entries)
        return replace(self, entries=changed)


def written(operations: Sequence[Operation]) -> str:
    """Text of operations: one as an object, several as a list. `parsed` reads it back."""
    plain = [operation.plain for operation in operations]
    return json.dumps(plain[0] if len(plain) == 1 else plain, ensure_ascii=False)


def parsed(text: str, *, max_operations: int, max_chars: int) -> list[Operation]:
    """Read a manager's reply: an object or a list of them, alone or in a code fence.

    Args:
        text: the reply without its thoughts.
        max_operations: most of one reply.
        max_chars: longest text of an entry; white space is made single first.

    Raises:
        BadOperation: it says what is wrong.
    """
    if len(text) > _MOST_CHARS:
        raise BadOperation(f"the reply has {len(text)} characters; at most {_MOST_CHARS}")
    fenced = _FENCE.match(text)
    try:
        found = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        raise BadOperation("the reply is not JSON") from None
    items = found if isinstance(found, list) else [found]
    if len(items) > max_operations:
        raise BadOperation(f"{len(items)} operations in one reply; at most {max_operations}")
    return [_operation(item, max_chars) for item in items]


def _operation(item: object, max_chars: int) -> Operation:
    if not isinstance(item, dict) or not isinstance(item.get("op"), str):
        raise BadOperation('an operation is an object with an "op"')
    name = item["op"].upper()
    if name not in _KEYS:
        hint = nearest(name, _KEYS)
        raise BadOperation(f"there is no operation {name[:20]}; {hint or 'there are ' + ', '.join(_KEYS)}")
    for key in _KEYS[name]:
        if key not in item:
            raise BadOperation(f'{name} lacks "{key}"')
    number, text = item.get("id", 0) if "id" in _KEYS[name] else 0, item.get("text", "")
    if isinstance(number, str) and number.isdecimal() and len(number) < 10:
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool):
        raise BadOperation(f"{name}: the id is a whole number")
    if "text" not in _KEYS[name]:
        return Operation(name, number)
    text = " ".join(text.encode("utf-8", "ignore").decode().split()) if isinstance(text, str) else ""
    if not text or len(text) > max_chars:
        raise BadOperation(f"{name}: the text has 1 to {max_chars} characters")
    return Operation(name, number, text)
