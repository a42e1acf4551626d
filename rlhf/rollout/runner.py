"""Rollout runner: tasks in, scored groups out, for training and evaluation."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from agents.base import Agent
from agents.planner import ENDED, PLAN, REACHED
from agents.stores.kind import ENTRIES, RECALLED
from environments.base import Environment
from rlhf.data import Finish, Outcome, SamplingParams, ScoredGroup, Task, Turn
from rlhf.data.generation import calls_of, counted_once
from rlhf.inference.engine import RolloutEngine
from rlhf.mapped_gather import gather_mapped
from rlhf.processes import current
from rlhf.rollout.group import Journal, finished_groups
from rlhf.rollout.group_structure import GroupStructure, Independent
from rlhf.rollout.limits import Limits
from rlhf.rollout.opponent_engine import OpponentSampler
from rlhf.rollout.progress import OnProgress
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, check_failures, score_group
from rlhf.spans import span


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one step and how long they took.

    Attributes:
        groups: of the step.
        seconds: from its begin, or from the batch before where groups are played ahead.
        ahead_s: of these, those in which the trainer did not wait for it.
    """

    groups: tuple[ScoredGroup, ...]
    seconds: float
    ahead_s: float = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds in which the trainer waited for the groups."""
        return self.seconds - self.ahead_s

    @property
    def n_episodes(self) -> int:
        """Attempts, failed ones included."""
        return sum(len(g.trajectories) + len(g.failures) for g in self.groups)

    def metrics(self) -> dict[str, float]:
        """Means over trajectories, counts over everything; see `rlhf.metrics` for units."""
        trajectories = [t for g in self.groups for t in g.trajectories]
        scores = [s for g in self.groups for s in g.scores]
        failures = [f for g in self.groups for f in g.failures]
        turns = [turn for t in trajectories for turn in t.own_turns]  # what attempts share counts once
        generations = counted_once(turn.generations for turn in turns)
        n = len(trajectories)
        n_tokens = sum(g.n_tokens for g in generations)
        returns = [s.total for s in scores]
        n_invalid = sum(not turn.valid for turn in turns)
        values = {
            "rollout/n_episodes": float(self.n_episodes),
            "rollout/n_generations": float(len(generations)),
            "rollout/n_replayed_turns": float(sum(len(t.turns) for t in trajectories) - len(turns)),
            "rollout/n_tokens": float(n_tokens),
            "rollout/tokens_per_s": n_tokens / max(self.seconds, 1e-9),
            "rollout/n_truncated_generations": float(sum(g.finish is Finish.LENGTH for g in generations)),
            "rollout/n_invalid_actions": float(n_invalid),
            "rollout/invalid_share": n_invalid / max(len(turns), 1),
            "rollout/n_infra_errors": float(len(failures)),
            "rollout/infra_error_share": len(failures) / max(self.n_episodes, 1),
            "rollout/n_retries": float(sum(t.n_retries for t in trajectories)),
            "time/rollout_s": self.waited_s,
        }
        if trajectories:
            mean = sum(returns) / n
            values |= {
                "rollout/success": sum(t.solved for t in trajectories) / n,
                "rollout/return_mean": mean,
                "rollout/return_std": (sum((r - mean) ** 2 for r in returns) / n) ** 0.5,
                "rollout/n_turns_mean": sum(len(t.turns) - t.n_given for t in trajectories) / n,
            }
        outcomes = Counter(t.outcome for t in trajectories) + Counter(f.outcome for f in failures)
        values |= {f"rollout/n_{outcome.value}": float(outcomes[outcome]) for outcome in Outcome}
        for name in scores[0].parts if scores else ():
            values[f"reward/{name}"] = sum(s.parts[name].value for s in scores) / n
        solved_G = [[t.solved for t in g.trajectories] for g in self.groups]
        values |= _of_groups(solved_G) | _agreement(solved_G, [[s.total for s in g.scores] for g in self.groups])
        values |= _of_prompts(turns) | _of_notes(turns, n) | _of_parts(self.groups)
        return values

    def success_interval(self, estimate: Callable[[Sequence[bool], Sequence[str]], Any]) -> dict[str, float]:
        """Metrics of the interval of `rollout/success`; none where no attempt came to an end.

        Args:
            estimate: interval of a share, of what was right and the tasks that these belong to.
        """
        attempts = [t for g in self.groups for t in g.trajectories]
        if not attempts:
            return {}
        found = estimate([t.solved for t in attempts], [t.task_id for t in attempts])
        return {"rollout/success_low": found.low, "rollout/success_high": found.high}


def _of_groups(solved_G: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Shares of tasks within reach and already mastered; tasks whose attempts all failed are left out.

    Of four tasks two were solved by somebody, one of them by everybody; the fourth was never attempted to an end:

    >>> _of_groups([[True, False, False], [True, True], [False, False], []])
    {'rollout/pass_at_k': 0.6666666666666666, 'rollout/pass_all_k': 0.3333333333333333}
    >>> _of_groups([])
    {'rollout/pass_at_k': 0.0, 'rollout/pass_all_k': 0.0}
    """
    attempted = [solved for solved in solved_G if solved]
    n = max(len(attempted), 1)
    return {
        "rollout/pass_at_k": sum(map(any, attempted)) / n,
        "rollout/pass_all_k": sum(map(all, attempted)) / n,
    }


