"""TextArena: games for one and two players."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `TextArena`, imported on first use: its package may be absent."""
    if name == "TextArena":
        from environments.contrib.textarena.environment import TextArena

        return TextArena
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
