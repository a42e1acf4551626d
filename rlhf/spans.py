"""Spans: marks of what a step is doing, free unless a clock listens."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a step can be busy with.
Part = Literal[
    "rollout", "scoring", "credit", "critic", "logprobs", "reference", "forward", "backward", "optimiser", "delivery",
    "evaluation", "checkpoint", "store", "reward models", "processes",
]  # fmt: skip


class Listener(Protocol):
    """Hears of spans."""

    def span(self, part: Part) -> AbstractContextManager[None]:
        """Context whose time belongs to `part`, except for spans within it."""


_NOTHING = nullcontext()
_listener: Listener | None = None


def span(part: Part) -> AbstractContextManager[None]:
    """Context whose time belongs to `part` of the step, except for spans within it."""
    return _NOTHING if _listener is None else _listener.span(part)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Inside, `listener` hears of every span."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
