"""What the pages of a run and of an evaluation have in common: one file without outside links, its tables, its end.

A page allows its own script by hash and nothing else, so that text of models and environments can never run.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rlhf.errors import CheckpointError
from rlhf.evaluation import figures
from rlhf.evaluation.store import read_failures

#: Name of the page in the folder of a run or of an evaluation.
REPORT = "report.html"
#: Messages of failed attempts that are shown, and the length they are cut to.
_MOST_MESSAGES, _LONGEST = 8, 300


def page(template: str, **sections: str) -> str:
    """Fill a template of `templates/` with HTML; styles and script are those of every page."""
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_resource(template)).substitute(
        style=_resource("report.css") + figures.STYLE, script=script, script_hash=f"sha256-{digest}", **sections
    )


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


def failures(trajectories: Path) -> str:
    """Return the attempts that ended by the failure of a part, counted by message; empty where there are none."""
    counted = Counter((r.failure.outcome, r.failure.message) for r in read_failures(trajectories))
    if not counted:
        return ""
    found = counted.most_common(_MOST_MESSAGES)
    rows = [(str(n), outcome, message[:_LONGEST]) for (outcome, message), n in found]
    shown = table(("attempts", "outcome", "message"), rows)
    return (
        f'<details class="card" style="margin-top:12px"><summary>Failed attempts by message</summary>{shown}</details>'
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Write nested values as rows of (dotted name, text)."""
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table as HTML; cells are text, and the first of each row is its heading."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = []
    for row in rows:
        first, *rest = (escape(str(cell)) for cell in row)
        cells = f'<th scope="row">{first}</th>' + "".join(
            f'<td class="n">{c}</td>' if len(c) < 12 else f"<td>{c}</td>" for c in rest
        )
        body.append(f"<tr>{cells}</tr>")
    start = f"<thead><tr>{top}</tr></thead>" if top else ""
    return f'<div class="scroll"><table>{start}<tbody>{"".join(body)}</tbody></table></div>'


def _resource(name: str) -> str:
    return (files("rlhf.evaluation") / "templates" / name).read_text("utf-8")
