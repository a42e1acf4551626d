"""Reward for subgoals discovered in experience: events of solved attempts that failed ones lack."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.data import ScoredGroup, Task, Trajectory, Verdict
from rlhf.settings import STRICT

_END = re.compile(r"(?<=[.!?])\s+|\n")
_Count = Annotated[int, Field(ge=1)]
#: What an attempt came by before its end, and whether it was solved.
Path = tuple[frozenset[str], bool]


def difference(paths: Collection[Path], event: str) -> float:
    """P(came by | solved) − P(came by | failed), from −1 to 1; 0 while either has not been seen.

    Solved attempts {k, d}, {k} and a failed one {d, w}: k 1 − 0 = 1, d ½ − 1 = −½, w 0 − 1 = −1.
    """
    shares = []
    for solved in (True, False):
        of = [events for events, was_solved in paths if was_solved is solved]
        if not of:
            return 0.0
        shares.append(sum(event in events for events in of) / len(of))
    return shares[0] - shares[1]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FoundSubgoals:
    """Reward of the first turn in which each subgoal is reached; subgoals are found in the stage's own attempts.

    An event is a sentence or a line of an environment's reply. Of the events of the last `window` attempts, those are
    subgoals that solved attempts come by more often than failed ones, by at least `min_difference`: the `max_subgoals`
    with the largest difference, of equals the more frequent. Those of a solved attempt's last turn are its end and no
    subgoal.
    Each of n subgoals is worth `bonus` / n, on the turn that reaches it first.

    A subgoal with what it takes to reach it is an option that was found and not given: with the planner's words for its
    name, `planner` and `two_level` train it as one. What is found is learnt once in each finished step, begins empty
    with each stage and is kept in checkpoints; outside of the attempts of such a stage every attempt is worth 0.

    Sources: subgoals by diverse density, McGovern and Barto, 2001, here by a difference of shares; options, Sutton,
    Precup, Singh, 1999.
    """

    inline: ClassVar[bool] = True

    bonus: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Reward of all subgoals together."""
    max_subgoals: _Count = 4
    """Number of subgoals."""
    min_difference: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Least difference between the shares of solved and of failed attempts that come by an event."""
    min_solved: _Count = 4
    """Solved attempts to have seen before anything is a subgoal, and failed ones as many."""
    window: Annotated[int, Field(ge=2)] = 500
    """Newest attempts that are looked at."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a reward that never learns."""
        if not context.recipe.longest:
            yield Problem(
                "no subgoals are found: only policy_gradient stages are searched",
                where=context.path,
                got=", ".join(type(stage).__name__ for stage in context.recipe.stages),
                expected="a stage {kind: policy_gradient}",
                do="remove the reward",
            )

    @cached_property
    def episodes(self) -> SubgoalState:
        """Live subgoals, apart from the settings."""
        return SubgoalState(self)

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Pay the subgoals that the attempt reaches."""
        subgoals = self.episodes.subgoals if self.episodes.is_open else ()
        left, per_turn = set(subgoals), []
        for i, turn in enumerate(trajectory.turns):
            reached = left & events_of(turn.reply) if i >= trajectory.n_given else set()
            left -= reached
            per_turn.append(self.bonus * len(reached) / max(len(subgoals), 1))
        n = len(subgoals) - len(left)
        return Verdict(sum(per_turn), f"{n} of {len(subgoals)} subgoals found so far", tuple(per_turn))


class SubgoalState:
    """Subgoals of a stage. Only `learn` changes them; they are paid while `is_open`."""

    def __init__(self, settings: FoundSubgoals) -> None:
        self.settings, self.is_open = settings, False
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.paths: deque[Path] = deque(maxlen=self.settings.window)
        self.subgoals: tuple[str, ...] = ()

    def learn(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Update on a finished step, once. Returns the figures of it."""
        own = [t for g in groups for t in g.trajectories if not t.is_demonstration]
        self.paths.extend(map(path_of, own))
        self.subgoals = self._found()
        return {"found_subgoals": float(len(self.subgoals))}

    def _found(self) -> tuple[str, ...]:
        settings, n_solved = self.settings, sum(solved for _, solved in self.paths)
        if min(n_solved, len(self.paths) - n_solved) < settings.min_solved:
            return ()
        counts: dict[str, int] = {}
        for events, _ in self.paths:
            for event in events:
                counts[event] = counts.get(event, 0) + 1
        worth = {event: difference(self.paths, event) for event, n in counts.items() if n >= settings.min_solved}
        best = sorted(worth, key=lambda event: (-worth[event], -counts[event], event))
        return tuple(event for event in best[: settings.max_subgoals] if worth[event] >= settings.min_difference)

    def state_dict(self) -> dict[str, Any]:
        """Everything that was seen."""
        return {"paths": [[sorted(events), solved] for events, solved in self.paths]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.clear()
        self.paths.extend((frozenset(events), bool(solved)) for events, solved in state["paths"])
        self.subgoals = self._found()


def path_of(trajectory: Trajectory) -> Path:
    """Events that an attempt came by, but for the last turn of a solved one, and whether it was solved."""
    turns = trajectory.turns[trajectory.n_given :]
    on_the_way = turns[:-1] if trajectory.solved else turns
    return frozenset(line for turn in on_the_way for line in events_of(turn.reply)), trajectory.solved


def events_of(reply: str) -> set[str]:
    """Events of a reply: its sentences and lines."""
    return {said.strip() for said in _END.split(reply) if said.strip()}
