"""BabyAI: grid worlds in words."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `BabyAI`, imported on first use: its package may be absent."""
    if name == "BabyAI":
        from environments.babyai.environment import BabyAI

        return BabyAI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
