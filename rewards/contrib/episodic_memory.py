"""Intrinsic reward of episodic memory: like right answers, unlike wrong ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.combinators.parts import with_parts
from rewards.contrib.answer_store import AnswerBuffer, exploit, explore, normalised
from rewards.contrib.found_subgoals import FoundSubgoals
from rewards.models.embedding import embedded
from rlhf.checking import CheckContext, Problem
from rlhf.data import ScoredGroup, Task, Trajectory, Verdict
from rlhf.errors import nearest
from rlhf.settings import STRICT

_Beta = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EpisodicMemory:
    """Intrinsic reward β_s · exploit + β_e · explore of the stage's own attempts, from 0 to β_s + β_e.

    Among the `nearest` remembered queries, exploit = −‖a − mean of their successes‖₂ and explore = 1 − the largest
    cosine of a with their failures, a being the attempt's vector; each is normalised by min and max of its last
    `window` values. Without successes, or failures, or where the window is constant, that term is 0. An attempt at
    (1, 0), with successes (.8, .6) and (1, 0) and failures (0, 1) and (.6, .8), has −.316228 and .4; .4 in a window
    from .1 to .9 is worth .375.

    The query is what the attempt read before the policy said anything, the answer all of its actions. Both are hashed
    words and runs of three characters: alike is what is written alike.

    The memory learns once in each finished step of a policy-gradient stage, from all attempts drawn in it, begins empty
    with each stage, and is kept in checkpoints. Within a step it stands still, so that the same attempt is worth the
    same. Outside of the sampling of such a stage, in an evaluation above all, it is neither read nor filled, and every
    attempt is worth 0.

    Source: Memory-R⁺, arXiv 2504.02273.
    """

    inline: ClassVar[bool] = True

    exploit: _Beta = 1.0
    """β_s, weight of being like successes."""
    explore: _Beta = 1.0
    """β_e, weight of being unlike failures."""
    success_reward: str | None = None
    """Reward of the recipe that says what came out right, by name; null for what the environment calls solved."""
    correct_above: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    """An attempt is a success where that reward is above this; solved counts 1, anything else 0."""
    nearest: _Count = 1
    """K, the remembered queries whose answers are looked at."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Steps at the begin of a stage in which only `explore` pays."""
    window: Annotated[int, Field(ge=2)] = 100
    """Newest values of each term, of all attempts, that it is normalised by."""
    per_query: _Count = 100
    """L, answers that are remembered of a query: the newest successes, and as many failures."""
    capacity: _Count = 20_000
    """Successes that are remembered in all, and as many failures; the query that was met longest ago goes first."""
    dim: Annotated[int, Field(ge=8)] = 128
    """Length of the vectors. A memory takes at most 16 · capacity · dim bytes."""

    def __post_init__(self) -> None:
        if self.capacity < self.per_query:
            raise ValueError(f"capacity: {self.capacity} is less than per_query, which is {self.per_query}")
        if not self.exploit and not self.explore:
            raise ValueError("exploit, explore: both are 0, so the reward is always 0")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a memory that feeds on itself, is never filled, or never pays."""
        recipe = context.recipe
        others = [name for name in recipe.rewards if name != context.reward]
        if self.success_reward is not None and self.success_reward not in others:
            is_own = self.success_reward == context.reward
            yield Problem(
                "an episodic memory needs another reward as its success label" if is_own else "there is no such reward",
                where=context.at("success_reward"),
                got=self.success_reward,
                expected=", ".join(others) or "another reward of the recipe",
                do=nearest(self.success_reward, others)
                or "name one of these, or leave `success_reward` out to ask the environment",
            )
        if not recipe.longest:
            yield Problem(
                "the memory stays empty: only policy_gradient stages fill it",
                where=context.path,
                got=", ".join(type(stage).__name__ for stage in recipe.stages),
                expected="a stage {kind: policy_gradient}",
                do="remove the reward",
            )
        if not self.explore and recipe.longest <= self.warmup_steps:
            yield Problem(
                "this reward is always 0: every stage ends within warmup_steps, and explore is 0",
                where=context.at("warmup_steps"),
                got=str(self.warmup_steps),
                expected=f"less than the longest stage, which has {recipe.longest} steps",
                do="lower warmup_steps, or give explore a weight",
            )

    @cached_property
    def episodes(self) -> Episodes:
        """Live memory of episodes, apart from the settings."""
        return Episodes(self)

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Compare the attempt with what is remembered."""
        if not self.episodes.is_open:
            return Verdict(0.0, why="nothing is remembered here")
        like, unlike = self.episodes.terms(*self.episodes.raw(trajectory))
        why = f"like successes {like:.2f}, unlike failures {unlike:.2f}"
        return Verdict(self.exploit * like + self.explore * unlike, why=why)


