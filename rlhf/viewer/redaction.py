"""Secrets in texts that are shown: what looks like a key is blacked out before it leaves the server."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
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
    r"\bxox[abeprs]-[\w-]{10,}",
    r"(?i)\bbearer\s+[A-Za-z0-9._~+/-]{16,}=*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)
BLACK = "█████"


class Redaction:
    """Patterns whose matches are blacked out in everything that is shown."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [_compiled(pattern) for pattern in (*DEFAULTS, *patterns)]

    def text(self, text: str) -> str:
        """A text without what matches."""
        for pattern in self._patterns:
            text = pattern.sub(lambda match: BLACK if match[0] else "", text)
        return text

    def values(self, value: Any) -> Any:
        """Plain values with every text in them redacted, names too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(k) if isinstance(k, str) else k: self.values(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(v) for v in value]
        return value

    def pieces(self, pieces: Sequence[str]) -> tuple[list[str], set[int]]:
        """Pieces of one text, and which of them are blacked out: a key may be cut anywhere between them."""
        whole, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        hidden: set[int] = set()
        for pattern in self._patterns:
            for match in pattern.finditer(whole):
                if match[0]:
                    hidden.update(range(bisect_right(ends, match.start()), bisect_right(ends, match.end() - 1) + 1))
        return ["█" if i in hidden else piece for i, piece in enumerate(pieces)], hidden


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(
            "no pattern to redact by",
            where="--redact",
            got=f"{pattern}: {error}",
            expected="a regular expression of Python's `re`",
            hint="put a backslash before characters such as ( [ * + ? that are meant as they are",
        ) from error
