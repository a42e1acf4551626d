"""Test-time strategies in evaluation: the selected candidate, and what all candidates cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf.data import Failure, Outcome, Score, ScoredGroup, Task, Trajectory
from rlhf.data.generation import calls_of, counted_once
from rlhf.errors import RewardError
from rlhf.rollout.contrib.strategies import Strategy, unseen


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """Cost of the candidates of one answer together; what several of them share counts once.

    Attributes:
        chosen: number of the candidate that is the answer, among those of its task.
        why: it was chosen.
        n_candidates: made, failures of parts left out.
        n_solved: of these, solved; the strategy did not know.
        n_turns: taken by the policy.
        n_tokens: sampled.
        n_prompt_tokens: read, all prompts together.
        is_counted: whether a server counted these tokens.
    """

    chosen: int
    why: str
    n_candidates: int
    n_solved: int
    n_turns: int
    n_tokens: int
    n_prompt_tokens: int
    is_counted: bool


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """The attempts of an evaluation at one task, and what each took.

    Attributes:
        group: the candidates that were chosen, under the numbers of the attempts.
        spent: `[G]`, of each trajectory of the group.
    """

    group: ScoredGroup
    spent: tuple[SamplingCost, ...]


async def select_answers(
    strategy: Strategy, task: Task, group: ScoredGroup, attempts: int, *, timeout_s: float
) -> EvaluatedTask:
    """Choose the answer of each of `attempts` attempts at `task` among its candidates.

    Candidates are numbered through. Those made from the start belong to the attempts in turn, as many to each, and what
    branches off one belongs to the attempt that this one belongs to. An attempt of which every candidate failed, or
    what chooses among them, is a failure, and so is one whose retries a failure cut off.

    Args:
        strategy: is shown candidates without success and rewards.
        task: as its environment made it.
        group: all candidates, scored; candidates that failed are not among those to choose from.
        attempts: how many answers.
        timeout_s: limit of each call of a reward.
    """
    owner = _owners(group, strategy.rollout.n_from_start(attempts * strategy.n), attempts)
    trajectories: list[Trajectory] = []
    scores: list[Score] = []
    spent: list[SamplingCost] = []
    failures: list[Failure] = []
    for attempt in range(attempts):
        own = [i for i, t in enumerate(group.trajectories) if owner[t.attempt] == attempt]
        candidates = [group.trajectories[i] for i in own]
        try:
            if not own:
                raise RewardError("every candidate failed", where=f"strategy, task {task.id}")
            if _is_broken_off(strategy, candidates):
                cut = next((f for f in group.failures if f.attempt not in owner), None)
                failed = Failure(attempt, Outcome.ENV_ERROR, "a retry ended with an infrastructure error")
                failures.append(replace(cut, attempt=attempt) if cut else failed)
                continue
            choice = await strategy.choose(*unseen(task, candidates), timeout_s=timeout_s)
        except RewardError as error:
            broken = [f for f in group.failures if owner.get(f.attempt, attempt) == attempt and not own]
            failed = Failure(attempt, Outcome.REWARD_ERROR, str(error))
            failures.append(replace(broken[0], attempt=attempt) if broken else failed)
            continue
        chosen = candidates[choice.index]
        trajectories.append(replace(chosen, attempt=attempt, parent=None, n_shared=0))
        scores.append(group.scores[own[choice.index]])
        spent.append(spent_on(candidates, chosen.attempt, choice.why))
    return EvaluatedTask(ScoredGroup(task.id, tuple(trajectories), tuple(scores), tuple(failures)), tuple(spent))


def _is_broken_off(strategy: Strategy, candidates: Sequence[Trajectory]) -> bool:
    """True if a chain of retries ended early because of an infrastructure error."""
    until = getattr(strategy.rollout, "until", "")
    made = {t.attempt for t in candidates} | {t.parent for t in candidates if t.parent is not None}
    return until == "solved" and len(made) < strategy.n and not any(t.solved for t in candidates)


def _owners(group: ScoredGroup, n_from_start: int, attempts: int) -> dict[int, int | None]:
    """Attempt of each candidate by number; None where its parent could not be scored."""
    owner: dict[int, int | None] = {number: number * attempts // n_from_start for number in range(n_from_start)}
    for t in sorted(group.trajectories, key=lambda t: t.attempt):
        if t.parent is not None:
            owner[t.attempt] = owner.get(t.parent)
    return owner


def spent_on(candidates: Sequence[Trajectory], chosen: int, why: str) -> SamplingCost:
    """Add up what the candidates took; a turn that is replayed from another candidate was taken there."""
    turns = [turn for t in candidates for turn in t.own_turns]
    generations = counted_once(turn.generations for turn in turns)
    asked = [call[0] for turn in turns for call in calls_of(turn.generations)]
    usage = [g.usage for g in generations if g.usage is not None]
    is_counted = bool(generations) and len(usage) == len(generations)
    return SamplingCost(
        chosen=chosen,
        why=why,
        n_candidates=len(candidates),
        n_solved=sum(t.solved for t in candidates),
        n_turns=len(turns),
        n_tokens=sum(u[1] for u in usage) if is_counted else sum(g.n_tokens for g in generations),
        n_prompt_tokens=sum(u[0] for u in usage) if is_counted else sum(g.prompt.n_tokens for g in asked),
        is_counted=is_counted,
    )
