"""The page of the viewer: as a server sends it, and as one file that needs none.

One file is made of the same template, styles and scripts. Its modules become functions in one script, in the order of
their imports, so that no bundler is needed. It allows the very text of its scripts and styles by hash and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import whole

HERE = Path(__file__).parent
STATIC = HERE / "static"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def shell() -> str:
    """The page as a server sends it, with nothing in it yet."""
    return _rendered(frozen=None)


def single_file(title: str, lines: Sequence[str], kept: str, start: str, data: dict[str, Any]) -> str:
    """The page as one file.

    Args:
        title: of the page.
        lines: what is read where scripts are turned off.
        kept: what is in it, and where the rest is.
        start: view that it opens, such as `run/ID`.
        data: what its scripts read in the place of a server's answers.
    """
    scripts = [(STATIC / "uplot" / "uPlot.iife.min.js").read_text("utf-8"), bundle()]
    style = "".join((STATIC / name).read_text("utf-8") for name in ("uplot/uPlot.min.css", "view.css"))
    text = json.dumps({**data, "start": start}, allow_nan=False, default=str, separators=(",", ":"))
    frozen = {
        "hashes": [_hash(script) for script in scripts],
        "style": style,
        "style_hash": _hash(style),
        "data": text.replace("<", "\\u003c"),  # nothing in it can end its element
        "scripts": scripts,
    }
    return _rendered(frozen=frozen, title=title, lines=lines, kept=kept, start=start)


@cache
def bundle() -> str:
    """The modules of the page as one script without imports."""
    bodies: list[str] = []
    _add("main", bodies, set())
    return '"use strict";\n' + "".join(bodies)


def _add(name: str, bodies: list[str], known: set[str]) -> None:
    """Add a module behind those that it imports."""
    if name in known:
        return
    known.add(name)
    text = (STATIC / f"{name}.js").read_text("utf-8")
    for match in _IMPORT.finditer(text):
        _add(match[2], bodies, known)
    names = ", ".join(_EXPORT.findall(text))
    inside = _IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = module_{match[2]};\n", text)
    inside = re.sub(r"^export ", "", inside, flags=re.MULTILINE)
    bodies.append(f"const module_{name} = (() => {{\n{inside}\nreturn {{ {names} }};\n}})();\n")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _rendered(**values: Any) -> str:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("rlhf.viewer"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    icon = (STATIC / "icon.svg").read_text("utf-8")
    return environment.get_template("view.html").render(values, icon=icon)


def write_page(path: Path, html: str) -> Path:
    """Write a page, whole or not at all; returns its path.

    Raises:
        CheckpointError: it cannot be written.
    """
    with whole("the report", path) as partial:
        partial.write_text(html, "utf-8")
    return path
