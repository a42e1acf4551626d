"""A game of TextWorld in play: the package's interpreter, read and guarded.

The interpreter is a C program that reads one line at a time and has commands of its own: `quit` ends it, `undo` takes a
step back that the package does not notice, `save` and `script` write files, and a full stop or "then" puts several
actions into one line. None of these reaches it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from environments.contrib.instance_pool import InstancePool
from environments.contrib.textworld.generate import EXTRA, Game
from environments.packages import import_from
from rlhf.errors import EnvError

#: Answer to text that is not handed to the interpreter.
NOT_UNDERSTOOD = "That's not something I can do."

_MOST_LETTERS = 120
_TEXT = re.compile(r"[a-z0-9 ',/()-]+", re.IGNORECASE)
# Commands about the program rather than in the game: all that the interpreter and Inform's library know.
_META = (
    "quit q restart restore save script unscript transcript noscript undo oops o again g verify version recording "
    "replay score fullscore notify pronouns nouns places objects brief normal verbose long superbrief short die "
    "actions changes trace goto gonear purloin abstract scenes rules relations responses showme showverb showheap test "
    "random routines messages timers daemons scope tree glklist verb"
)
_META_VERBS = frozenset(_META.split())
_SEVERAL = re.compile(r"\bthen\b", re.IGNORECASE)
# What Inform's library says to a line that it cannot read; an action that merely fails is understood.
_COMPLAINTS = re.compile(
    r"That's not a verb I recogni[sz]e"
    r"|You can't see any such thing"
    r"|I only understood you as far as"
    r"|I didn't understand"
    r"|I beg your pardon"
    r"|What do you want to "
    r"|Which do you mean,"
    r"|Who do you mean,"
    r"|You seem to have said too little"
    r"|You excepted something not included"
    r"|You can't use multiple objects"
    r"|You have to be more specific"
    r"|I'm not sure what"
    r"|Can't see \"?him|Can't see \"?it"
    r"|That can't be repeated"
    r"|Nothing to do!"
    r"|There are none at all available|None of those is available|Only \w+ of those "
    r"|You'll have to say which"
)
_STATUS_LINE = re.compile(r"\n>[ \t]*-= [^\n]*=-[ \t]*-?\d+/\d+\s*\Z|\n>[ \t]*(-?\d+/\d+)?\s*\Z")
_AFTER_THE_END = re.compile(r"\n+Would you like to RESTART.*\Z", re.DOTALL)
_BANNER_LINE = re.compile(r"^[\\$_|<>/ \t]{20,}\n", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*\n[ \t\n]*")

_load_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class State:
    """State of a game after an action.

    Attributes:
        text: the answer, without banner and status line.
        actions: what the package finds possible, sorted.
        score: points so far.
        won: the game is won.
        lost: it is lost.
        key: hash of the facts that hold, whatever led there.
        understood: the interpreter could read the action.
    """

    text: str
    actions: tuple[str, ...]
    score: int
    won: bool
    lost: bool
    key: str
    understood: bool = True

    @property
    def over(self) -> bool:
        """True if the game has ended."""
        return self.won or self.lost


class Play:
    """Game that can be replayed from its start, by one thread at a time."""

    def __init__(self, game: Game, *, plans: bool = False) -> None:
        """Load `game`; with `plans`, the package follows its quests, which costs time at every step."""
        textworld = import_from("textworld", "textworld", EXTRA)
        asked = textworld.EnvInfos(admissible_commands=True, facts=True, policy_commands=plans)
        self.game = game
        with _load_lock:  # the parser of the logic is one object in the whole process
            self._env = textworld.start(str(game.path), asked)
        self._env.seed(0)  # no text depends on it, but unset it would be the time of day
        self._latest: State | None = None
        self._commands: Sequence[str] | None = None

    def begin(self) -> State:
        """Start from the beginning."""
        self._latest = self._read(self._env.reset())
        return self._latest

    def step(self, action: str) -> State:
        """Do one action. Raises EnvError where the interpreter has ended by itself."""
        if self._latest is None or self._latest.over:
            raise EnvError("the game is over", where="TextWorld step", got=action[:80])
        words = action.strip()
        if words not in self._latest.actions and not readable(words):
            told = self._latest
            return State(NOT_UNDERSTOOD, told.actions, told.score, told.won, told.lost, told.key, understood=False)
        try:
            state = self._env.step(words)[0]
        except Exception as error:
            self._latest = None
            raise EnvError("the interpreter failed", where="TextWorld step", got=f"{action[:80]!r}: {error}") from error
        self._latest = self._read(state)
        return self._latest

    def winning_commands(self) -> tuple[str, ...]:
        """Actions that the package believes to win from here; only where `plans` was asked for."""
        return tuple(self._commands or ())

    @property
    def usable(self) -> bool:
        """True if the interpreter still runs."""
        return self._latest is not None

    def close(self) -> None:
        """End the interpreter and free its memory."""
        self._latest = None
        self._env.close()

    def _read(self, state: Any) -> State:
        text = state["feedback"]
        self._commands = state.get("policy_commands")
        won, lost, score = bool(state["won"]), bool(state["lost"]), int(state["score"] or 0)
        facts = sorted(str(fact) for fact in state["_facts"])
        key = hashlib.blake2b(repr((facts, score, won, lost)).encode(), digest_size=8).hexdigest()
        actions = () if won or lost else tuple(state["admissible_commands"])
        return State(clean(text), actions, score, won, lost, key, _COMPLAINTS.search(text) is None)


def readable(words: str) -> bool:
    """True if `words` may go to the interpreter: a one-line action of plain letters, no meta-command."""
    if not words or len(words) > _MOST_LETTERS or _TEXT.fullmatch(words) is None or _SEVERAL.search(words):
        return False
    first = words.lower().replace(",", " ").split()
    return bool(first) and first[0] not in _META_VERBS and not first[0].startswith("tw-")


def clean(text: str) -> str:
    """Text without banner, status line, prompt, final menu and needless blank lines."""
    text = _STATUS_LINE.sub("", text.replace("\r", ""))
    text = _AFTER_THE_END.sub("", text)
    text = _BANNER_LINE.sub("", text)
    return _BLANK_LINES.sub("\n\n", text).strip()


#: Games that were loaded and are not in play, as many as a worker process has under way. Loading one takes 50 ms and
#: 2 MB, a new beginning 20 ms.
POOL: InstancePool[Game, Play] = InstancePool(
    Play, lambda play: play.game, most=32, close=Play.close, is_usable=lambda play: play.usable
)
