"""Blocks of an answer, between lines of three backticks or more."""

from __future__ import annotations

from collections.abc import Iterator


def fenced(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of every closed code fence, in order, in linear time.

    A line of n backticks, three or more, opens a block, with or without the name of a language, and a line of n or more
    without one closes it; lines of fewer are text of the block. Where a second one with a name comes first, the block
    begins anew there: what was open was never closed.
    """
    language, width = "", 0
    lines: list[str] = []
    for line in answer.split("\n"):
        mark = line.strip()
        n = len(mark) - len(mark.lstrip("`"))
        named = mark[n:].strip()
        if n >= max(3, width) and "`" not in named:
            if width and not named:
                yield language, "".join(lines)
                width = 0
            else:
                language, width, lines = named, n, []
        elif width:
            lines.append(line + "\n")
