"""What every page has in common: one file without outside links, its frame, its tables, and how it is written.

A page allows its own script by hash and nothing else, so that text of models and environments can never run.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a page.

    Attributes:
        name: what links to it say.
        link: words of the link at the top.
        html: what stands in it.
        heading: words above it; those of the link where it is empty.
    """

    name: str
    link: str
    html: str
    heading: str = ""

    def __str__(self) -> str:
        title = f'<h2 id="h-{self.name}">{self.heading or self.link}</h2>'
        return f'<section id="{self.name}" aria-labelledby="h-{self.name}">{title}{self.html}</section>'


def page(title: str, subtitle: str, first: str, sections: Sequence[Section] = (), *, beside: str = "") -> str:
    """Return a page; everything given is HTML.

    Args:
        title: of the page.
        subtitle: the line below it.
        first: what comes before the sections.
        sections: the parts that the top of the page links to.
        beside: the last sentence of the page: where there is more.
    """
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    links = "".join(f'<a href="#{section.name}">{section.link}</a>' for section in sections)
    return Template(_resource("page.html")).substitute(
        title=title,
        subtitle=subtitle,
        links=f'<nav aria-label="Sections">{links}</nav>\n' if links else "",
        content="\n".join([first, *map(str, sections)]),
        beside=f" {beside}" if beside else "",
        style=_resource("report.css") + figures.STYLE,
        script=script,
        script_hash=f"sha256-{digest}",
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
