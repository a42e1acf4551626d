"""The command line as tests call it: in this process, with what it prints and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from rlhf.cli import app


def run(*arguments: str | Path) -> Result:
    """What `rlhf` with these arguments does."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def last_json(result: Result) -> dict[str, Any]:
    """The JSON object in the last line of standard output of a command that succeeded."""
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return values
