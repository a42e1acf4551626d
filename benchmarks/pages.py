"""Writer of the generated parts of pages."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace the lines of a page between two marks. Raises SystemExit where a mark is missing."""
    before, begin, rest = page.read_text("utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(f"{page} has no line {marks[0]} with {marks[1]} after it, to write between")
    page.write_text(f"{before}{begin}\n{text}{end}{after}", "utf-8")
