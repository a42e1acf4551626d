"""Errors of the YAML parser in the four parts of every other error."""

from __future__ import annotations

import re
from typing import Any

from rlhf.errors import RecipeError

_QUOTES = "put the text in quotes"
#: What the parser's sentence holds: what would be accepted there, and what to do.
_FAULTS: tuple[tuple[str, str, str], ...] = (
    (r"is written twice", "each key once in its mapping", "remove one of the two"),
    (r"'\\t'", "spaces before a key: YAML takes no tabs there", "replace the tabs by spaces"),
    (r"cannot start any token", "a value that does not begin with one of YAML's special characters", _QUOTES),
    (
        r"mapping values are not allowed",
        "one `key: value` in a line, as far in as the other keys of its mapping",
        "align the key with those beside it; a text with a colon and a space in it goes in quotes",
    ),
    (r"end of stream", "a quote at the end of the text", "close the quotes that were opened in or above this line"),
    (r"undefined alias", "a name that &NAME has given above", "text that begins with * goes in quotes"),
    (r"for the tag", "values without tags", "remove the tag; text that begins with ! goes in quotes"),
    (r"another document", "one document", "remove the line ---, and what comes after it if it is another recipe"),
    (r"unknown escape", r"an escape such as \n or \\", "use single quotes, in which a backslash is one"),
    (r"unhashable", "text as a key", "a value in braces or brackets goes after a key"),
    (r"for merging", "a mapping after <<", "write <<: *NAME, or remove it"),
    (
        r"special characters|#x",
        "printable characters",
        "remove the character, or write it as an escape in double quotes",
    ),
    (
        r"expected ':'",
        "`key: value`, or a line that goes on with the text above it",
        "add a colon and a value, or indent it",
    ),
)
_TOKENS = {"<block end>": "a key as far in as those above it", "'<stream end>'": "the end of the file", "'?'": "a key"}
_QUOTED = 'put it in quotes, also behind a key: "{question} In metres?"'
#: A value that goes on behind the bracket that closes what it begins with: a text, as of columns in braces.
_BRACED = re.compile(r"(?:[^\s:{\[]+: +)?(?:\{[^{}]*\}|\[[^\[\]]*\])\s*[^\s,:#]")
_UNCLOSED = "align the line with those above it, and close the brackets that are open there"


def of_yaml(error: Any, text: str, where: str) -> RecipeError:
    """Return the error for `text`, of which PyYAML says `error`."""
    mark, lines = getattr(error, "problem_mark", None), text.splitlines()
    place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
    line = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
    got = line or ("the end of the file" if mark else str(error).splitlines()[0])
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read")
    wanted = re.fullmatch(r"expected (.+), but (?:got|found) (.+)", said)
    if wanted is not None and "merging" not in said:
        what, expected = (_TOKENS.get(part, part) for part in (wanted[2], wanted[1]))
        said, hint = f"found {what}", _UNCLOSED
        if _BRACED.match(line):
            expected, hint = "one value; a text that begins with a bracket goes in quotes", _QUOTED
    else:
        _, expected, hint = next((one for one in _FAULTS if re.search(one[0], said)), ("", "YAML", _UNCLOSED))
    return RecipeError(f"invalid YAML: {said.removeprefix('but ')}", where=place, got=got, expected=expected, hint=hint)
