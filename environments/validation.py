"""Validation of the StepResults that environments return."""

from __future__ import annotations

from dataclasses import fields

from environments.base import StepResult
from rlhf.data.untrusted import MAX_TEXT_BYTES, defined_at, is_large, number, shown, text, texts, truth, type_of
from rlhf.data.untrusted import slots as slots_of
from rlhf.errors import EnvError

_NAMES = tuple(field.name for field in fields(StepResult))


def check_episode(episode: object, start: object) -> None:
    """Raise EnvError where what the function `start` has returned is no episode."""
    missing = [name for name in ("step", "close") if not callable(getattr(episode, name, None))]
    if missing:
        raise EnvError(
            "the returned object is not an episode",
            where=f"start{defined_at(start)}",
            got=f"{type_of(episode)} without {' and '.join(missing)}",
            expected="an object with `opening`, `step(action)` and `close()`",
            hint="return one" if episode is None else f"add `async def {missing[0]}` to its class",
        )


def checked_result(result: object, where: str, by: object = None) -> StepResult:
    """Return `result` with Python's own types.

    Args:
        result: whatever an environment has answered.
        where: the call that it answered.
        by: the function that was called, whose place is told.

    Raises:
        EnvError: it is no StepResult, a field has another type than it may (truth values are `bool` or NumPy's, and
            nothing else is taken for one), a reward is not finite, or a text has more than `MAX_TEXT_BYTES` bytes.
    """
    try:
        return _checked(result, where)
    except EnvError as error:
        error.where += defined_at(by)
        raise


def _checked(result: object, where: str) -> StepResult:
    found = slots_of(result, StepResult, _NAMES)
    if found is None:
        raise EnvError(
            "the returned object is not a StepResult",
            where=where,
            got=shown(result),
            expected="environments.base.StepResult",
            hint="set `self.opening = StepResult(reply)` where the episode is made"
            if where == "opening"
            else "return StepResult(reply, reward=..., terminated=..., success=...) on every path through the function",
        )
    reply, reward, terminated, truncated, state_key, success, valid, actions, seat = found
    plain = (
        _text(reply, "reply is no text", where),
        _number(reward, where),
        _truth(terminated, "terminated", where),
        _truth(truncated, "truncated", where),
        None if state_key is None else _text(state_key, "state_key is neither text nor None", where),
        None if success is None else _truth(success, "success", where),
        _truth(valid, "valid", where),
        actions if type(actions) is tuple and not actions else _actions(actions, where),
        _text(seat, "seat is no text", where),
    )
    same = type(result) is StepResult and all(a is b for a, b in zip(plain, found, strict=True))
    return result if same else StepResult(*plain)  # type: ignore[return-value]


def _number(value: object, where: str) -> float:
    if type(value) is float and value - value == 0.0:
        return value
    found = number(value)
    if found is None:
        raise _refused("reward is no finite number", where, value, "a float")
    return found


def _truth(value: object, name: str, where: str) -> bool:
    if value is True or value is False:
        return value
    found = truth(value)
    if found is None:
        more = ", or None before the end" if name == "success" else ""
        raise _refused(f"{name} is no truth value", where, value, f"True or False{more}")
    return found


def _text(value: object, problem: str, where: str) -> str:
    found = text(value)
    if found is None:
        raise _refused(problem, where, value, "a str")
    if is_large(found):
        name = problem.partition(" ")[0]
        got = f"{len(found)} characters"
        raise _refused(
            f"{name} is too long", where, got, f"at most {MAX_TEXT_BYTES} bytes", hint="shorten the observation"
        )
    return found


def _actions(value: object, where: str) -> tuple[str, ...]:
    found = texts(value)
    if found is None:
        raise _refused(
            "admissible_actions is no tuple of texts, or too long",
            where,
            value,
            f"a tuple of str with at most {MAX_TEXT_BYTES} bytes in all",
        )
    return found


def _refused(problem: str, where: str, value: object, expected: str, hint: str = "") -> EnvError:
    return EnvError(f"StepResult.{problem}", where=where, got=shown(value), expected=expected, hint=hint)
