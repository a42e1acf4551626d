"""BFCL: multi-turn function calls."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Return `BFCL`, imported on first use: its package may be absent."""
    if name == "BFCL":
        from environments.contrib.bfcl.environment import BFCL

        return BFCL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
