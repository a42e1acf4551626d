"""Text normalisation of actions and names: case, quotes and full stops are ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LEFT_OUT = r"\s_\-.!\"'`*"


def plain_words(text: str, most: int = 60, left_out: str = _LEFT_OUT) -> str:
    """Lower-case `text`, one space for each run of `left_out`; empty beyond `most` characters."""
    return "" if len(text) > most else " ".join(re.sub(f"[{left_out}]+", " ", text.lower()).split())


def plain(text: str, most: int = 200) -> str:
    """The same without commas, colons, question marks and brackets."""
    return plain_words(text, most, _LEFT_OUT + r",:;?()\[\]{}<>")


def named(text: str, known: Iterable[str]) -> list[str]:
    """Names of `known` that `text` mentions, as whole words in any case, in order of mention."""
    said = f" {plain(text)} "
    found = ((said.find(f" {plain(name)} "), name) for name in known)
    return [name for at, name in sorted(found) if at >= 0]


def words(text: str) -> tuple[str, ...]:
    """Split a list of words that is written as one text."""
    return tuple(text.split())


NAMES = words(
    "Ada Alan Amy Ben Bo Cleo Dan Dora Eli Emma Finn Gil Hana Hugo Ida Ivan Jan Jill Kai Kim Lara Leo Lou Max Mia "
    "Nell Nils Noah Olga Otto Pia Rex Rosa Sam Sara Theo Tom Una Vera Will Zoe Zack"
)
PLACES = words("Athens Berlin Cairo Delhi Lima London Madrid Milan Oslo Paris Prague Rome Seoul Tokyo Vienna Zurich")