class Episodes:
    """Episodes of a stage. Only `learn` changes them; it answers while `is_open`."""

    def __init__(self, settings: EpisodicMemory) -> None:
        self.settings, self.is_open = settings, False
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        bounds = (self.settings.per_query, self.settings.capacity, self.settings.dim)
        self.successes, self.failures = AnswerBuffer(*bounds), AnswerBuffer(*bounds)
        self.exploits: list[float] = []
        self.explores: list[float] = []
        self.n_steps = 0

    def raw(self, trajectory: Trajectory) -> tuple[float | None, float | None]:
        """Exploit and explore of an attempt before normalisation; None without anything to compare."""
        query, answer = query_of(trajectory), embedded(answer_of(trajectory), self.settings.dim)
        right, wrong = (shelf.near(query, self.settings.nearest) for shelf in (self.successes, self.failures))
        return exploit(answer, right) if len(right) else None, explore(answer, wrong) if len(wrong) else None

    def terms(self, like: float | None, unlike: float | None) -> tuple[float, float]:
        """Both normalised; exploit is 0 while the stage warms up."""
        is_warm = self.n_steps >= self.settings.warmup_steps
        return normalised(like if is_warm else None, self.exploits), normalised(unlike, self.explores)

    def learn(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Update on a finished step, once. Returns the figures of it.

        The windows take what the attempts of the step were, compared with the memory before the step; demonstrations
        are left out of everything.
        """
        met = [(t, s) for g in groups for t, s in zip(g.trajectories, g.scores, strict=True) if not t.is_demonstration]
        raw = [self.raw(t) for t, _ in met]
        likes, unlikes = (
            [x for x in column if x is not None] for column in (zip(*raw, strict=True) if raw else ((), ()))
        )
        for trajectory, score in met:
            name, values = self.settings.success_reward, {**score.monitored, **score.parts}
            value = float(trajectory.solved) if name is None else values[name].value if name in values else None
            if value is not None:  # a monitored reward may have failed
                shelf = self.successes if value > self.settings.correct_above else self.failures
                shelf.add(query_of(trajectory), embedded(answer_of(trajectory), self.settings.dim))
        self.exploits = [*self.exploits, *likes][-self.settings.window :]
        self.explores = [*self.explores, *unlikes][-self.settings.window :]
        self.n_steps += 1
        figures = {"episodic_successes": float(self.successes.n), "episodic_failures": float(self.failures.n)}
        means = {"episodic_exploit": likes, "episodic_explore": unlikes}
        return figures | {name: sum(values) / len(values) for name, values in means.items() if values}

    def state_dict(self) -> dict[str, Any]:
        """Everything it remembers."""
        shelves = {"successes": self.successes.state_dict(), "failures": self.failures.state_dict()}
        return {**shelves, "exploits": self.exploits, "explores": self.explores, "n_steps": self.n_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.successes.load_state_dict(state["successes"])
        self.failures.load_state_dict(state["failures"])
        self.exploits, self.explores = list(state["exploits"]), list(state["explores"])
        self.n_steps = int(state["n_steps"])


def query_of(trajectory: Trajectory) -> str:
    """Prompt before the policy's first reply; the task's id where that is empty."""
    given = (turn.reply for turn in trajectory.turns[: trajectory.n_given])
    return "\n".join((trajectory.opening, *given)).strip() or trajectory.task_id


def answer_of(trajectory: Trajectory) -> str:
    """Every action of the policy, in order."""
    return "\n".join(turn.action.text for turn in trajectory.turns[trajectory.n_given :])


def remembering(path: str, rewards: Mapping[str, Any]) -> Iterator[tuple[str, EpisodicMemory | FoundSubgoals]]:
    """Give path and settings of every reward that remembers, those within another included."""
    kinds = EpisodicMemory | FoundSubgoals
    return ((at, part) for at, part in with_parts(path, rewards) if isinstance(part, kinds))
