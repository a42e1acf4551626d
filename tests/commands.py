"""The command line as tests call it: in this process, with what it prints and its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from rlhf.cli import app


def run(*arguments: str | Path, lines: Sequence[str] = ()) -> Result:
    """What `rlhf` with these arguments does, and with these lines piped to it."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input="".join(f"{line}\n" for line in lines))


def last_json(result: Result) -> dict[str, Any]:
    """The JSON object in the last line of standard output of a command that succeeded."""
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return values


def program(folder: Path, does: str) -> Path:
    """A program in `folder` that runs one line of shell, whatever its arguments."""
    path = folder / "program.sh"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path
