"""Wordle: find a hidden word of five letters; each guess is answered letter by letter.

    > crane
    c r a n e
    - y G - -

`G` stands under a letter in its right place, `y` under one that belongs elsewhere, `-` under one that is not in the
word, or not so often. The words are a list of our own; any five letters may be guessed.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.contrib.wordle_words import WORDS
from environments.core.normalise import plain_words
from environments.core.procedural import Attempts, Drawn, Judged, digest
from rlhf.data import Task
from rlhf.settings import STRICT

_RULES = (
    "Find a hidden word of five letters. Each guess is answered with a mark under each letter: G right place, "
    "y elsewhere in the word, - not in the word, or not so often.\nAnswer with a word."
)
_MOST_LISTED, _MOST_WEIGHED = 50, 60


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wordle(Drawn):
    """Find a word of five letters by guesses that are answered letter by letter; pure Python."""

    words: Annotated[int, Field(ge=10, le=len(WORDS))] = len(WORDS)
    """The hidden word is among so many of the list, commoner words first; up to 50 are offered as actions."""
    max_steps: Annotated[int, Field(ge=1)] = 6
    """Guesses at one word."""

    name: ClassVar[str] = "wordle"

    @property
    def level(self) -> str:
        """Level: number of words."""
        return str(self.words)

    def draw(self, rng: random.Random) -> str:
        """Draw a word. A word is in one split alone, so a split has as many tasks as words."""
        return rng.choice(WORDS[: self.words])

    def start(self, task: Task) -> Attempts:
        """Begin one attempt at a task."""
        hidden: str = self.instance(task)
        return Attempts(
            _RULES,
            lambda text: _judge(hidden, text),
            name=f"wordle/{digest(hidden)}",
            max_steps=self.max_steps,
            admissible=WORDS[: self.words] if self.words <= _MOST_LISTED else (),
            unit="guess",
        )

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give guesses that lead to the word after `taken`; None where too few are left.

        The guesses are those of someone who knows the list and the answers so far, not the word: see `best_guess`.
        """
        hidden: str = self.instance(task)
        guesses = [guess for text in taken if (guess := read_guess(text)) is not None]
        left = self.max_steps - len(taken)
        if hidden in guesses[: self.max_steps]:
            return ()
        known = [(guess, marks(guess, hidden)) for guess in guesses]
        path: list[str] = []
        while len(path) < left:
            path.append(best_guess(self.words, tuple(known)))
            if path[-1] == hidden:
                return tuple(path)
            known.append((path[-1], marks(path[-1], hidden)))
        return None


def read_guess(text: str) -> str | None:
    """Return the five letters that `text` names, apart or together, or None."""
    guess = plain_words(text)
    guess = re.sub(r"^(?:guess|word|answer|my guess is|i guess)\s*:?\s+", "", guess)
    if re.fullmatch(r"[a-z](?:[ ,]+[a-z]){4}", guess):
        guess = re.sub(r"[ ,]+", "", guess)
    return guess if re.fullmatch(r"[a-z]{5}", guess) else None


@lru_cache(maxsize=1 << 17)
def marks(guess: str, hidden: str) -> str:
    """Marks of a guess by letter: G, y or -; as often as the word has the letter, right places first."""
    free = Counter(h for g, h in zip(guess, hidden, strict=True) if g != h)
    found = []
    for g, h in zip(guess, hidden, strict=True):
        if g != h and free[g] > 0:
            free[g] -= 1
            found.append("y")
        else:
            found.append("G" if g == h else "-")
    return "".join(found)


@lru_cache(maxsize=4096)
def best_guess(n_words: int, known: tuple[tuple[str, str], ...]) -> str:
    """Consistent word of the highest expected information, by the entropy of the answers.

    Where very many fit, only some of them, evenly spread over the list, are weighed.
    """
    fitting = [word for word in WORDS[:n_words] if all(marks(guess, word) == answer for guess, answer in known)]
    weighed = fitting[:: math.ceil(len(fitting) / _MOST_WEIGHED)]

    def told(guess: str) -> float:
        counts = Counter(marks(guess, word) for word in fitting)
        return -sum(n * math.log(n) for n in counts.values())

    return max(weighed, key=told)


def _judge(hidden: str, text: str) -> Judged:
    guess = read_guess(text)
    if guess is None:
        return Judged("Not a word of five letters.", None)
    shown = f"{' '.join(guess)}\n{' '.join(marks(guess, hidden))}"
    return Judged(shown, guess, solved=guess == hidden)
