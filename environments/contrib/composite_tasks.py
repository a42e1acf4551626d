"""Composite tasks: several tasks in one episode, each needing its own information.

Without an environment, the objectives are look-ups in a small base of facts that each task draws:

    Objective 1 of 2: the city of Mia.
    > look up Mia
    Mia: city Rome, job cook, pet dog, friend Ben.
    > answer Rome
    Objective 2 of 2: the pet of the friend of Mia.
    > look up Mia
    ...

With one (`environment: {kind: keyhole}`), `k` of its tasks follow each other, or run side by side. `k` is a key, so
that a policy trained on few objectives can be judged on many, as MEM1 does (Zhou and others, arXiv 2506.15841).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Capabilities, Environment, Episode, Properties, can_demonstrate, properties_of
from environments.contrib.composite_episode import Chain, chained, plan_of
from environments.core.normalise import NAMES, PLACES, named, plain, words
from environments.core.procedural import Attempt, digest, draw_for
from environments.core.seed_splits import Seeded
from rlhf.data import Task
from rlhf.settings import STRICT

_VALUES = {
    "city": PLACES[:8],
    "job": words("baker cook doctor farmer miner nurse pilot tailor"),
    "pet": words("cat cow dog duck goat horse mouse pig"),
}
_LOOK = re.compile(r"^(?:look ?up|look at|look|find|search|read|who is) (.+)$")
_ANSWER = re.compile(r"^\W*(?:the )?(?:final )?answers?\b(?: is| are)?[^\w;]*", re.IGNORECASE)
_UNKNOWN = "Unknown action. Say look up NAME, or answer {what}."


@plain_dataclass(frozen=True, slots=True)
class Objective:
    """Value to be found: its name, its kind, and the value."""

    asks: str
    kind: str
    answer: str


@plain_dataclass(frozen=True, slots=True)
class Facts:
    """Instance of a task.

    Attributes:
        people: name -> what the look-up of it says; pairs in alphabetical order.
        ways: of each objective, the names to look up, in order.
        objectives: in the order in which they are told.
    """

    people: tuple[tuple[str, str], ...]
    ways: tuple[tuple[str, ...], ...]
    objectives: tuple[Objective, ...]

    @property
    def reference(self) -> str:
        """All answers, in the order of the objectives."""
        return "; ".join(objective.answer for objective in self.objectives)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Objectives(Seeded):
    """Joins k tasks into one episode: of any environment, or look-ups in a small base of facts."""

    environment: Environment | None = None
    """Environment of the tasks; null makes them look-ups. Its tasks are taken k at a time, in their order, at most as
    many chains as `n_train`, `n_dev` and `n_test` say."""
    k: Annotated[int, Field(ge=1, le=64)] = 4
    """Objectives of an episode."""
    mode: Literal["in_turn", "together"] = "in_turn"
    """`in_turn` tells an objective once the one before is over. `together` tells all at the start: look-ups are
    answered all at the end, `answer Rome; cook; dog`, and actions in another environment begin with the number of
    theirs, which calls of the agent `tools` cannot."""
    hops: Annotated[int, Field(ge=1, le=3)] = 1
    """Look-ups that an objective takes; only without `environment`."""
    n_people: Annotated[int, Field(ge=2, le=40)] = 8
    """People to look up; only without `environment`."""
    steps_each: Annotated[int, Field(ge=2)] = 4
    """Steps for each objective: the episode is cut after k times as many; only without `environment`."""

    @model_validator(mode="after")
    def _agrees(self) -> Objectives:
        """Refuse keys without effect, and more objectives than can be distinguished."""
        given = [name for name, default in _OWN.items() if getattr(self, name) != default]
        if self.environment is not None and given:
            raise ValueError(f"{given[0]} is for look-ups, and has no effect with an environment")
        if self.environment is None and self.k > len(_VALUES) * self.n_people:
            most = len(_VALUES) * self.n_people
            raise ValueError(f"{self.n_people} people allow {most} objectives, and k is {self.k}; raise n_people")
        if self.environment is None and self.steps_each <= self.hops:
            raise ValueError(f"an objective takes {self.hops + 1} steps, and steps_each is {self.steps_each}")
        return self

    @property
    def properties(self) -> Properties:
        """Promises of this environment: with another one, those of that."""
        if self.environment is not None:
            # One verdict of a reward cannot tell of k tasks.
            return replace(properties_of(self.environment), judged_by_rewards=False)
        return super().properties

    @property
    def demonstrates(self) -> bool:
        """True if there is a `plan`: of a given environment, whether that has one."""
        return self.environment is None or can_demonstrate(self.environment)

    @property
    def inline(self) -> bool:
        """True if calls run on the event loop, or only wait there."""
        return self.properties.inline or Capabilities(self.environment).inline

    @property
    def keeps_limits(self) -> bool:
        """True if the environment limits calls itself."""
        return Capabilities(self.environment).keeps_limits

    @property
    def agent_defaults(self) -> Mapping[str, Any]:
        """Recipe keys that the environment suggests for a chat agent."""
        return Capabilities(self.environment).agent_defaults

    @property
    def limits_defaults(self) -> Mapping[str, Any]:
        """Recipe keys that the environment suggests for limits, with the turns of k objectives."""
        own = Capabilities(self.environment).limits_defaults
        return {**own, "max_turns": self.k * own["max_turns"]} if "max_turns" in own else own

    @property
    def max_episodes(self) -> int | None:
        """Maximal number of episodes alive at a time; side by side, each is k of the environment's."""
        most = Capabilities(self.environment).max_episodes
        return most if most is None or self.mode == "in_turn" else max(1, most // self.k)

    @property
    def max_steps(self) -> int | None:
        """Step limit: k times that of one objective; None where those have no limit."""
        each = self.steps_each if self.environment is None else Capabilities(self.environment).max_steps
        return None if each is None else self.k * each

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split; the reference of look-ups is all answers, `goat; pig`.

        Raises:
            EnvError: there is no such split, or it has too few tasks for one chain.
        """
        if self.environment is not None:
            n = {"train": self.n_train, "dev": self.n_dev, "test": self.n_test}.get(split)
            return chained(self.environment.tasks(split), self.k, n, is_together=self.mode == "together")
        prefix = f"objectives-2/{self.k}x{self.hops}-{self.mode}/{split}"
        return [
            Task(id=f"{prefix}/{seed}", seed=seed, reference=self._facts(seed).reference) for seed in self.seeds(split)
        ]

    def start(self, task: Task) -> Episode:
        """Begin one attempt."""
        if self.environment is not None:
            return Chain(self.environment, task, is_together=self.mode == "together", max_steps=self.max_steps)
        return self._look_ups(task)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give actions that reach all objectives after `taken`, or None."""
        if self.environment is not None:
            return plan_of(self.environment, task, taken, is_together=self.mode == "together", max_steps=self.max_steps)
        episode = self._look_ups(task)
        episode.after(taken)
        return episode.way_out()

    def recall(self, task: Task, taken: Sequence[str]) -> str:
        """Objectives that are open, with what has been found for them; nothing where an environment is given."""
        if self.environment is not None:
            return ""
        episode = self._look_ups(task)
        episode.after(taken)
        return episode.worth_keeping()

    def _look_ups(self, task: Task) -> LookUps:
        assert self.max_steps is not None
        return LookUps(self._facts(task.seed), is_together=self.mode == "together", max_steps=self.max_steps)

    def _facts(self, seed: int) -> Facts:
        return _drawn(seed, self.k, self.hops, self.n_people)


_OWN = {"hops": 1, "n_people": 8, "steps_each": 4}


@lru_cache(maxsize=8192)
def _drawn(seed: int, k: int, hops: int, n_people: int) -> Facts:
    return draw_for("objectives", seed, lambda rng: draw(rng, k, hops, n_people), told)


def told(facts: Facts) -> object:
    """Opening and solution of a task: whom to look up, and the answers."""
    return facts.objectives[0].asks, facts.ways, facts.reference


def draw(rng: random.Random, k: int, hops: int, n_people: int) -> Facts:
    """Draw people, their cities, jobs, pets and friends, and k different questions about them."""
    names = rng.sample(NAMES, n_people)
    friend = dict(zip(names, [*names[1:], names[0]], strict=True))  # one ring: nobody is a friend of their own
    has = {name: {kind: rng.choice(values) for kind, values in _VALUES.items()} for name in names}
    said = {
        name: f"{name}: {', '.join(f'{kind} {value}' for kind, value in own.items())}, friend {friend[name]}."
        for name, own in has.items()
    }
    asked = rng.sample([(name, kind) for name in sorted(names) for kind in _VALUES], k)
    ways, objectives = [], []
    for name, kind in asked:
        way = [name]
        while len(way) < hops:
            way.append(friend[way[-1]])
        ways.append(tuple(way))
        asks = f"the {kind} of {'the friend of ' * (hops - 1)}{name}"
        objectives.append(Objective(asks, kind, has[way[-1]][kind]))
    return Facts(tuple(sorted(said.items())), tuple(ways), tuple(objectives))


class LookUps(Attempt):
    """Attempt at k look-ups.

    The score is the share of objectives answered right. The key of a state tells the facts, how many objectives are
    answered, how many of them right, and who has been looked up since.
    """

    def __init__(self, facts: Facts, *, is_together: bool, max_steps: int) -> None:
        super().__init__(max_steps)
        self._facts, self._is_together, self._name = facts, is_together, digest(repr(facts))
        self._people = dict(facts.people)
        self._read: set[str] = set()
        self._n_answered, self._n_right = 0, 0
        goals = facts.objectives
        if is_together:
            told = "; ".join(f"{i} {goal.asks}" for i, goal in enumerate(goals, 1))
            self.opening = self.opened(f"Find {len(goals)}: {told}.")
        else:
            self.opening = self.opened(self._told())

    def do(self, action: str) -> tuple[str, bool]:
        """Look somebody up, or answer."""
        answers = self._answers(action)
        if answers:
            return self._answered(answers), True
        found = _LOOK.match(plain(action))
        who = named(found[1] if found else action, self._people)
        if len(who) == 1 and (found or plain(action) == plain(who[0])):
            self._read.add(who[0])
            return self._people[who[0]], True
        if found:
            return "Nobody of that name.", True
        return _UNKNOWN.format(what="; ".join(["VALUE"] * 2) if self._is_together else "VALUE"), False

    def _answers(self, action: str) -> list[str]:
        """Return the values that an action answers with; empty where it is no answer."""
        goals = self._facts.objectives
        values = [_VALUES[goal.kind] for goal in goals]
        begins = _ANSWER.match(action)
        text = action[begins.end() :] if begins else action
        if len(text) > 100 * len(goals):
            return []
        if self._is_together:
            parts = text.split(";") if begins or ";" in text else []
            said = ["".join(named(part, own)[:2]) for part, own in zip(parts, values, strict=False)]
            return said if begins or all(said) else []
        found = named(text, values[self._n_answered])
        return found if len(found) == 1 and (begins or plain(text) == plain(found[0])) else [""] if begins else []

    def _answered(self, answers: Sequence[str]) -> str:
        goals = self._facts.objectives
        own = goals if self._is_together else goals[self._n_answered : self._n_answered + 1]
        self._n_right += sum(said == goal.answer for said, goal in zip(answers, own, strict=False))
        self._n_answered += len(own)
        self._read.clear()  # what was read for another objective may be forgotten by now
        self.score = self._n_right / len(goals)
        self.done = self._n_answered == len(goals)
        self.solved = self.done and self._n_right == len(goals)
        return "The end." if self.done else self._told()

    def _told(self) -> str:
        goals = self._facts.objectives
        return f"Objective {self._n_answered + 1} of {len(goals)}: {goals[self._n_answered].asks}."

    def way_out(self) -> tuple[str, ...] | None:
        """Fewest actions that answer the rest right; None after a wrong answer, or with too few steps."""
        goals = self._facts.objectives[self._n_answered :]
        actions: list[str] = []
        read = set(self._read)
        for goal, way in zip(goals, self._facts.ways[self._n_answered :], strict=True):
            if not self._is_together:
                read = set(self._read) if goal is goals[0] else set()
            actions += [f"look up {name}" for name in way if name not in read]
            read.update(way)
            actions += [] if self._is_together else [f"answer {goal.answer}"]
        if self._is_together and goals:
            actions.append("answer " + "; ".join(goal.answer for goal in goals))
        is_lost = self._n_right < self._n_answered or len(actions) > self.steps_left
        return None if is_lost else tuple(actions)

    def worth_keeping(self) -> str:
        """Summary for later actions: open objectives, known answers, and names to look up."""
        goals, ways = self._facts.objectives, self._facts.ways
        now = range(self._n_answered, len(goals))[: None if self._is_together else 1]
        said = []
        for i in now:
            missing = [name for name in ways[i] if name not in self._read]
            number = f"{i + 1} " if self._is_together else ""
            said.append(f"{number}{goals[i].kind} {missing[0] if missing else goals[i].answer}")
        return "; ".join(said)

    def state(self) -> str:
        """Return facts, progress, and who has been looked up since."""
        return f"{self._name}/{self._n_answered}/{self._n_right}/{'+'.join(sorted(self._read))}"

    def possible(self) -> tuple[str, ...]:
        """Return look-ups and answers; nothing where all are answered at once, as these cannot be listed."""
        if self._is_together:
            return ()
        values = _VALUES[self._facts.objectives[self._n_answered].kind]
        return tuple(sorted([*(f"look up {name}" for name in self._people), *(f"answer {value}" for value in values)]))
