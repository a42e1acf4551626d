"""MiniHack: NetHack's small levels in words."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `MiniHack`, imported on first use: its package may be absent."""
    if name == "MiniHack":
        from environments.contrib.minihack.environment import MiniHack

        return MiniHack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
