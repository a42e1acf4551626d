"""MiniWoB++: small web pages in a real browser."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `MiniWoB`, imported on first use: its package may be absent."""
    if name == "MiniWoB":
        from environments.contrib.miniwob.environment import MiniWoB

        return MiniWoB
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