def _agreement(solved_G: Sequence[Sequence[bool]], totals_G: Sequence[Sequence[float]]) -> dict[str, float]:
    """Share of solved and unsolved attempts at one task that the score puts in this order, ties counting half.

    1 is a score that says what is solved, ½ one that knows nothing of it (the area under the ROC curve, within tasks).
    A success of .9 beats the failure of .2 and not that of 1.3; the second task has no two to compare:

    >>> _agreement([[True, False, False], [True, True]], [[0.9, 0.2, 1.3], [0.1, 0.4]])
    {'rollout/score_agreement': 0.5}
    >>> _agreement([[True, True]], [[0.1, 0.4]])
    {}
    """
    compared = [
        (one > other) + 0.5 * (one == other)
        for solved, totals in zip(solved_G, totals_G, strict=True)
        for one, is_solved in zip(totals, solved, strict=True)
        for other, is_other_solved in zip(totals, solved, strict=True)
        if is_solved and not is_other_solved
    ]
    return {"rollout/score_agreement": sum(compared) / len(compared)} if compared else {}


def _of_prompts(turns: Sequence[Turn]) -> dict[str, float]:
    """Prompt lengths and numbers of policy calls."""
    lengths = [call[0].prompt.n_tokens for turn in turns for call in calls_of(turn.generations)]
    return {
        "rollout/prompt_tokens_mean": sum(lengths) / max(len(lengths), 1),
        "rollout/prompt_tokens_max": float(max(lengths, default=0)),
        "rollout/calls_per_turn": len(lengths) / max(len(turns), 1),
    }


def _of_notes(turns: Sequence[Turn], n_trajectories: int) -> dict[str, float]:
    """Counts and lengths of agent notes by name; numbered notes count as one.

    A store that had nothing to say leaves an empty note, so that it is asked no more: that is no recall.
    """
    lengths: dict[str, list[int]] = {}
    for turn in turns:
        for name, note in turn.action.notes.items():
            found = lengths.setdefault(re.sub(r"\W+", "_", name.rstrip("0123456789 ")), [])
            if note or name not in (RECALLED, ENTRIES):
                found.append(len(note))
    counts = {f"agent/n_{name}": len(found) / n_trajectories for name, found in lengths.items()}
    if any(g.role == PLAN for turn in turns for g in turn.generations):
        ended = [line for turn in turns for line in turn.action.notes.get(ENDED, "").split("\n")]
        counts["agent/n_subgoals_reached"] = ended.count(REACHED) / n_trajectories
    return counts | {f"agent/chars_{name}": sum(found) / len(found) for name, found in lengths.items() if found}


def _of_parts(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Success of each kind of task, by the beginning of its id; empty with one kind."""
    solved: dict[str, list[bool]] = {}
    for group in groups:
        name = re.sub(r"[^\w.-]+", "_", group.task_id.partition("/")[0])
        solved.setdefault(name, []).extend(trajectory.solved for trajectory in group.trajectories)
    kinds = {name: found for name, found in solved.items() if found}
    return {f"success_of/{name}": sum(x) / len(x) for name, x in kinds.items()} if len(kinds) > 1 else {}


@dataclass(frozen=True)
class RolloutRunner:
    """Runs and scores the attempts at tasks: environment, agent, engine, rewards and limits."""

    environment: Environment
    agent: Agent
    rewards: Mapping[str, WeightedReward]
    engine: RolloutEngine
    renderer: Renderer
    limits: Limits
    seed: int
    on_progress: OnProgress | None = None

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        grouping: GroupStructure = Independent(),  # noqa: B008  it holds nothing
        earlier: RolloutBatch | None = None,
        opponents: OpponentSampler | None = None,
        journal: Journal | None = None,
    ) -> RolloutBatch:
        """Attempt every task `group_size` times, as `grouping` says, and score the attempts, each group as it ends.

        Of several processes each attempts its share of the tasks, and all return all groups; the tokens of others are
        mapped and not copied.

        Another round of a step is given the `earlier` ones: what is returned holds their groups first. `opponents` says
        who has seats of an attempt in the policy's place. Attempts that `journal` holds are scored and not played.

        Raises:
            TrainingError: more than `limits.max_error_fraction` of the attempts ended with infrastructure errors.
        """
        start = time.perf_counter()
        before = earlier.groups if earlier else ()
        here = current()
        share = here.share(len(tasks))
        own = tasks[share]
        earlier_ids = [*(group.task_id for group in before), *(task.id for task in tasks[: share.start])]
        how: dict[str, Any] = {"grouping": grouping, "opponents": opponents, "earlier": earlier_ids, "journal": journal}
        with span("rollout"):
            async with aclosing(self.groups(own, sampling, group_size=group_size, step=step, **how)) as found:
                scored = [group async for group in found]
        parts = gather_mapped((scored, time.perf_counter() - start), f"the rollouts of step {step + 1}")
        groups = (*before, *(group for found, _ in parts for group in found))
        check_failures(groups, self.limits)
        seconds = max(seconds for _, seconds in parts)
        return RolloutBatch(groups, seconds + (earlier.seconds if earlier else 0.0))

    async def groups(
        self, tasks: Sequence[Task], sampling: SamplingParams, *, group_size: int, step: int, **how: Any
    ) -> AsyncGenerator[ScoredGroup, None]:
        """Yield the scored group of each task, in order; scoring overlaps later attempts.

        Groups are scored one after the other, so a reward is asked in the order of the tasks, whatever ends first.

        Args:
            tasks: of this process.
            sampling: temperature and the like.
            group_size: attempts per task.
            step: number of the optimiser step.
            how: what else `finished_groups` takes.
        """
        parts = (self.environment, self.agent, self.engine, self.renderer, self.limits, sampling)
        how |= {"step": step, "on_progress": self.on_progress}
        attempted = finished_groups(tasks, *parts, group_size=group_size, seed=self.seed, **how)
        async with aclosing(attempted) as found:
            async for attempts in found:
                given, timeout_s = (attempts.task, attempts.trajectories), self.limits.reward_timeout_s
                with span("scoring") if attempts.is_last else nullcontext():
                    group = await score_group(*given, self.rewards, timeout_s=timeout_s)
                yield group
