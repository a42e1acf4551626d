"""Test-time strategies: several attempts at a task, one of which is chosen as the answer.

What chooses does not know whether an attempt was right: it is given the task without its reference, and the attempts
without success and without the rewards of the environment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import GroupReward, Reward, name_of
from rewards.judges.majority import Majority
from rewards.shaping.outcome import EnvironmentReward
from rewards.shaping.outcome import Outcome as OutcomeReward
from rewards.verified import Verified, is_verifier
from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import Outcome, Task, Trajectory
from rlhf.errors import RecipeError, RewardError
from rlhf.rollout.group_structure import GroupStructure, Independent, Retry, Tree
from rlhf.rollout.limits import Limits
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.settings import STRICT

_TIMEOUT_S = Limits().reward_timeout_s


@plain_dataclass(frozen=True, slots=True)
class Choice:
    """Candidate that is chosen as the answer.

    Attributes:
        index: of the candidate, in the order given.
        why: for the reader.
    """

    index: int
    why: str = ""


@runtime_checkable
class Strategy(Protocol):
    """Test-time strategy: how many candidates, and which of them answers.

    A frozen dataclass of its recipe keys, with `needs_tokens = True` if it reads log-probs.
    """

    @property
    def n(self) -> int:
        """Candidates of one answer."""

    @property
    def rollout(self) -> GroupStructure:
        """Group structure that makes the candidates."""

    async def choose(self, task: Task, candidates: Sequence[Trajectory], *, timeout_s: float = _TIMEOUT_S) -> Choice:
        """Choose among the candidates at `task`, failures of parts left out: at least one.

        Args:
            task: without its reference.
            candidates: as `unseen` leaves them.
            timeout_s: limit of each call of a reward.

        Raises:
            RewardError: there is nothing to choose by, because what judges has failed.
        """


class StrategyCapabilities(CapabilityView):
    """Optional attributes of a strategy, with a default for each that it leaves out."""

    needs_tokens = Capability(False, bool)
    """True if it reads log-probs of the candidates."""
    judge = Capability[object](None)
    """A reward that it chooses by, which is shown the policy's tokenizer before the first choice."""


