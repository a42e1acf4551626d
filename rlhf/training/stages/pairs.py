"""Preference pairs: the better of two attempts at a task, or of two actions in a state.

Attempts that score 1, 0 and .4 make three pairs; a margin of .5 leaves (1, 0) and (1, .4), and one per task the first,
which are furthest apart. Both sides of a pair are the ids that were sampled, with a mask over what the policy wrote.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Generation, Score, ScoredGroup, Trajectory, Turn
from rlhf.errors import TrainingError
from rlhf.settings import STRICT


@plain_dataclass(frozen=True, slots=True)
class Side:
    """Side of a pair.

    Attributes:
        token_ids: `[L]` everything the model reads, the last thing being what the policy said.
        mask: `[L]` the tokens that the policy wrote and that are compared.
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]


@plain_dataclass(frozen=True, slots=True)
class Pair:
    """Two sides, the better one first.

    Attributes:
        task_id: pairs of one task are not independent.
        chosen: the better one.
        rejected: the other.
        margin: by how much it is better, in units of the score; 0.0 where nothing says.
    """

    task_id: str
    chosen: Side
    rejected: Side
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pairs:
    """Source of pairs: fresh attempts of the policy, those of a run, or a file."""

    tasks: Annotated[int, Field(ge=1)] = 128
    """Different tasks that the policy attempts."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Attempts per task."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature of these attempts."""
    from_run: Path | None = None
    """Folder of a run whose stored training trajectories are paired instead; its policy must use the same tokenizer."""
    rejected_from: Path | None = None
    """Folder of another run, of an earlier policy: of each task that both runs attempted, the best attempt of
    `from_run` is compared with the worst of this one (Temporal Self-Rewarding, arXiv 2508.06026)."""
    file: Path | None = None
    """JSON lines, JSON, CSV, TSV, Parquet or a folder of `datasets` with prompt, chosen and rejected instead: texts, or
    messages, also ShareGPT's; conversations that part in their last message need no prompt."""
    level: Literal["trajectory", "state", "parting", "expert"] = "trajectory"
    """Level of comparison: whole attempts at one prompt by their score; actions taken in the same state of the
    environment, or the first actions by which two attempts part, both by what was earned from there on; or, in each
    state of a demonstration, the oracle's action with those of the policy, `group_size` of them, that are another."""
    turns: Annotated[int, Field(ge=1)] = 1
    """Turns of the segments that `parting` compares, from where two attempts diverge."""
    role: str | None = None
    """Role whose generations are compared, such as `plan` of a planner; null compares all."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per turn of the return after an action; below 1 prefers shorter paths."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Minimum score difference of a pair; 0 is any difference."""
    max_per_task: Annotated[int, Field(ge=1)] = 4
    """Maximum pairs of a task in a step, or of a state of a demonstration; largest score differences first, ties at
    random."""

    @property
    def is_attempted(self) -> bool:
        """True if the policy makes the attempts."""
        return self.file is None and self.from_run is None

    def of(self, groups: Iterable[ScoredGroup], seed: int | str) -> list[Pair]:
        """Return the pairs of each group, in order.

        Raises:
            TrainingError: an attempt, or an action, was not sampled in one row.
        """
        find = {"trajectory": self._of_attempts, "state": self._of_states, "parting": self._of_partings}[self.level]
        spoken = (self._spoken(group) for group in groups)
        return self.chosen((find(group) for group in spoken), seed)

    def against(self, shown: Sequence[tuple[Turn, ScoredGroup]], seed: int | str) -> list[Pair]:
        """Return the pairs of the oracle's action in a state, and the first actions of attempts from there.

        Args:
            shown: a demonstrated turn, and the attempts at the task begun before it.
            seed: draws among equals.
        """
        states = (
            [p for t in group.trajectories if t.own_turns for p in self._of_turns(group.origin, [turn], t.own_turns, 1)]
            for turn, group in shown
        )
        return self.chosen(states, seed)

    def chosen(self, found: Iterable[Iterable[Pair]], seed: int | str) -> list[Pair]:
        """Return of the pairs of each group those that are kept."""
        return [pair for number, pairs in enumerate(found) for pair in self._chosen(pairs, f"{seed}/{number}")]

    def _spoken(self, group: ScoredGroup) -> ScoredGroup:
        """Return the group with the calls of `role` alone."""
        if self.role is None:
            return group
        return replace(group, trajectories=tuple(_in_role(t, self.role) for t in group.trajectories))

    def _chosen(self, found: Iterable[Pair], seed: str) -> list[Pair]:
        """Return the pairs that are kept of one group."""
        pairs = [p for p in found if p.margin > 0 and p.margin >= self.margin]
        random.Random(seed).shuffle(pairs)
        pairs.sort(key=lambda pair: -pair.margin)
        different = {(p.chosen, p.rejected): p for p in reversed(pairs)}
        return [p for p in pairs if different[p.chosen, p.rejected] is p][: self.max_per_task]

    def _of_states(self, group: ScoredGroup) -> Iterator[Pair]:
        """Pairs of actions in equal states, both under the chosen one's prompt, so that nothing else differs."""
        states: dict[str, list[tuple[Turn, float]]] = {}
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            first = len(trajectory.turns) - len(trajectory.own_turns)
            for k, turn in enumerate(trajectory.turns):
                if k >= first and turn.state_key is not None and turn.generations:
                    states.setdefault(turn.state_key, []).append((turn, self._earned(score, k)))
        for turns in states.values():
            for (better, more), (worse, less) in permutations(turns, 2):
                if more > less:
                    yield from self._of_turns(group.origin, [better], [worse], more - less)

    def _of_partings(self, group: ScoredGroup) -> Iterator[Pair]:
        """The first actions that differ, where everything read before them is equal token by token."""
        scored = list(zip(group.trajectories, group.scores, strict=True))
        for (one, its_score), (other, others_score) in combinations(scored, 2):
            k = _parting(one, other)
            if k is None or k < max(t.n_given for t in (one, other)):
                continue
            earned = self._earned(its_score, k), self._earned(others_score, k)
            better, worse = (one, other) if earned[0] > earned[1] else (other, one)
            yield from self._of_turns(group.origin, better.turns[k:], worse.turns[k:], abs(earned[0] - earned[1]))

    def _of_turns(self, task_id: str, better: Sequence[Turn], worse: Sequence[Turn], margin: float) -> Iterator[Pair]:
        """The pair of two actions, or segments, unless they begin alike or the better one was not understood."""
        if self.role is None and (not better[0].valid or better[0].action.text == worse[0].action.text):
            return
        chosen, said = (
            _row([g for turn in turns[: self.turns] for g in turn.generations], f"an action in {task_id}")
            for turns in (better, worse)
        )
        if chosen is None or said is None:
            return
        begin = better[0].generations[0].prompt.n_tokens
        own = worse[0].generations[0].prompt.n_tokens
        rejected = Side(chosen.token_ids[:begin] + said.token_ids[own:], chosen.mask[:begin] + said.mask[own:])
        if chosen.token_ids != rejected.token_ids:
            yield Pair(task_id, chosen, rejected, margin)

    def _earned(self, score: Score, k: int) -> float:
        return sum(self.gamma**i * x for i, x in enumerate(score.turns[k:]))

    def _of_attempts(self, group: ScoredGroup) -> Iterator[Pair]:
        """Pairs of whole attempts. They answer one prompt, except in one role, whose prompt others have a part in."""
        sides = [whole(t) for t in group.trajectories]
        asked = [next((g.prompt for turn in t.turns for g in turn.generations), None) for t in group.trajectories]
        for i, j in permutations(range(len(sides)), 2):
            better, worse, ahead = sides[i], sides[j], group.scores[i].total - group.scores[j].total
            is_alike = self.role is not None or asked[i] == asked[j]
            if ahead > 0 and better and worse and better != worse and is_alike:
                yield Pair(group.origin, better, worse, ahead)


