"""Sessions of ScienceWorld: each is a Java virtual machine of its own with one game in it.

The simulator draws from random state of the whole machine and numbers its objects there, so a machine plays one game at
a time. By default it also puts objects in the order of their addresses, another one each time: a flag takes numbers
from one row instead, and with it a game that is played again goes as it went.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.contrib.instance_pool import InstancePool
from environments.packages import content_hash, import_from, version_of
from rlhf.errors import EnvError

if TYPE_CHECKING:
    from environments.contrib.jvm import Jvm

EXTRA = "scienceworld"
#: How the simulator begins its answer where an action may mean several things; a number has to follow.
AMBIGUOUS = "Ambiguous request"

_FLAGS = (
    "-Xmx384m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
_NOT_UNDERSTOOD = ("No known action matches that input.", "Unknown action.")
_MOST_LETTERS = 300


@dataclass(frozen=True, slots=True)
class State:
    """State of a game after an action.

    Attributes:
        text: the answer.
        score: from 0 to 100; below 0 after a mistake that cannot be made good.
        completed: the simulator has ended the task.
        key: hash of every object with all its properties, the score, and a question that waits for its answer.
        understood: the simulator could read the action.
    """

    text: str
    score: int
    completed: bool
    key: str
    understood: bool = True

    @property
    def over(self) -> bool:
        """True if the task has ended."""
        return self.completed or self.score < 0

    @property
    def choices(self) -> tuple[str, ...]:
        """The numbers that may answer an ambiguous request; empty otherwise."""
        if not self.text.startswith(AMBIGUOUS):
            return ()
        lines = (line.partition(":")[0].strip() for line in self.text.splitlines()[1:])
        return tuple(sorted(number for number in lines if number.isdecimal()))


class Session:
    """Plays one game after another in its own Java virtual machine. Used by one thread at a time.

    Raises:
        MissingPackageError: scienceworld or Java is missing.
        EnvError: Java does not start.
    """

    def __init__(self) -> None:
        jar = Path(import_from("scienceworld.constants", "scienceworld", EXTRA).JAR_PATH)
        jvm: Any = importlib.import_module("environments.contrib.jvm")
        self.jvm: Jvm = jvm.Jvm(jvm.find_java(), [jar], jar.parent, call_limit_s=120.0, flags=_FLAGS)
        self._java = self.jvm.call(lambda: self.jvm.view.scienceworld.runtime.pythonapi.PythonInterface())

    def begin(self, task: str, variation: int, simplifications: str, *, gold: bool = False) -> State:
        """Start a task; as the package does, its first action is to look around."""
        said = self.jvm.call(self._java.load, task, variation, simplifications, gold)
        if said:
            raise EnvError("the task cannot be loaded", where=f"scienceworld {task}", got=str(said)[:300])
        self.jvm.call(self._java.reset)
        return self.step("look around")

    def step(self, action: str) -> State:
        """Do one action. Text that the simulator should not see is replaced by text that it cannot read."""
        action = action.strip()
        seen = action if len(action) <= _MOST_LETTERS and action.isascii() and action.isprintable() else "?"
        text = str(self.jvm.call(self._java.step, seen or "?")).strip()
        score = round(100 * self.jvm.call(self._java.getScore))
        completed = bool(self.jvm.call(self._java.getCompleted))
        return State(text, score, completed, self._key(text, score), not text.startswith(_NOT_UNDERSTOOD))

    def actions(self) -> tuple[str, ...]:
        """All valid actions, sorted: some hundreds, and several times as costly as a step."""
        return tuple(sorted(set(self._texts(self.jvm.call(self._java.getValidActionObjectCombinations)))))

    def description(self) -> str:
        """Say the task in some sentences."""
        return str(self.jvm.call(self._java.getTaskDescription)).strip()

    def gold_path(self) -> tuple[str, ...]:
        """Return actions that solve the task begun with `gold=True`, in the simulator's opinion."""
        return self._texts(self.jvm.call(self._java.getGoldActionSequence))

    def close(self) -> None:
        """End the machine."""
        self.jvm.close()

    def _texts(self, listed: Any) -> tuple[str, ...]:
        text = self.jvm.call(lambda: self.jvm.view.java.lang.String.join("\n", listed))
        self.jvm.free(listed)
        return tuple(filter(None, text.split("\n")))

    def _key(self, text: str, score: int) -> str:
        # The simulator tells its objects in a file only. A folder for each time: a worker that is ended leaves none.
        with tempfile.TemporaryDirectory(prefix="rlhf-scienceworld-") as folder:
            complaint = self.jvm.call(self._java.getObjectTree, folder)
            if complaint:
                raise EnvError("the simulator does not tell its state", where="scienceworld", got=str(complaint)[:300])
            digest = hashlib.blake2b(Path(folder, "objectTree.json").read_bytes(), digest_size=8)
        progress = str(self.jvm.call(self._java.getGoalProgressStr))
        question = text if text.startswith(AMBIGUOUS) else ""
        digest.update(json.dumps([score, progress, question]).encode())
        return digest.hexdigest()


#: Machines of this process that play nothing now.
POOL: InstancePool[None, Session] = InstancePool(
    lambda _: Session(), lambda _: None, most=2, close=Session.close, is_usable=lambda session: session.jvm.alive
)


def release() -> str:
    """Name of the package: version and hash of its files. Raises MissingPackageError, EnvError."""
    return f"{version_of('scienceworld', EXTRA)}-{content_hash('scienceworld', EXTRA, 'scienceworld/')}"


atexit.register(POOL.clear)
os.register_at_fork(after_in_child=POOL.forget)
