"""Secrets in texts that are shown: what looks like a key is blacked out before it leaves the server."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from rlhf.errors import UsageError

#: What keys of common services look like.
DEFAULTS = (
    r"\b(?:sk|rk|pk)[-_](?:[A-Za-z0-9]+[-_])*[A-Za-z0-9_-]{16,}",
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[\w-]{30,}",
    r"\b(?:gsk_|xai-|nvapi-|r8_|npm_|pypi-)[\w-]{20,}",
    r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",
    r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)",
    r"\bxox[abeprs]-[\w-]{10,}",
    r"(?i)\bbearer\s+[A-Za-z0-9._~+/-]{16,}=*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)
BLACK = "█████"
#: Characters that a key may have, and how many of them.
_IN_KEYS, _LONGEST_KEY = "".join(map(chr, range(33, 127))), 10_000


#: Finds what any of them might match, so that texts without a key, nearly all, are looked at once.
_ANY = re.compile(
    "|".join(f"(?:{pattern.replace('(?i)', '(?i:', 1)})" + ")" * ("(?i)" in pattern) for pattern in DEFAULTS)
)


def cut_whole(text: str, n: int) -> str:
    """The first `n` characters of a text at most, cut at white space: half of a key is not known for one."""
    if len(text) <= n:
        return text
    kept = text[:n] if text[n].isspace() else text[:n].rstrip(_IN_KEYS)
    return (kept if n - len(kept) <= _LONGEST_KEY else text[:n]) + "…"


class Redaction:
    """Patterns whose matches are blacked out in everything that is shown."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [_compiled(pattern) for pattern in (*DEFAULTS, *patterns)]
        self._is_default = not patterns

    def text(self, text: str) -> str:
        """A text without what matches."""
        if self._is_clean(text):
            return text
        for pattern in self._patterns:
            text = pattern.sub(lambda match: BLACK if match[0] else "", text)
        return text

    def values(self, value: Any) -> Any:
        """Plain values with every text in them redacted, names too."""
        return value if self._is_clean("\n".join(_texts(value))) else self._redacted(value)

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(k) if isinstance(k, str) else k: self._redacted(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._redacted(v) for v in value]
        return value

    def pieces(self, pieces: Sequence[str]) -> tuple[list[str], set[int]]:
        """Pieces of one text, and which of them are blacked out: a key may be cut anywhere between them."""
        whole = "".join(pieces)
        if self._is_clean(whole):
            return list(pieces), set()
        ends, hidden = list(accumulate(map(len, pieces))), set[int]()
        for pattern in self._patterns:
            for match in pattern.finditer(whole):
                if match[0]:
                    hidden.update(range(bisect_right(ends, match.start()), bisect_right(ends, match.end() - 1) + 1))
        return ["█" if i in hidden else piece for i, piece in enumerate(pieces)], hidden

    def _is_clean(self, text: str) -> bool:
        """True if a text, or texts joined by lines, surely has no match."""
        return self._is_default and _ANY.search(text) is None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from (name, *_texts(one)) if isinstance(name, str) else _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(
            "no pattern to redact by",
            where="--redact",
            got=f"{pattern}: {error}",
            expected="a regular expression of Python's `re`",
            hint="put a backslash before characters such as ( [ * + ? that are literal",
        ) from error
