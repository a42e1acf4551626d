"""Task: one problem to attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.messages import Message
from rlhf.errors import DataError


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    Attributes:
        id: unique within an environment and stable between runs; names the package version where one generates it.
        messages: opening messages shown before the environment's first observation; often empty.
        reference: the hidden answer a verifier compares with; never shown to the agent.
        seed: seed of the environment's generator.
        info: whatever the environment needs to start the task; plain JSON values.
    """

    id: str
    messages: tuple[Message, ...] = ()
    reference: str | None = None
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise DataError("a task needs an id", where="Task.id", got=repr(self.id), expected="a non-empty string")
