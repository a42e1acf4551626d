"""Logged attempts of other runs, added to or replacing the samples of a step.

With `sample: false` nothing is sampled: any loss with a ratio, and any group estimator, learns from logs alone. With
`sample: true` runs share their attempts while they go on, a swarm without a centre.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.samples import Sample, check_roles, make_samples
from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import compute_advantages
from rlhf.data import ScoredGroup
from rlhf.errors import TrainingError
from rlhf.losses.policy_loss import LossNeeds, refuse_without_ratio
from rlhf.settings import STRICT
from rlhf.tasks.shuffled import drawn_apart
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OfflineData:
    """Learn from the stored training attempts of other runs too, whose policies read the same tokens.

    Their groups are credited by the stage's estimator, with the scores that are stored, and their tokens keep the
    log-probs of whoever sampled them as the old ones: the loss's ratio is that of the present policy to that one.
    Groups whose attempts all score the same are left out, as `filters.drop_zero_advantage` does. Groups come in an
    order of the seed, each once before any comes again and once in a step, as long as the runs write nothing new.

    Sources: shared attempts, SAPO, arXiv 2509.08721, where each node scores what it gets itself; logs alone, with
    `a_lol` and `dr_grpo`, A-LoL, arXiv 2305.14718, whose value of a task is a head on the reference and not the group's
    mean.
    """

    runs: Annotated[tuple[str, ...], Field(min_length=1)]
    """Folders of the runs; they may still be training."""
    groups: Annotated[int, Field(ge=1)] = 16
    """Groups of theirs in each step, or as many as there are."""
    newest: Annotated[int, Field(ge=1)] | None = None
    """Only attempts of the last so many steps of each run's newest stage; null takes all."""
    sample: bool = False
    """Train on the policy's own attempts at `tasks_per_step` tasks beside them."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse losses that take no old samples, and estimators that need more than the attempts."""
        stage = context.stage
        yield from refuse_without_ratio(context, "offline_data", "what others sampled would count as if the policy had")
        needs = LossNeeds(stage.loss)
        if needs.teacher is not None or needs.needs_mean_logprobs:
            yield Problem(
                "this loss needs statistics that are not computed for attempts of other runs",
                where=context.path,
                got=f"offline_data with {context.kind_of('loss', stage.loss)}",
                expected="a loss of tokens and log-probs only",
                do="use loss: {kind: ppo_clip}",
            )
        if stage.critic is not None or stage.advantage.needs_values:
            yield Problem(
                "a critic cannot value the attempts of other runs",
                where=context.path,
                got=f"offline_data with {context.kind_of('advantage', stage.advantage)}",
                expected="an estimator without a critic",
                do="use advantage: {kind: grpo}",
            )

        if stage.filters.high_entropy_share is not None:
            yield Problem(
                "entropies are not computed for attempts of other runs",
                where=context.path,
                got=f"offline_data with filters.high_entropy_share: {stage.filters.high_entropy_share}",
                expected="no such filter",
                do="remove the filter",
            )

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes, which might read the runs at different moments."""
        yield Problem(
            "attempts of other runs need a single process",
            where=context.path,
            got=f"{n} processes",
            expected="one process",
            do="start one process, or remove the key",
        )


def place_of(stage: int) -> int:
    """Return the place of a stage's stored attempts among the demonstrations of a run, beside those of its sampler."""
    return -1 - stage


class StoredGroups(Protocol):
    """Reads what other runs have stored so far."""

    def groups(self) -> Sequence[ScoredGroup]:
        """Return their groups, in an order of their own."""


@plain_dataclass
class OfflineDataHook(StageHook):
    """Adds rows of stored groups to a step.

    Attributes:
        settings: the recipe keys.
        source: of the stored groups; None before the stage is opened.
        step: under way.
        label: of the stage, for messages.
        seed: of the order.
    """

    settings: OfflineData
    source: StoredGroups | None = None
    step: Step | None = None
    label: str = ""
    seed: str = ""

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Find the source of the stage."""
        found: Any = run.demonstrations[place_of(run.state.stage)]
        self.source, self.label, self.seed = found, run.state.label, f"{run.seed}/{run.state.stage}/logged"

    def before_step(self, run: RunContext, step: Step) -> None:
        """Remember the step, whose keys are those of its number."""
        self.step = step

    def extend_samples(
        self, samples: Sequence[Sample], rng: np.random.Generator
    ) -> tuple[Sequence[Sample], dict[str, float]]:
        """Return the rows of the step with those of stored groups behind them.

        Raises:
            TrainingError: nothing is stored to learn from, and nothing is sampled.
            DataError: no stored generation has a role that is trained.
        """
        assert self.step is not None and self.source is not None
        stage, stored = self.step.stage, self.source.groups()
        groups = self._drawn(stored, self.step.number)
        figures = {"offline_data/n_groups": float(len(groups)), "offline_data/n_stored": float(len(stored))}
        if not groups:
            if not self.settings.sample:
                raise TrainingError(
                    "there are no stored attempts to learn from",
                    where=f"stages: {self.label}, offline_data.runs",
                    got=f"{len(stored)} groups in {', '.join(self.settings.runs)}, each with equal scores",
                    expected="a group of which one attempt scores more than another",
                    hint="name runs with a policy_gradient stage",
                )
            return samples, figures
        rows, _ = make_samples(groups, compute_advantages(stage.advantage, groups), stage.layout, stage.train_roles)
        if not rows and stage.train_roles:
            check_roles(stored, stage.train_roles)
        rows, _ = stage.filters(rows, groups)
        first_s, first_g = (max((getattr(s, name) for s in samples), default=-1) + 1 for name in ("sequence", "group"))
        theirs = [
            replace(
                s,
                sequence=s.sequence + first_s,
                group=s.group + first_g,
                # Those of another run, which say nothing of how old the tokens are.
                versions=None if s.versions is None else np.full_like(s.versions, -1),
            )
            for s in rows
        ]
        return [_with_old(s) for s in (*samples, *theirs)], figures

    def _drawn(self, stored: Sequence[ScoredGroup], number: int) -> list[ScoredGroup]:
        own = map(_without_demonstrations, stored)
        differing = [g for g in own if len({score.total for score in g.scores}) > 1]
        return [differing[i] for i in drawn_apart(len(differing), self.seed, self.settings.groups, number)]


def _without_demonstrations(group: ScoredGroup) -> ScoredGroup:
    kept = [i for i, trajectory in enumerate(group.trajectories) if not trajectory.is_demonstration]
    if len(kept) == len(group.trajectories):
        return group
    return replace(
        group,
        trajectories=tuple(group.trajectories[i] for i in kept),
        scores=tuple(group.scores[i] for i in kept),
    )


def _with_old(sample: Sample) -> Sample:
    return sample if sample.old_logprobs is not None else replace(sample, old_logprobs=sample.sampler_logprobs)
