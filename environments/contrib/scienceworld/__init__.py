"""ScienceWorld: science experiments in text."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `ScienceWorld`, imported on first use: its package may be absent."""
    if name == "ScienceWorld":
        from environments.contrib.scienceworld.environment import ScienceWorld

        return ScienceWorld
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
