"""ALFWorld: household tasks in text."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `ALFWorld`, imported on first use: its package may be absent."""
    if name == "ALFWorld":
        from environments.contrib.alfworld.environment import ALFWorld

        return ALFWorld
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
