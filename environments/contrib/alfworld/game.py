"""A game of ALFWorld in play: TextWorld's engine for games in PDDL, read and made quicker.

The engine parses its grammar anew at every step, with one parser for the whole process, and translates the problem four
times for each game. What it parses and translates is kept here, and copied where the engine writes into it: three times
the steps a second, with the same texts. A loaded engine is used for one game after another, because each holds a copy
of the planner's library that is never given back.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from environments.contrib.alfworld.generate import EXTRA, fingerprint
from environments.contrib.alfworld.oracle import CHANGING, State, names_of
from environments.contrib.instance_pool import InstancePool
from environments.packages import import_from, version_of
from rlhf.errors import EnvError

_MOST_LETTERS = 200

_engine_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class View:
    """State of a game after an action.

    Attributes:
        text: the answer.
        actions: what is possible, sorted.
        won: whether the goal is reached.
        key: hash of the game and of what holds in it, without what was looked at.
        understood: whether the action was possible; nothing happens otherwise.
    """

    text: str
    actions: tuple[str, ...]
    won: bool
    key: str
    understood: bool = True


class Play:
    """Plays one game after another; used by one thread at a time.

    Raises:
        MissingPackageError: textworld or the planner that it loads is not installed.
    """

    def __init__(self) -> None:
        version_of("fast-downward-textworld", EXTRA)
        _make_quicker()
        self._env = _pddl().PddlEnv(import_from("textworld", "textworld", EXTRA).EnvInfos(admissible_commands=True))
        self.game: str = ""
        self._view: View | None = None

    def load(self, game: Mapping[str, Any]) -> None:
        """Take another game, or the same again. Raises EnvError where the engine cannot read it."""
        name = fingerprint(game)
        if name == self.game:
            return
        self.game = ""
        try:
            with _engine_lock:
                self._env.load(dict(game))
        except Exception as error:
            raise EnvError("the engine cannot load the game", where="ALFWorld", got=repr(error)[:300]) from error
        infos = self._env._entity_infos
        names = names_of(one for one in infos if "_bar_" in one)
        for one, info in infos.items():
            info.name = names.get(one, one)
        self.game = name

    def begin(self) -> View:
        """Start from the beginning."""
        with _engine_lock:
            self._view = self._read(self._env.reset())
        return self._view

    def step(self, action: str) -> View:
        """Do one action; the engine takes none but those it lists."""
        if self._view is None or self._view.won:
            raise EnvError("the game is over", where="ALFWorld step", got=action[:80])
        words = action.strip()[:_MOST_LETTERS]
        understood = words in self._view.actions
        if understood:
            with _engine_lock:
                self._view = self._read(self._env.step(words)[0])
            return self._view
        told = self._view
        return View("Nothing happens.", told.actions, told.won, told.key, understood=False)

    def state(self) -> State:
        """Present state of the world."""
        return State.of([(fact.name, *(word.name for word in fact.arguments)) for fact in self._env.state["_facts"]])

    def _read(self, state: Any) -> View:
        facts = sorted(str(fact) for fact in state["_facts"] if fact.name in CHANGING)
        key = hashlib.blake2b(repr((self.game, facts)).encode(), digest_size=8).hexdigest()
        won = bool(state["won"])
        return View(state.feedback.strip(), () if won else tuple(state["admissible_commands"]), won, key)


#: Engines that are not in play. Any of them takes any game, and one that has it already takes it at once.
POOL: InstancePool[str, Play] = InstancePool(lambda _: Play(), lambda play: play.game, most=2, any_will_do=True)


def loaded(game: Mapping[str, Any]) -> Play:
    """Return an idle engine with this game loaded. Raises MissingPackageError, EnvError."""
    with POOL.kept(fingerprint(game)) as play:
        play.load(game)
        return play


def _pddl() -> Any:
    return import_from("textworld.envs.pddl", "fast-downward-textworld", EXTRA)


@cache
def _make_quicker() -> None:
    """Cache the engine's parsed texts, translated symbols, fact queries and last problems."""
    texts = import_from("textworld.envs.pddl.textgen", "textworld", EXTRA)
    rule = import_from("textworld.logic", "textworld", EXTRA).Rule
    planner = import_from("fast_downward", "fast-downward-textworld", EXTRA)
    planner.pddl2sas = lru_cache(maxsize=8)(planner.pddl2sas)
    texts._parse_and_convert = _kept_copies(texts._parse_and_convert)
    rule.parse_conjunctive_query = staticmethod(lru_cache(maxsize=4096)(rule.parse_conjunctive_query))


def _kept_copies(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Cached `parse`, whose results are copied, as the engine modifies the symbols."""
    kept = lru_cache(maxsize=4096)(lambda text, rule_name: parse(text, rule_name=rule_name))

    def copied(text: str, rule_name: str, **_: Any) -> Any:
        return copy.deepcopy(kept(text, rule_name))

    return copied
