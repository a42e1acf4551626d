"""Isolation levels of the sandbox, from least to most, and their requirements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

#: How a recipe writes a level.
LevelName = Literal["rlimits", "namespaces", "bubblewrap"]


class Level(IntEnum):
    """Levels of isolation between a program and the machine; each adds to the one before it.

    docs/sandbox.md says which attack is stopped at which level.
    """

    RLIMITS = 1
    """Limits of one process, and a process that watches. Started by root, the program is a user of its own."""
    NAMESPACES = 2
    """And no network, no foreign processes, none of the machine's files but an interpreter."""
    BUBBLEWRAP = 3
    """The same, made by bubblewrap, a program that has been looked at by many."""

    @classmethod
    def named(cls, name: LevelName) -> Level:
        """Return the level that a recipe calls `name`."""
        return cls[name.upper()]

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Isolation:
    """One way to isolate programs on this machine.

    Attributes:
        level: of isolation.
        python: path of the interpreter that runs Python programs; it has no packages.
        visible: files and folders that a program sees, read-only; without meaning for `rlimits`, where it sees all.
        bubblewrap: path of that program, where it is used.
    """

    level: Level
    python: str
    visible: tuple[str, ...] = ()
    bubblewrap: str = ""
