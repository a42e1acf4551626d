"""Rows and menu entries of algorithms that say on their own page where they belong.

    ---
    menu: Advantage, turn-level
    task: rewards come on the way
    because: what was earned before is no merit of a turn
    watch: groups of two
    ---
    # Title

`recipe_reference.py` writes the rows into the tables of `algorithms/index.md`, and MkDocs, which calls `on_config`,
shows the page in the menu. Pages without such lines stand in both by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

PAGES = Path(__file__).resolve().parent / "algorithms"
_HEAD = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
#: Headings of the tables, by how the entry in the menu begins.
_GUIDES = {"Advantage": "## Which credit for which task", "Loss": "## Which loss when"}
_PAPERS = "## From paper to file"


def body_of(text: str) -> str:
    """Return a page without the lines above its title."""
    return _HEAD.sub("", text, count=1)


def described() -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Give file name, title and described place of each page that has one."""
    for path in sorted(PAGES.glob("*.md")):
        if head := _HEAD.match(text := path.read_text("utf-8")):
            yield path.name, body_of(text).partition("\n")[0].removeprefix("# "), yaml.safe_load(head[1])


def guide_with(text: str) -> str:
    """Return the guide `text` with the rows of the described pages, the last ones of their tables."""
    for name, title, said in described():
        link = f"[{title}]({name})"
        text = "".join(line for line in text.splitlines(keepends=True) if f"({name})" not in line)
        source = re.split(r"^## ", body_of((PAGES / name).read_text("utf-8")), flags=re.MULTILINE)[2]
        papers = "; ".join(dict.fromkeys(" ".join(found.split()) for found in re.findall(r"\[([^]]+)\]\(http", source)))
        files = ", ".join(re.findall(r"`(?:rlhf|rewards)/[\w/]+\.py`", source))
        place = _GUIDES[said["menu"].split(",")[0]]
        text = _appended(text, place, f"| {said['task']} | {link} | {said['because']} | {said['watch']} |")
        text = _appended(text, _PAPERS, f"| {link} | {papers} | {files} |")
    return text


def _appended(text: str, heading: str, row: str) -> str:
    """Return a page with a row at the end of the first table below a heading."""
    at = text.index("\n|", text.index(f"{heading}\n"))
    end = re.compile(r"^(?!\|)", re.MULTILINE).search(text, at + 1)
    assert end is not None
    return f"{text[: end.start()]}{row}\n{text[end.start() :]}"


def on_config(config: Any) -> Any:
    """Add the described pages to the menu of MkDocs."""
    [algorithms] = [entry["Algorithms"] for entry in config["nav"] if "Algorithms" in entry]
    menus = {name: pages for entry in algorithms for name, pages in entry.items() if isinstance(pages, list)}
    for name, title, said in described():
        menus[said["menu"]].append({title: f"algorithms/{name}"})
    return config
