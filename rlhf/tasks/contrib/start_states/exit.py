"""ExIt: the policy's own partial histories as further tasks, those first that it sometimes solves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Action, ScoredGroup, Task, Turn
from rlhf.inference.seeds import stable_seed
from rlhf.settings import STRICT
from rlhf.tasks.contrib.start_states.base import start_metrics
from rlhf.tasks.shuffled import walk


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExIt:
    """Buffer of start states collected from the policy's own attempts.

    With probability `p_new` the next task is one of the split, from its beginning, in a shuffled order. Otherwise it is
    a stored start state, drawn with probability proportional to its priority: the variance (1/G) Σ (R − mean R)² of the
    total scores of the group that was last made from it. Groups with scores 1001, 1111 and 1110 have the variances .25,
    0 and .1875, and probabilities .571, 0 and .429.

    From each group of a step whose scores differ one attempt is drawn, and cut at random after at least one turn of its
    own and before its last: what it had done by then is a new start state, with the priority of its group until it has
    a group of its own. A state of priority 0 is removed. Beyond `max_size` the lowest priorities go, of equal ones the
    oldest.

    What stands in the buffer was said by earlier policies. It is given and not trained on: it is shown as the agent
    writes such actions, without what was thought before them, and turns that could not be read are left out.

    Source: ExIt, arXiv 2509.04575, where a history is that of whole attempts at improving an answer. Its request for an
    attempt that differs from the last one, and its bonus for distant answers, are not part of this.
    """

    replays: ClassVar[bool] = True

    p_new: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Probability that a task starts at its initial state."""
    max_size: Annotated[int, Field(ge=1)] = 512
    """Maximum number of start states in the buffer."""

    def start(self, tasks: Sequence[Task], seed: int) -> ExItTasks:
        """Return a source with an empty buffer."""
        return ExItTasks(self, tasks, seed)


@plain_dataclass
class ExItTasks:
    """Tasks and start states, as a pure function of the seed and of what is remembered.

    Attributes:
        settings: the recipe keys.
        tasks: all tasks of the split, from the beginning.
        seed: gives the order of these, and every draw.
        n_steps: finished steps.
        n_new: tasks drawn from the beginning.
        stored: the buffer, oldest first: id -> start state and priority.
    """

    settings: ExIt
    tasks: Sequence[Task]
    seed: int
    n_steps: int = 0
    n_new: int = 0
    stored: dict[str, tuple[Task, float]] = field(default_factory=dict)

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return the next `n` tasks; a start state may come more than once."""
        return list(islice(self._drawn(), already, already + n))

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Judge the start states that were drawn, and store new ones."""
        drawn = list(islice(self._drawn(), len(groups)))
        for i, (task, group) in enumerate(zip(drawn, groups, strict=True)):
            if not group.scores:  # every attempt ended with an infrastructure error
                continue
            priority = variance([score.total for score in group.scores])
            if task.id in self.stored:
                self.stored[task.id] = (task, priority)
            new = self._new_start(task, group, i) if priority else None
            if new is not None:
                self.stored.setdefault(new.id, (new, priority))
        n_before = len(self.stored)
        self._evict()
        self.n_new += sum(not task.prefix for task in drawn)
        self.n_steps += 1
        priorities = [priority for _, priority in self.stored.values()]
        return {
            **start_metrics(drawn, groups),
            "sampling/n_stored": float(len(priorities)),
            "sampling/n_evicted": float(n_before - len(priorities)),
            "sampling/priority_mean": math.fsum(priorities) / max(len(priorities), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts and the whole buffer."""
        return {
            "n_steps": self.n_steps,
            "n_new": self.n_new,
            "stored": [
                {"origin": task.origin, "id": task.id, "priority": priority, "turns": [_plain(t) for t in task.prefix]}
                for task, priority in self.stored.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises KeyError where a task is not in the split."""
        by_id = {task.id: task for task in self.tasks}
        stored = {}
        for row in state["stored"]:
            turns = [_turn(plain) for plain in row["turns"]]
            task = by_id[row["origin"]].started_after(turns, mark=_mark(turns))
            stored[row["id"]] = (task, float(row["priority"]))
        self.stored, self.n_steps, self.n_new = stored, int(state["n_steps"]), int(state["n_new"])

    def _drawn(self) -> Iterator[Task]:
        """Yield the tasks to come."""
        new = walk(len(self.tasks), f"{self.seed}/new", self.n_new)
        starts = [task for task, _ in self.stored.values()]
        weights = [priority for _, priority in self.stored.values()]
        place = 0
        while True:
            rng = random.Random(f"{self.seed}/{self.n_steps}/{place}")
            is_new = rng.random() < self.settings.p_new or not starts
            yield self.tasks[next(new)] if is_new else rng.choices(starts, weights)[0]
            place += 1

    def _new_start(self, task: Task, group: ScoredGroup, place: int) -> Task | None:
        """State that an attempt of the group passed through; None where that attempt was too short."""
        rng = random.Random(f"{self.seed}/{self.n_steps}/{place}/start")
        attempt = rng.choice(group.trajectories)
        if len(attempt.turns) - attempt.n_given < 2:
            return None
        turns = attempt.turns[: rng.randrange(attempt.n_given + 1, len(attempt.turns))]
        new = task.beginning.started_after(turns, mark=_mark(turns))
        return new if len(new.prefix) > len(task.prefix) else None  # nothing but turns that could not be read

    def _evict(self) -> None:
        places = {name: place for place, name in enumerate(self.stored)}
        best = sorted(self.stored, key=lambda name: (-self.stored[name][1], -places[name]))[: self.settings.max_size]
        kept = {name for name in best if self.stored[name][1]}
        self.stored = {name: pair for name, pair in self.stored.items() if name in kept}


def variance(values: Sequence[float]) -> float:
    """Return (1/G) Σ (x − mean)²; exactly 0 for equal values and for none."""
    if not values or min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / len(values)


def _mark(turns: Sequence[Turn]) -> str:
    """Tell apart histories of equal length: by what was done."""
    done = [turn.action.text for turn in turns if turn.action.error is None]
    return f"{stable_seed(*done) % 16**8:08x}"


def _plain(turn: Turn) -> dict[str, Any]:
    return {
        "action": turn.action.text,
        "parts": turn.action.parts,
        "reply": turn.reply,
        "reward": turn.reward,
        "state_key": turn.state_key,
        "valid": turn.valid,
    }


def _turn(plain: Mapping[str, Any]) -> Turn:
    """Return what `_plain` was given, but for its generations."""
    action = Action(plain["action"], parts=tuple(plain.get("parts", ())))
    return Turn(action, plain["reply"], plain["reward"], plain["state_key"], plain["valid"])
