"""Sessions of TextWorldExpress: games in play inside the one Java virtual machine of this process.

The machine takes 0.3 s to start, and a session 10 ms to load what its game is generated from; a further game in a
loaded session takes 0.4 ms. So the machine is shared, and sessions are kept and used again.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from environments.contrib.instance_pool import InstancePool
from environments.packages import import_from
from rlhf.errors import EnvError

if TYPE_CHECKING:
    from environments.contrib.jvm import Jvm

DISTRIBUTION, EXTRA = "textworld-express", "twx"

Split = Literal["train", "dev", "test"]

#: What the package answers to text that is none of the valid actions; nothing else changes then.
UNKNOWN_ACTION = "Unknown action: I'm not sure what you mean."

_BLANK = "".join(map(chr, range(33)))  # what Java's `trim` takes away


@dataclass(frozen=True, slots=True)
class State:
    """State of a game after an action.

    Attributes:
        text: the answer to the action.
        look: what there is to see here; empty in `simonsays`.
        inventory: what is carried; empty in `simonsays`.
        actions: valid actions, sorted, each once.
        score: 1 when solved; below 0 after a mistake that ends some games.
        success: the task is solved.
        failure: the task cannot be solved any more.
        understood: the action was a valid one.
    """

    text: str
    look: str
    inventory: str
    actions: tuple[str, ...]
    score: float
    success: bool
    failure: bool
    understood: bool = True

    @property
    def over(self) -> bool:
        """True if the game has ended."""
        return self.success or self.failure


class Session:
    """Plays one game after another, all with the same generation parameters. Used by one thread at a time."""

    def __init__(self, jvm: Jvm, game: str, parameters: str) -> None:
        self.jvm, self.key = jvm, (game, parameters)
        self._java = jvm.call(lambda: jvm.view.textworldexpress.runtime.PythonInterface())
        complaint = jvm.call(self._java.load, game, parameters)
        if complaint:
            self.free()
            raise EnvError("the game cannot be generated", where=f"textworld-express {game}", got=complaint)

    def begin(self, seed: int, split: Split, *, gold: bool = False) -> State:
        """Generate a game. Raises EnvError also where the package finds none for this seed and these parameters."""
        self._state = _read(self.jvm.call(self._java.generateNewGameJSON, seed, split, gold))
        return self._state

    def step(self, action: str) -> State:
        """Do one action; blanks around it do not count."""
        action = action.strip(_BLANK)
        if action in self._state.actions:
            self._state = _read(self.jvm.call(self._java.stepJSON, action))
            return self._state
        # As the package does it, without sending it any text that a model may come up with.
        return replace(self._state, text=UNKNOWN_ACTION, understood=False)

    def description(self) -> str:
        """Say the task in a sentence or two."""
        return str(self.jvm.call(self._java.getTaskDescription)).strip()

    def gold_path(self) -> tuple[str, ...]:
        """Return actions that solve the game begun with `gold=True`; in some games they wander at random."""
        actions = self.jvm.call(self._java.getGoldActionSequence)
        text = self.jvm.call(lambda: self.jvm.view.java.lang.String.join("\n", actions))
        self.jvm.free(actions)
        return tuple(text.split("\n")) if text else ()

    def seeds(self, split: Split) -> tuple[int, ...]:
        """Return the package's seeds of a split, in its order."""
        method = getattr(self._java, {"train": "getSeedsTrain", "dev": "getSeedsDev", "test": "getSeedsTest"}[split])
        numbers = self.jvm.call(method)
        text = self.jvm.call(numbers.toString)
        self.jvm.free(numbers)
        return tuple(json.loads(text))

    def free(self) -> None:
        """Let Java forget this session."""
        self.jvm.free(self._java)


class _SharingSession(Session):
    """Session of a game whose objects are shared in the machine, so that a new game invalidates older ones.

    A game that lost its things is played again up to where it was, before its next step.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _owner: ClassVar[Session | None] = None

    def begin(self, seed: int, split: Split, *, gold: bool = False) -> State:
        with self._lock:
            self._game, self._taken = (seed, split), list[str]()
            _SharingSession._owner = self
            return super().begin(seed, split, gold=gold)

    def step(self, action: str) -> State:
        with self._lock:
            if _SharingSession._owner is not self:
                _SharingSession._owner = self
                super().begin(*self._game)
                for earlier in self._taken:
                    super().step(earlier)
            state = super().step(action)
            if state.understood:
                self._taken.append(action)
            return state


#: Found by playing two games at once; the other games keep their things apart.
_KIND_OF_SESSION: Mapping[str, type[Session]] = {"sorting": _SharingSession}


def _read(text: str) -> State:
    told = json.loads(text)
    return State(
        text=told["observation"].strip(),
        look=told["look"].strip(),
        inventory=told["inventory"].strip(),
        actions=tuple(sorted(set(told["validActions"]))),
        score=told["score"],
        success=told["tasksuccess"],
        failure=told["taskfailure"],
    )


class _Machine:
    """The machine of this process, which all its sessions share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.jvm: Jvm | None = None

    def running(self) -> Jvm:
        """Give the machine, starting one where there is none, or none alive."""
        with self._lock:
            if self.jvm is not None and not self.jvm.alive:
                self.jvm.close()
                self.jvm = None
            self.jvm = self.jvm or start_jvm()
            return self.jvm

    def close(self) -> None:
        with self._lock:
            jvm, self.jvm = self.jvm, None
        if jvm is not None:
            jvm.close()

    def forget(self) -> None:
        """Leave the machine to the parent, in a process that was forked off.

        It stays referred to: freed connections are shut down, and these are the parent's, too.
        """
        self._lock, self._parents, self.jvm = threading.Lock(), self.jvm, None


_MACHINE = _Machine()
#: Sessions that are not in use.
POOL: InstancePool[tuple[str, str], Session] = InstancePool(
    lambda key: open_session(_MACHINE.running(), *key),
    lambda session: session.key,
    most=256,
    close=Session.free,
    is_usable=lambda session: session.jvm.alive,
)


def open_session(jvm: Jvm, game: str, parameters: str) -> Session:
    """Make a session in a machine of one's own. Raises EnvError."""
    return _KIND_OF_SESSION.get(game, Session)(jvm, game, parameters)


@contextmanager
def borrowed(game: str, parameters: str) -> Iterator[Session]:
    """Lend a session for the length of a `with` block; one that failed is not used again.

    Raises:
        MissingPackageError: textworld-express or Java is missing.
        EnvError: Java does not start, or the package refuses the parameters.
    """
    session = POOL.take((game, parameters))
    try:
        yield session
    except BaseException:
        session.free()
        raise
    POOL.give_back(session)


def close_jvm() -> None:
    """Close this process's JVM; episodes in play fail, and the next one starts a new JVM."""
    _MACHINE.close()
    POOL.clear()


def start_jvm(call_limit_s: float = 30.0) -> Jvm:
    """Start a machine of its own for TextWorldExpress. Raises MissingPackageError, EnvError."""
    jar = Path(import_from("textworld_express.constants", DISTRIBUTION, EXTRA).JAR_PATH)
    jvm: Any = importlib.import_module("environments.contrib.jvm")
    machine: Jvm = jvm.Jvm(jvm.find_java(), [jar], jar.parent, call_limit_s=call_limit_s)
    return machine


atexit.register(close_jvm)
os.register_at_fork(after_in_child=POOL.forget)
os.register_at_fork(after_in_child=_MACHINE.forget)
