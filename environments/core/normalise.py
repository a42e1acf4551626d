"""How worlds read what an agent says: in any case, with or without quotes, full stops and underscores."""

from __future__ import annotations

import re


def plain_words(text: str, most: int = 60) -> str:
    """`text` in lower case without quotes, full stops and repeated spaces; empty where it is longer than `most`."""
    return "" if len(text) > most else " ".join(re.sub(r"[\s_\-.!\"'`*]+", " ", text.lower()).split())
