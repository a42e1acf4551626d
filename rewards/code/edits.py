"""Edits of a repository's files, as an answer writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rewards.answers.extract import fenced

_SEARCH, _MIDDLE, _REPLACE = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"
_NOT_WHOLE = "no edit that is whole"


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines of a file, and the lines that take their place."""

    path: str
    before: list[str]
    after: list[str]


def edited(files: Mapping[str, str], answer: str) -> tuple[dict[str, str], str]:
    r"""Apply the edits of the last block between lines of three backticks.

    A block has for each edit a line `### path`, then `<<<<<<< SEARCH`, the lines that are there, `=======`, the lines
    that take their place, and `>>>>>>> REPLACE`. The lines have to be in the file exactly once; none at all make a new
    file.

    >>> block = "```\n### a.py\n<<<<<<< SEARCH\nx = 1\n=======\nx = 2\n>>>>>>> REPLACE\n```"
    >>> edited({"a.py": "x = 1\ny = 1\n"}, block)
    ({'a.py': 'x = 2\ny = 1\n'}, '')

    Returns:
        the files, and why an edit could not be made; empty where all were.
    """
    blocks = list(fenced(answer))
    if not blocks:
        return dict(files), "no block of edits"
    found, n = dict(files), 0
    try:
        for edit in edits_in(blocks[-1][1]):
            n += 1
            if wrong := _replace(found, edit.path, edit.before, edit.after):
                return dict(files), wrong
    except ValueError as error:
        return dict(files), str(error)
    return (found, "") if n else (dict(files), _NOT_WHOLE)


def edits_in(block: str) -> Iterator[Edit]:
    """Yield the edits of a block in order. Raises ValueError at a line of no edit, or where the last is not whole."""
    path, parts = "", [list[str](), list[str]()]
    into: int | None = None
    for line in block.replace("\r\n", "\n").split("\n"):
        mark = line.rstrip()
        if into is None and mark.startswith("#"):
            path = mark.lstrip("#").strip().removeprefix("./")
        elif into is None and mark == _SEARCH:
            parts, into = [[], []], 0
        elif into == 0 and mark == _MIDDLE:
            into = 1
        elif into == 1 and mark == _REPLACE:
            yield Edit(path, *parts)
            into = None
        elif into is not None:
            parts[into].append(line)
        elif mark:
            raise ValueError(f"not an edit: {mark[:80]}")
    if into is not None:
        raise ValueError(_NOT_WHOLE)


def _replace(files: dict[str, str], path: str, before: list[str], after: list[str]) -> str:
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path:
        return f"no file of the repository: {path[:80]}"
    if any(part in ("", ".") or len(part.encode()) > 255 for part in parts) or len(path.encode()) > 1024:
        return f"no name of a file: {path[:80]}"
    if any("/".join(parts[:i]) in files for i in range(1, len(parts))) or any(f.startswith(path + "/") for f in files):
        return f"{path}: a file and a folder of one name"
    text = files.get(path, "")
    if not before and text:
        return f"{path}: the file is there, and the edit says of no line what it replaces"
    end = "\r\n" if 0 < text.count("\n") == text.count("\r\n") else "\n"
    lines = text.removesuffix(end).split(end) if text else []
    places = [i for i in range(len(lines)) if lines[i : i + len(before)] == before] if before else [0]
    if len(places) != 1:
        return f"{path}: the lines to replace are there {len(places)} times"
    lines[places[0] : places[0] + len(before)] = after
    files[path] = end.join(lines) + end * (text.endswith(end) or not text) if lines else ""
    return ""
