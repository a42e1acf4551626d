"""Validation of the Actions that agents return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from rlhf.data import Action, Generation
from rlhf.data.untrusted import MAX_TEXT_BYTES, is_large, n_bytes, shown, slots, text, texts, type_of
from rlhf.errors import AgentError

_NAMES = tuple(field.name for field in fields(Action))


def checked_action(action: object, sampled: Sequence[Generation]) -> Action:
    """Return `action` with Python's own types.

    Args:
        action: whatever an agent has returned.
        sampled: what the policy was asked for in this turn.

    Raises:
        AgentError: it is no Action, a field has another type than it may, a text has more than `MAX_TEXT_BYTES` bytes,
            or `generations` are not those that were sampled.
    """
    found = slots(action, Action, _NAMES)
    if found is None:
        raise AgentError(f"returned {type_of(action)}, expected rlhf.data.Action")
    given, generations, error, notes, parts, said = found
    plain = _text(given, "Action.text is no text")
    why = None if error is None else _text(error, "Action.error is neither text nor None")
    steps = texts(parts)
    if steps is None or type(parts) is list:
        raise _refused("Action.parts is no tuple of texts, or too long", parts, f"at most {MAX_TEXT_BYTES} bytes")
    reply = _text(said, "Action.said is no text")
    return Action(plain, _generations(generations, sampled), why, _notes(notes), steps, reply)


def _text(value: object, problem: str) -> str:
    found = text(value)
    if found is None:
        raise _refused(problem, value, "a str")
    if is_large(found):
        name = problem.partition(" ")[0]
        raise _refused(f"{name} is too long", len(found), f"at most {MAX_TEXT_BYTES} bytes")
    return found


def _notes(value: object) -> Mapping[str, str]:
    problem, left = "Action.notes is no mapping of texts to texts, or too long", MAX_TEXT_BYTES
    if not isinstance(value, Mapping):
        raise _refused(problem, value, "a dict of str")
    found: dict[str, str] = {}
    for name, note in value.items():
        key, plain = text(name), text(note)
        if key is None or plain is None:
            raise _refused(problem, name if key is None else note, "a dict of str")
        left -= n_bytes(key) + n_bytes(plain) + 1
        if left < 0:
            raise _refused(problem, value, f"at most {MAX_TEXT_BYTES} bytes in all")
        found[key] = plain
    return found


def _generations(value: object, sampled: Sequence[Generation]) -> tuple[Generation, ...]:
    known = {id(g): g for g in sampled}
    if not isinstance(value, tuple | list) or len(value) > len(known):
        raise _refused("Action.generations is no tuple of what was sampled", value, f"{len(known)} generations")
    lost = len(known.keys() - {id(g) for g in value})
    if lost:
        raise AgentError(
            f"{lost} of {len(known)} generations are missing from Action.generations; nothing would train on them"
        )
    return tuple(known[id(g)] for g in value)


def _refused(problem: str, value: object, expected: str) -> AgentError:
    return AgentError(problem, got=shown(value), expected=expected)
