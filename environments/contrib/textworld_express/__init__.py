"""TextWorldExpress: eight quick text games."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `TextWorldExpress`, imported on first use: its package may be absent."""
    if name == "TextWorldExpress":
        from environments.contrib.textworld_express.environment import TextWorldExpress

        return TextWorldExpress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
