"""Games of TextArena that are offered, and the actions of each.

Offered are games that start without downloads and without a language model behind an address, come to their end, and
can be replayed from a seed; a family stands for all its levels of difficulty. What cannot be offered, and why, is in
docs/environments/textarena.md. The package lists no actions: here they are read off the state of a game.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

from environments.packages import import_from, version_of
from rlhf.errors import EnvError, MissingPackageError

EXTRA = "textarena"
_FLAT = ("[up]", "[down]", "[left]", "[right]")


@dataclass(frozen=True, slots=True)
class Family:
    """Games that differ in size alone.

    Attributes:
        n_players: one or two.
        levels: endings of their names in the package, after `-v0`.
        actions: what can be done in a state of the game; None where that would be too long a list.
        draws: whether the seed draws how the game begins and nothing later, so that the beginning is the task.
        beyond: levels that moves at random never solve, so that there is no oracle.
    """

    n_players: int
    levels: tuple[str, ...] = ("",)
    actions: Callable[[Any], Iterable[str]] | None = None
    draws: bool = False
    beyond: tuple[str, ...] = ()


def _unguessed(game: Any) -> Iterable[str]:
    numbers = range(game.min_number, game.max_number + 1)
    return (f"[{n}]" for n in numbers if n not in game.guessed_numbers)


def _cells(game: Any) -> Iterable[str]:
    return (f"[{r} {c}]" for r, c in product(range(game.size), repeat=2))


def _covered(game: Any) -> Iterable[str]:
    return (f"[{r} {c}]" for r, c in product(range(game.rows), range(game.cols)) if not game.revealed[r][c])


def _jumps(game: Any) -> Iterable[str]:
    board = game.state.game_state["board"]
    return (f"[{a} {b}]" for a, over, b in game.ALLOWED_MOVES if board[a] and board[over] and not board[b])


def _disks(game: Any) -> Iterable[str]:
    towers = game.state.game_state["towers"]
    pairs = ((a, b) for a, b in product(towers, repeat=2) if a != b and towers[a])
    return (f"[{a} {b}]" for a, b in pairs if not towers[b] or towers[b][-1] > towers[a][-1])


def _steps(game: Any) -> Iterable[str]:
    row, column = game.state.game_state["player_pos"]
    ways = zip(_FLAT, ((-1, 0), (1, 0), (0, -1), (0, 1)), strict=True)
    return (way for way, (r, c) in ways if 0 <= row + r < game.size and 0 <= column + c < game.size)


def _slides(game: Any) -> Iterable[str]:
    """Directions in which a tile moves or merges, each checked as a left slide of the turned board."""
    board = game.state.game_state["board"]
    columns = [list(column) for column in zip(*board, strict=True)]
    lines = {
        "[up]": columns,
        "[down]": [line[::-1] for line in columns],
        "[left]": board,
        "[right]": [line[::-1] for line in board],
    }
    return (way for way, rows in lines.items() if any(map(_slips, rows)))


def _slips(line: list[int]) -> bool:
    return any(b and (not a or a == b) for a, b in pairwise(line))


def _free(game: Any) -> list[int]:
    return [3 * r + c for r, c in product(range(3), repeat=2) if not game.state.game_state["board"][r][c]]


def _columns(game: Any) -> Iterable[str]:
    return (f"[col {c}]" for c, cell in enumerate(game.state.game_state["board"][0]) if cell == ".")


def _heaps(game: Any) -> Iterable[str]:
    return (f"[{i} {n}]" for i, pile in enumerate(game.state.game_state["piles"]) for n in range(1, pile + 1))


def _bets(game: Any) -> Iterable[str]:
    return (f"[{word}]" for word in game.state.game_state["current_legal_action_tree"])


def _stones(game: Any) -> Iterable[str]:
    found = game._valid_moves("B" if game.state.current_player_id == 0 else "W")
    return [f"[{r}, {c}]" for r, c in found] or ["[skip]"]


def _hands(game: Any) -> Iterable[str]:
    player = game.state.current_player_id
    own, others = game.state.game_state["hands"][player], game.state.game_state["hands"][1 - player]
    for i, j in product(range(2), repeat=2):
        if own[i] and others[j]:
            yield f"[attack {i} {j}]"
    total = sum(own)
    yield from (f"[split {n} {total - n}]" for n in range(total + 1) if n != own[0])


FAMILIES: Mapping[str, Family] = {
    "2048": Family(
        1, ("-ultra-easy", "-mega-easy", "-super-easy", "-very-easy", "-easy", ""), _slides, beyond=("-easy", "")
    ),
    "Blackjack": Family(1, ("", "-long"), lambda game: ("[hit]", "[stand]"), beyond=("", "-long")),
    "FrozenLake": Family(1, ("", "-random", "-hardcore"), _steps, draws=True),
    "GuessTheNumber": Family(1, ("", "-hardcore"), _unguessed, draws=True),
    "LightsOut": Family(1, ("",), _cells, draws=True, beyond=("",)),
    "Mastermind": Family(1, ("", "-hard", "-extreme"), None, draws=True),
    "Minesweeper": Family(1, ("-small", "", "-medium", "-hard"), _covered, beyond=("-medium", "-hard")),
    "PegJump": Family(1, ("",), _jumps),
    "Secretary": Family(1, ("", "-long"), lambda game: ("[accept]", "[continue]"), draws=True),
    "ThreeCardMonte": Family(1, ("",), lambda game: (f"[{i}]" for i in range(game.num_cups))),
    "TowerOfHanoi": Family(
        1,
        ("", "-medium", "-hard", "-hardcore", "-extreme"),
        _disks,
        beyond=("-medium", "-hard", "-hardcore", "-extreme"),
    ),
    "Chopsticks": Family(2, ("", "-medium", "-long"), _hands),
    "ConnectFour": Family(2, ("", "-large"), _columns),
    "KuhnPoker": Family(2, ("", "-short", "-medium", "-long", "-extreme"), _bets),
    "Nim": Family(2, ("", "-medium", "-large"), _heaps),
    "Othello": Family(2, ("-tiny", "-small", "", "-big", "-huge", "-hard"), _stones),
    "PigDice": Family(2, ("", "-short", "-long"), lambda game: ("[hold]", "[roll]"), beyond=("-long",)),
    "TicTacToe": Family(2, ("",), lambda game: (f"[{cell}]" for cell in _free(game))),
    "WildTicTacToe": Family(2, ("",), lambda game: (f"[{mark} {cell}]" for mark in "OX" for cell in _free(game))),
}

#: Every game on offer, by its name in the package.
GAMES: Mapping[str, Family] = {
    f"{name}-v0{level}": family for name, family in FAMILIES.items() for level in family.levels
}

#: The package draws from the generator that all of Python shares.
_LOCK = threading.Lock()


class Chance:
    """Random generator of an episode: within `with chance:` it replaces Python's shared one.

    The generator is given back as it was found. Of several episodes one draws at a time.
    """

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._found = random.getstate()
        random.setstate(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = random.getstate()
        random.setstate(self._found)
        _LOCK.release()

    @property
    def mark(self) -> int:
        """A number that is the same for the same chance, in every process."""
        return hash(self._state[1])


def version() -> str:
    """Version of the package. Raises MissingPackageError."""
    return version_of("textarena", EXTRA)


@cache
def _package() -> Any:
    """The package, imported without the downloads that some of its modules begin when they are imported."""
    version()
    found = random.getstate()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return import_from("textarena", "textarena", EXTRA)
    finally:
        random.setstate(found)


def new_game(name: str, seed: int, chance: Chance) -> Any:
    """Begin a game of the package, without its wrappers.

    Raises:
        EnvError: it does not begin with this seed.
        MissingPackageError: the package is not installed.
    """
    package = _package()
    try:
        with chance:
            game = package.make(f"{name}-raw")
            game.reset(num_players=GAMES[name].n_players, seed=seed)
    except MissingPackageError:
        raise
    except Exception as error:
        raise EnvError("TextArena could not start this game", where=name, got=f"seed {seed}: {error!r}") from error
    return game


def plain(value: Any) -> Any:
    """`value` as nested tuples whose `repr` is the same in every process, for keys of states."""
    if isinstance(value, Mapping):
        return tuple(sorted(((repr(key), plain(found)) for key, found in value.items()), key=lambda pair: pair[0]))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return type(value).__name__
