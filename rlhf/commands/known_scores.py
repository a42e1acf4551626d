"""What chance and the oracles are known to do: figures of the pages, pinned there by tests of each environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """One row of a page.

    Attributes:
        page: below `docs/`, where the row stands with what it was measured on.
        settings: what the environment is, as the row says it.
        random: solved by uniformly random actions; `-` where none are listed.
        oracle: solved by the oracle.
    """

    page: str
    settings: str
    random: str
    oracle: str


_FRONT, _GAMES = "environments.md", "environments/games.md"
_TOOLS = "environments/tools_and_memory.md"

#: For each kind the setting that is nearest to its defaults, or to its suite.
KNOWN: Mapping[str, Known] = {
    "textworld_express": Known(_FRONT, "`arithmetic`", "1 of 40", "40 of 40"),
    "babyai": Known(_FRONT, "`GoToObj`", "24%", "50 of 50"),
    "keyhole": Known(_FRONT, "`keyhole/keyhole-*`", "2.0%", "200 of 200"),
    "sokoban": Known(_GAMES, "6 x 6, one box", "25 of 100", "100 of 100"),
    "countdown": Known(_GAMES, "three numbers", "16 of 100", "100 of 100"),
    "sat": Known(_GAMES, "3-5-15", "40 of 100", "100 of 100"),
    "knights_and_knaves": Known(_GAMES, "three people", "32 of 100", "100 of 100"),
    "wordle": Known(_GAMES, "all words", "1 of 100", "100 of 100"),
    "twenty_questions": Known(_GAMES, "16 things", "15 of 100", "100 of 100"),
    "bandit": Known(_GAMES, "4 levers", "0 of 100", "100 of 100"),
    "matrix_game": Known(_GAMES, "prisoner's dilemma", "4 of 100", "100 of 100"),
    "toy_text": Known(_GAMES, "`frozen_lake`", "10 of 100", "100 of 100"),
    "long_memory": Known(_TOOLS, "the defaults", "0", "100"),
    "objectives": Known(_TOOLS, "`k: 4`", "0", "100"),
    "search_qa": Known(_TOOLS, "`hops: 1`", "18", "100"),
    "tools": Known(_TOOLS, "the defaults", "-", "100"),
    "text_to_sql": Known(_TOOLS, "`questions: [join]`", "-", "100"),
    "shop": Known(_TOOLS, "the defaults", "1", "100"),
    "collaborate": Known(_TOOLS, "the defaults", "0", "100"),
}
