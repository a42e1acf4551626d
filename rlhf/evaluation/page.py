"""Pages: jinja2 templates that escape what is given to them, and how a page is written.

Each is one file without outside links. It allows its own script by hash and nothing else, so that text of models and
environments can never run.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import CheckpointError
from rlhf.evaluation import figures
from rlhf.evaluation.store import read_failures
from rlhf.evaluation.wording import number_text, percent_text

if TYPE_CHECKING:
    from jinja2 import Environment

#: Name of the page in the folder of a run or of an evaluation.
REPORT = "report.html"
#: Messages of failed attempts that are shown, and the length they are cut to.
_MOST_MESSAGES, _LONGEST = 8, 300


def render(name: str, **values: Any) -> str:
    """HTML page from template `name`; values are escaped unless the template marks them safe."""
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = _resource("report.css") + figures.STYLE
    template = _templates().get_template(f"{name}.html")
    return template.render(values, style=style, script=script, script_hash=f"sha256-{digest}")


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("rlhf.evaluation")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"flat": flat, "number": number_text, "percent": _percent}
    return found


def _percent(value: float | None) -> str:
    return "-" if value is None else percent_text(value)


def write_page(folder: Path, html: str, name: str = REPORT) -> Path:
    """Write a page into a folder, whole or not at all; returns its path.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = folder / name
    temporary = path.with_name(f"{name}.tmp")
    try:
        temporary.write_text(html, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            "the report cannot be written", where=str(path), got=error.strerror or str(error), hint="free disk space"
        ) from error
    return path


def failures(trajectories: Path) -> list[tuple[str, str, str]]:
    """Return the attempts that ended by the failure of a part, as rows of (attempts, outcome, message)."""
    counted = Counter((r.failure.outcome, r.failure.message) for r in read_failures(trajectories))
    return [(str(n), outcome, message[:_LONGEST]) for (outcome, message), n in counted.most_common(_MOST_MESSAGES)]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Write nested values as rows of (dotted name, text)."""
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows


def _resource(name: str) -> str:
    return (files("rlhf.evaluation") / "templates" / name).read_text("utf-8")
