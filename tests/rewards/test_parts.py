"""A reward and what it asks, each with its path."""

from __future__ import annotations

import dataclasses
from typing import Any

from rewards.answers.numeric import Numeric
from rewards.combinators.parts import with_parts
from rewards.shaping.outcome import Outcome
from rewards.verified import Verified


@dataclasses.dataclass(slots=True)
class Slotted:
    """Somebody's own: without a `__dict__`, and with a list of others."""

    asks: list[Any]
    by_name: dict[str, Any]
    scale: float = 1.0

    def __call__(self, task: Any, trajectory: Any) -> float:
        return self.scale


def given(answer: str, reference: str) -> float:
    return float(answer == reference)


def paths(path: str, value: Any) -> list[tuple[str, str]]:
    return [(at, part.__name__ if callable(part) and hasattr(part, "__name__") else type(part).__name__)
            for at, part in with_parts(path, value)]  # fmt: skip


def test_fields_lists_and_mappings_are_walked_and_numbers_are_not() -> None:
    reward = Slotted([Outcome(), Slotted([], {})], {"one": Outcome()})
    assert paths("rewards.own", reward) == [
        ("rewards.own", "Slotted"),
        ("rewards.own.asks[0]", "Outcome"),
        ("rewards.own.asks[1]", "Slotted"),
        ("rewards.own.by_name.one", "Outcome"),
    ]
    assert paths("", {"own": Slotted([], {})}) == [("own", "Slotted")]


def test_a_verifier_stands_where_its_reward_does() -> None:
    assert paths("rewards.right", Verified(given)) == [("rewards.right", "Verified"), ("rewards.right", "given")]
    assert [at for at, part in with_parts("r", Verified(Numeric())) if isinstance(part, Numeric)] == ["r"]
