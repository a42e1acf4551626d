"""TextWorld: generated text adventures."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `TextWorld`, imported on first use: its package may be absent."""
    if name == "TextWorld":
        from environments.contrib.textworld.environment import TextWorld

        return TextWorld
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