def _in_role(trajectory: Trajectory, role: str) -> Trajectory:
    def heard(turn: Turn) -> Turn:
        calls = tuple(g for g in turn.generations if g.role == role)
        return replace(turn, action=replace(turn.action, generations=calls))

    return replace(trajectory, turns=tuple(map(heard, trajectory.turns)))


def _parting(one: Trajectory, other: Trajectory) -> int | None:
    """First turn at which two attempts differ after equal input; None where there is none."""
    for k, (a, b) in enumerate(zip(one.turns, other.turns, strict=False)):
        if [g.token_ids for g in a.generations] != [g.token_ids for g in b.generations]:
            both = a.generations and b.generations
            return k if both and a.generations[0].prompt == b.generations[0].prompt else None
        if [g.prompt for g in a.generations] != [g.prompt for g in b.generations]:
            return None
    return None


def whole(trajectory: Trajectory) -> Side | None:
    """An attempt as one row; None where the policy sampled nothing.

    Raises:
        TrainingError: the agent rewrites its prompts, so that the attempt is several rows.
    """
    return _row(trajectory.generations, f"attempt {trajectory.attempt} at {trajectory.task_id}")


def _row(generations: Sequence[Generation], where: str) -> Side | None:
    ids: tuple[int, ...] = ()
    mask: list[bool] = []
    for generation in generations:
        if not generation.n_tokens:
            continue
        prompt = generation.prompt.token_ids
        if prompt[: len(ids)] != ids:
            raise TrainingError(
                "the attempt is not a single row of tokens: its prompts do not extend each other",
                where=where,
                got=f"a prompt of {len(prompt)} tokens that does not begin with the {len(ids)} before it",
                expected="an agent whose context only grows, such as {kind: chat} with memory: {kind: full}",
                hint="compare single actions by pairs.level: parting, of one role by pairs.role where the agent has "
                "several; or let a reward_model learn by objective: outcome",
            )
        mask += [False] * (len(prompt) - len(mask)) + [True] * generation.n_tokens
        ids = generation.full_ids
    return Side(ids, tuple(mask)) if ids else None
