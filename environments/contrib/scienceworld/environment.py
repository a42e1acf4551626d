"""ScienceWorld's 30 science tasks in a house of ten rooms (Wang et al., arXiv 2203.07540).

    ScienceWorld(task="find-plant")

The variations of each task are split as the package splits them: 3592 for `train`, 1796 for `dev`, 1819 for `test`. The
figure of an attempt is its score, from 0 to 100; below 0 is a mistake that ends the task, and counts as 0. Solved is a
score of 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, ClassVar

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.contrib.scienceworld import oracle
from environments.contrib.scienceworld.sessions import EXTRA, POOL, Session, State, release
from environments.core.procedural import Attempt
from environments.core.seed_splits import of_another, refuse_unknown
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import RecipeError, nearest
from rlhf.settings import STRICT

#: The tasks and how many variations each has, as scienceworld 1.2.3 lists them.
VARIATIONS: Mapping[str, int] = {
    "boil": 30, "melt": 30, "freeze": 30, "change-the-state-of-matter-of": 30, "use-thermometer": 540,
    "measure-melting-point-known-substance": 436, "measure-melting-point-unknown-substance": 300, "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20, "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600, "find-living-thing": 300, "find-non-living-thing": 300,
    "find-plant": 300, "find-animal": 300, "grow-plant": 126, "grow-fruit": 126, "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36, "chemistry-mix-paint-tertiary-color": 36, "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125, "lifespan-longest-lived-then-shortest-lived": 125, "identify-life-stages-1": 14,
    "identify-life-stages-2": 10, "inclined-plane-determine-angle": 168, "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162, "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}  # fmt: skip

#: What makes the simulator simpler; `easy` stands for all of them.
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScienceWorld:
    """ScienceWorld task, or all of them. Each game runs in a Java virtual machine of its own."""

    #: Maximal number of episodes alive in one process: each holds 200 to 400 MB.
    max_episodes: ClassVar[int] = 4

    task: str = "all"
    """Name of a task, or `all`: then the first variation of each comes first, then the second of each, and so on."""
    simplifications: tuple[str, ...] = ("easy",)
    """Simplifications: `easy`, or some of teleportAction, selfWateringFlowerPots, openContainers, openDoors and
    noElectricalAction, or none."""
    n_variations: Annotated[int, Field(ge=1)] | None = None
    """At most so many variations of each task in each split, the first ones; null is all."""
    max_steps: Annotated[int, Field(ge=1)] = 100
    """Maximum steps per episode; longer ones are truncated."""
    list_actions: bool = True
    """List valid actions: some hundreds, which takes four times as long as the step. Without an agent that is shown
    them, set it to false."""

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str) -> str:
        if task != "all" and task not in VARIATIONS:
            near = nearest(task, VARIATIONS) or f"all, or {', '.join(VARIATIONS)}"
            raise ValueError(f"no task of ScienceWorld is called '{task}'; {near}")
        return task

    def __post_init__(self) -> None:
        for i, name in enumerate(self.simplifications):
            if name not in SIMPLIFICATIONS:
                raise RecipeError(
                    "no simplification has this name",
                    where=f"simplifications[{i}]",
                    got=repr(name),
                    expected=", ".join(SIMPLIFICATIONS),
                    hint=nearest(name, SIMPLIFICATIONS),
                )
        electrical = [name for name in self._names if "power-component" in name or "conductivity" in name]
        if "noElectricalAction" in self.simplifications and electrical:
            raise RecipeError(
                "the task cannot be solved without electrical actions",
                where="simplifications",
                got=f"noElectricalAction, task {electrical[0]}",
                hint="choose another task, or leave it out",
            )

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when scienceworld is not installed."""
        return Properties(
            deterministic=True,
            replayable=True,
            oracle=True,
            splits=SPLITS,
            package=f"scienceworld {version_of('scienceworld', EXTRA)}",
            isolated=True,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`. No Java is started.

        Raises:
            EnvError: no such split.
            MissingPackageError: scienceworld is not installed.
        """
        refuse_unknown(split, SPLITS, "ScienceWorld.tasks")
        rows = [[(name, i) for i in _variations(name, split)[: self.n_variations]] for name in self._names]
        pairs = [pair for column in zip_longest(*rows) for pair in column if pair is not None]
        prefix = self._prefix
        return [
            Task(id=f"{prefix}/{name}/{split}/{i}", seed=i, info={"task": name, "variation": i}) for name, i in pairs
        ]

    def start(self, task: Task) -> ScienceWorldEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another environment or package version.
            EnvError: Java failed.
            MissingPackageError: scienceworld or Java is missing.
        """
        name, variation = self._known(task)
        session = POOL.take(None)
        try:
            state = session.begin(name, variation, self._simplifications)
            return ScienceWorldEpisode(session, state, self.max_steps, self.list_actions)
        except BaseException:
            session.close()
            raise

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that reach 100 points after `taken` within the step limit, tried out before; or None.

        See `environments.contrib.scienceworld.oracle`. Some gold paths are longer than the limit: the longest has 192
        actions.
        """
        name, variation = self._known(task)
        return oracle.plan(name, variation, self._simplifications, taken, self.max_steps)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(VARIATIONS) if self.task == "all" else (self.task,)

    @property
    def _simplifications(self) -> str:
        return ",".join(sorted(set(self.simplifications)))

    @property
    def _prefix(self) -> str:
        return f"scienceworld-{release()}/{self._simplifications or 'full'}"

    def _known(self, task: Task) -> tuple[str, int]:
        name, variation = str(task.info.get("task")), task.info.get("variation")
        for split in SPLITS:
            if task.id == f"{self._prefix}/{name}/{split}/{variation}" and name in self._names:
                return name, int(str(variation))
        wanted = self.task if self.task != "all" else "<task>"
        raise of_another(task, "ScienceWorld", f"{self._prefix}/{wanted}/<split>/<variation>")


class ScienceWorldEpisode(Attempt):
    """Attempt at a task; the score is the package's, of 100.

    The key of a state covers every object of the house with its properties, what was accomplished, and the score.
    """

    def __init__(self, session: Session, state: State, max_steps: int, list_actions: bool) -> None:
        super().__init__(max_steps)  # some tasks begin with points: they count with the first action
        self._session: Session | None = session
        self._state, self._list_actions = state, list_actions
        self._listed = self._actions()
        self.opening = self.opened(f"{session.description()}\n\n{state.text}")

    def do(self, action: str) -> tuple[str, bool]:
        """Do one action; blanks around it do not count. Where a request was ambiguous, a number answers it.

        Raises:
            EnvError: Java failed.
        """
        assert self._session is not None
        self._state = state = self._session.step(action)
        self.score = max(0, state.score)  # a mistake that cannot be made good takes all points
        self.done, self.solved = state.over, state.score == 100
        # The package lists some actions that its own parser refuses, such as to pour a banana into a cup.
        understood = state.understood or action.strip() in self._listed
        self._listed = self._actions()
        return state.text, understood

    def earned(self, before: float) -> float:
        """Return the share of all points that a step brought."""
        return (self.score - before) / 100

    def state(self) -> str:
        """Return the key of the house."""
        return self._state.key

    def possible(self) -> tuple[str, ...]:
        """Return the actions that the package lists."""
        return self._listed

    async def close(self) -> None:
        """Give the machine back for another episode."""
        session, self._session, self.done = self._session, None, True
        if session is not None:
            POOL.give_back(session)

    def _actions(self) -> tuple[str, ...]:
        if self._session is None or self.over or not self._list_actions:
            return ()
        return self._state.choices or self._session.actions()


def _variations(name: str, split: str) -> range:
    """The package's variations of a split: two quarters, one quarter, and the rest, quarters rounded down."""
    n, quarter = VARIATIONS[name], VARIATIONS[name] // 4
    return {"train": range(2 * quarter), "dev": range(2 * quarter, 3 * quarter), "test": range(3 * quarter, n)}[split]
