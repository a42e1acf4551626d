"""Control tokens that a text spells out: encoded as ordinary text, so that it cannot fake a turn."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Private-use characters around a control token that a text spells out.
_OPEN, _CLOSE = "\ue000", "\ue001"
_ESCAPED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


class ControlTokens:
    """The control tokens of a tokenizer, which texts of messages are escaped against before a chat template reads them.

    Args:
        tokenizer: a Hugging Face tokenizer.
        said: control tokens that texts of the assistant keep.

    Attributes:
        ids: text -> id of every control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, said: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        # the named ones miss those that a tokenizer file merely marks special
        named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        added = ((t.content, i) for i, t in tokenizer.added_tokens_decoder.items() if t.special)
        self.ids = {str(text): int(i) for text, i in (*named, *added)}
        self._any = _any_of(self.ids)
        self._any_said = _any_of([text for text in self.ids if text not in said])

    def escaped(self, text: str, *, is_assistant: bool = False) -> str:
        """Text with the control tokens that it spells out escaped, for a chat template to write."""
        text = text.encode("utf-8", "replace").decode()  # half characters, which no tokenizer takes
        text = text.replace(_OPEN, "").replace(_CLOSE, "")
        return (self._any_said if is_assistant else self._any).sub(rf"{_OPEN}\g<0>{_CLOSE}", text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of what a template wrote; what is escaped in it is encoded as ordinary text."""
        ids: list[int] = []
        for i, piece in enumerate(_ESCAPED.split(text)):
            plain = piece.replace(_OPEN, "").replace(_CLOSE, "")
            if plain:
                ids += self._tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=bool(i % 2))
        return tuple(ids)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Pattern of any of these texts, the longest first; matches nothing where there is none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
