"""Blocks of an answer, between lines of three backticks."""

from __future__ import annotations

from collections.abc import Iterator


def fenced(answer: str) -> Iterator[tuple[str, str]]:
    """Give language and text of every block that is closed, in order, in time that grows as the answer does.

    A line of three backticks opens a block, with or without the name of a language, and one without closes it. Where a
    second one with a name comes first, the block begins anew there: what was open was never closed.
    """
    language: str | None = None
    lines: list[str] = []
    for line in answer.split("\n"):
        mark = line.strip()
        if mark.startswith("```") and "`" not in mark[3:]:
            named = mark[3:].strip()
            if language is not None and not named:
                yield language, "".join(lines)
                language = None
            else:
                language, lines = named, []
        elif language is not None:
            lines.append(line + "\n")