def unseen(task: Task, candidates: Sequence[Trajectory]) -> tuple[Task, list[Trajectory]]:
    """Return both without what a policy at work would not know: the reference, success and rewards."""
    return replace(task, reference=None), [
        replace(
            t,
            outcome=Outcome.FAILED if t.solved else t.outcome,
            turns=tuple(replace(turn, reward=0.0) for turn in t.turns),
        )
        for t in candidates
    ]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BestOfN:
    """Best-of-n: the judge's choice or, without a judge, the candidate of highest likelihood.

    How sure is the mean log-prob of the sampled tokens, nats per token: (1/T) Σ_t log π(a_t), over all turns. Means of
    −0.5, −0.2 and −0.9 choose the second. A candidate without tokens is the last choice. Of equals the first is taken.

    The judge may be any reward that needs no reference. One that knows the answer is refused, and any other is shown
    attempts without their success and rewards: `outcome` inside `combine` finds all of them equally bad. A candidate on
    which the judge fails is left out.

    Source: best of n by a verifier, K. Cobbe et al., arXiv 2110.14168; by the policy's own probability, D. Adiwardana
    et al., arXiv 2001.09977.
    """

    n: Annotated[int, Field(ge=1)] = 4
    """Candidates of one answer."""
    judge: Reward | GroupReward | None = None
    """A reward, with its kind and keys; null uses the log-probs of the policy."""

    rollout: ClassVar[GroupStructure] = Independent()

    def __post_init__(self) -> None:
        """Refuse a judge that knows whether an attempt was right."""
        if isinstance(self.judge, OutcomeReward | EnvironmentReward):
            raise self._refused("which is the verdict itself", "a reward that does not see the environment's verdict")
        if self.judge is not None and (isinstance(self.judge, Verified) or is_verifier(self.judge)):
            raise self._refused("which compares with the hidden reference", "a reward that needs none")

    def _refused(self, why: str, expected: str) -> RecipeError:
        return RecipeError(
            "this judge uses the outcome of an attempt",
            where="judge",
            got=f"{name_of(self.judge)}, {why}",
            expected=expected,
            hint="remove the key to choose by log-probs, or use a model: judge: {kind: grade, path: FOLDER}",
        )

    @property
    def needs_tokens(self) -> bool:
        """True if log-probs of the policy are read."""
        return self.judge is None

    async def choose(self, task: Task, candidates: Sequence[Trajectory], *, timeout_s: float = _TIMEOUT_S) -> Choice:
        """Take the best; see `Strategy.choose`."""
        if self.judge is None:
            values: dict[int, float] = {i: mean_logprob(t) for i, t in enumerate(candidates)}
        else:
            values = await judged(self.judge, task, candidates, timeout_s)
        index = max(values, key=values.__getitem__)  # the first of equals
        by = "mean log-prob" if self.judge is None else "the judge"
        return Choice(index, f"{values[index]:.4g} by {by}, of {len(values)}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SelfConsistency:
    """The first candidate with the commonest answer; answers are read and counted as `reward: {kind: majority}` does.

    Answers 5, 4, 4, 6 choose the second. A candidate without an answer does not vote; where none has one, the first is
    chosen. It means something where the last action is the answer, and little where it is a step like any other.

    Source: X. Wang et al., arXiv 2203.11171.
    """

    n: Annotated[int, Field(ge=1)] = 8
    """Candidates of one answer."""
    pattern: str | None = None
    """A regular expression; the last match in the last action is the answer, or its first group where it has one. Null
    takes the whole text."""

    rollout: ClassVar[GroupStructure] = Independent()
    needs_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse what is no regular expression."""
        Majority(pattern=self.pattern)

    async def choose(self, task: Task, candidates: Sequence[Trajectory], *, timeout_s: float = _TIMEOUT_S) -> Choice:
        """Vote; see `Strategy.choose`."""
        vote = Majority(pattern=self.pattern)
        answers = [vote.answer(t) for t in candidates]
        votes = Counter(a for a in answers if a is not None)
        if not votes:
            return Choice(0, "no candidate has an answer")
        answer = max(votes, key=votes.__getitem__)
        return Choice(answers.index(answer), f"{votes[answer]} of {votes.total()} answer {answer[:80]!r}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TreeSearch:
    """The best leaf of trees of attempts: some branch off others, and sample anew from there on.

    What leads to a branch is replayed in a fresh episode of the environment, which has to be replayable. It is sampled
    once, so n leaves cost fewer tokens than n attempts of their own. The leaf is chosen as `best_of_n` does.

    Sources: those of `rollout: {kind: tree}`, which trains on such trees.
    """

    n: Annotated[int, Field(ge=1)] = 6
    """Leaves of all trees of one answer."""
    judge: Reward | GroupReward | None = None
    """A reward, with its kind and keys; null uses the log-probs of the policy."""
    rollout: GroupStructure = Field(default_factory=Tree)
    """Branching of the search: a kind of `rollout`, with its keys."""

    def __post_init__(self) -> None:
        """Refuse a number of leaves that the trees cannot have, and a judge that knows the answer."""
        self._best()
        try:
            self.rollout.n_from_start(self.n)
        except ValueError as error:
            raise ValueError(f"n is {self.n}, expected {error}") from error

    @property
    def needs_tokens(self) -> bool:
        """True if log-probs of the policy are read."""
        return self.judge is None

    async def choose(self, task: Task, candidates: Sequence[Trajectory], *, timeout_s: float = _TIMEOUT_S) -> Choice:
        """Take the best leaf; see `Strategy.choose`."""
        return await self._best().choose(task, candidates, timeout_s=timeout_s)

    def _best(self) -> BestOfN:
        return BestOfN(n=self.n, judge=self.judge)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReflectAndRetry:
    """The last of several attempts, each of which is shown the ones before it.

    With `until: solved` the environment's verdict decides whether there is another attempt, as in a world that says
    whether something worked: this is the one strategy that is told. With `until: end` there are always n attempts and
    nobody is told; `choose: vote` then takes the commonest answer, as `self_consistency` does.

    Sources: those of `rollout: {kind: retry}`, which trains on such attempts.
    """

    n: Annotated[int, Field(ge=2)] = 3
    """Attempts of one answer at most."""
    until: Literal["solved", "end"] = "solved"
    """End of the chain: at a solved attempt, or at its last."""
    choose_by: Literal["last", "vote"] = "last"
    """Choice of the answer: the last attempt, or a vote."""
    ask: str | None = None
    """Message after the earlier attempts; null is the text of `rollout: {kind: retry}`."""

    needs_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a vote among attempts that are known to have failed."""
        if self.choose_by == "vote" and self.until == "solved":
            raise ValueError("choose_by is vote, expected last: with until: solved all attempts but the last failed")

    @property
    def rollout(self) -> Retry:
        """Chains of n attempts."""
        return Retry(retries=self.n - 1, until=self.until, ask=self.ask)

    async def choose(self, task: Task, candidates: Sequence[Trajectory], *, timeout_s: float = _TIMEOUT_S) -> Choice:
        """Take the last, or vote; see `Strategy.choose`."""
        if self.choose_by == "vote":
            return await SelfConsistency(n=self.n).choose(task, candidates, timeout_s=timeout_s)
        index = max(range(len(candidates)), key=lambda i: candidates[i].attempt)
        return Choice(index, f"attempt {len(candidates)} of at most {self.n}")


def mean_logprob(trajectory: Trajectory) -> float:
    """Mean log-prob of the sampled tokens, nats; −inf where nothing was sampled."""
    logprobs = [x for g in trajectory.generations for x in g.logprobs]
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf


async def judged(judge: Any, task: Task, candidates: Sequence[Trajectory], timeout_s: float) -> dict[int, float]:
    """Judge scores of the candidates, by index; those on which it fails are left out.

    Raises:
        RewardError: it fails on all of them.
    """
    numbers = {t.attempt: i for i, t in enumerate(candidates)}  # a judge may compare an attempt with its parent
    numbered = [
        replace(t, attempt=i, parent=None if t.parent is None else numbers.get(t.parent))
        for i, t in enumerate(candidates)
    ]
    group = await score_group(task, numbered, {"judge": WeightedReward("judge", 1.0, judge)}, timeout_s=timeout_s)
    if not group.trajectories:
        raise RewardError(
            "the judge of the strategy fails on every candidate",
            where=f"strategy.judge, task {task.id}",
            got=group.failures[0].message if group.failures else "no candidates",
            hint="`rlhf check reward` says what is wrong with it",
        )
    return {t.attempt: s.total for t, s in zip(group.trajectories, group.scores, strict=True)}
