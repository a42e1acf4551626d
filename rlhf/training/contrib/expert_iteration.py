"""Expert iteration: the policy attempts tasks, the best attempts are kept, and the policy imitates them; repeat.

The environment's verdict is the expert. With one round this is rejection sampling: attempts [1, 0, 1, 1] at a task,
`keep: solved` and two per task keep the first and the third, unless they are the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Capabilities
from environments.base import can_demonstrate
from rlhf.checking import CheckContext, Problem
from rlhf.credit.groups import normalise
from rlhf.data import ScoredGroup, Task, Trajectory
from rlhf.errors import RecipeError
from rlhf.rollout.group_structure import GroupStructure, Independent, unreplayable
from rlhf.settings import STRICT
from rlhf.tasks.shuffled import drawn_apart


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Attempts:
    """Rejection sampling: SFT on the policy's own best attempts instead of demonstrations.

    In each round the policy as it then is attempts tasks, and is trained for `epochs` on what is kept, with an
    optimiser and a schedule of the round's own. An attempt that says what a better one of its task has said, token by
    token, is kept once; of equal scores the one with fewer tokens comes first. Nothing is kept of a group of which
    every attempt fails.

    Source: STaR, arXiv 2203.14465; RAFT, arXiv 2304.06767; ReST-EM, arXiv 2312.06585, which begins each round with the
    weights before the first; here, as in the other two, rounds go on from each other.
    """

    rounds: Annotated[int, Field(ge=1)] = 1
    """Rounds of rollouts and SFT on the kept attempts."""
    tasks_per_round: Annotated[int, Field(ge=1)] = 64
    """Tasks per round; the next round uses others."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Attempts per task."""
    rollout: GroupStructure = Field(default_factory=Independent)
    """Group structure of the attempts: with `retry`, SFT on those improved by earlier ones (RISE)."""
    keep: Literal["solved", "best"] = "solved"
    """Attempts to train on: `solved` ones, or the `best`, above the mean score of their group."""
    max_per_task: Annotated[int, Field(ge=1)] = 2
    """Maximum kept attempts per task, the best first, so that easy tasks do not crowd out hard ones."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature."""
    calibrate: bool = False
    """Also train on corrected unsolved attempts, up to `max_per_task`: own actions up to the first wrong step, after
    which the environment's oracle is no closer to the goal, and the oracle's from there on (STeCa)."""

    def __post_init__(self) -> None:
        """Refuse groups of one that would be compared, and groups of a size that `rollout` cannot make."""
        if self.keep == "best" and self.group_size < 2:
            raise ValueError("keep: best compares the attempts at a task, and group_size is 1")
        try:
            self.rollout.n_from_start(self.group_size)
        except ValueError as error:
            raise RecipeError(
                "groups of this size cannot be made",
                where="group_size",
                got=str(self.group_size),
                expected=str(error),
                hint="change group_size, which counts all attempts at a task, or the keys of rollout",
            ) from error

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse comparisons without company, replay of what cannot be repeated, and impossible corrections."""
        recipe = context.recipe
        yield from unreplayable("rollout", self.rollout, context.path, context)
        environment = context.kind_of("environment", recipe.environment)
        is_replayable = recipe.properties.replayable
        if self.calibrate and not (is_replayable and can_demonstrate(recipe.environment)):
            why = "without a method `plan`" if is_replayable else "which does not promise to repeat itself"
            yield Problem(
                "attempts at these tasks cannot get oracle corrections",
                where=context.at("calibrate"),
                got=f"{environment}, {why}",
                expected="a replayable environment with a method `plan(task, taken)`",
                do="remove the key",
            )
        if self.calibrate and Capabilities(recipe.agent).write is None:
            yield Problem(
                "this agent cannot be shown corrections",
                where=context.at("calibrate"),
                got=f"{context.kind_of('agent', recipe.agent)}, which lacks write",
                expected="a method `write` beside `act`, as agents.chat.ChatAgent has",
                do="remove the key, or write the method",
            )
        if self.keep == "best" and not recipe.has_weight:
            yield Problem(
                "no attempt can be better than another: every reward has weight 0",
                where="rewards",
                got=", ".join(recipe.rewards) or "no rewards",
                expected=f"a reward with a weight, for {context.at('keep')}: best",
                do="add rewards: {outcome: {kind: outcome}}, or use keep: solved",
            )

    def tasks(self, tasks: Sequence[Task], number: int, seed: int | str) -> list[Task]:
        """Return the tasks of round `number`, from 0: each comes once before any comes again, and once in a round."""
        return [tasks[i] for i in drawn_apart(len(tasks), seed, self.tasks_per_round, number)]

    def kept(self, groups: Sequence[ScoredGroup]) -> list[Trajectory]:
        """Return what is imitated of the attempts, group by group, the best of a task first."""
        return [trajectory for group in groups for trajectory in self._kept_of(group)]

    def _kept_of(self, group: ScoredGroup) -> list[Trajectory]:
        above = normalise([score.total for score in group.scores], by_std=False)  # exactly 0 where all are equal
        scored = zip(above, group.trajectories, strict=True)
        found = [(x, t) for x, t in scored if t.n_tokens and (t.solved if self.keep == "solved" else x > 0)]
        found.sort(key=lambda pair: (-pair[0], pair[1].n_tokens, pair[1].attempt))
        different: dict[tuple[tuple[int, ...], ...], Trajectory] = {}
        for _, trajectory in found:
            different.setdefault(tuple(g.token_ids for g in trajectory.generations), trajectory)
        return list(different.values())[: self.max_per_task]
