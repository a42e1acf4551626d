"""The policy-gradient stage: its recipe keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Capabilities
from agents.roles import PLAIN_IS_EMPTY, never_called
from rlhf.batching.filters import Filters
from rlhf.checking import CheckContext, Problem, no_effect
from rlhf.credit.estimator import AdvantageEstimator
from rlhf.credit.grpo import GRPO
from rlhf.losses.importance_correction import Bypass, Correction, Truncated
from rlhf.losses.policy_loss import LossNeeds, PolicyLoss
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.losses.regularized import Regularized
from rlhf.rollout.group_structure import GroupStructure, Independent, replays, unmakeable, unreplayable
from rlhf.settings import STRICT
from rlhf.tasks.sampler import DemonstratedSampler, TaskSampler
from rlhf.tasks.selection import All, GroupSelection
from rlhf.tasks.shuffled import Shuffled
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Torch, TrainerKind
from rlhf.training.backends.sharding import compiles, n_per_row_of
from rlhf.training.contrib.demonstrations_in_groups import GroupDemonstrations
from rlhf.training.contrib.imitate_failed_tasks import ImitateFailed
from rlhf.training.contrib.judge_refresh_settings import JudgeRefresh
from rlhf.training.contrib.logged_attempts import OfflineData
from rlhf.training.contrib.opponent_settings import Opponents
from rlhf.training.contrib.reference_reset import ReferenceReset
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh
from rlhf.training.contrib.self_certainty import SelfCertainty
from rlhf.training.contrib.token_stats import TokenStatsSettings
from rlhf.training.critics.settings import CriticKind
from rlhf.training.demonstration_requirements import unplanned
from rlhf.training.hooks.replay import Replay
from rlhf.training.stages.overrides import StageOverrides


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyGradient(StageOverrides):
    """Policy-gradient RL: sample groups of trajectories, compute advantages, update, deliver the weights; repeat.

    One step makes `tasks_per_step` x `group_size` episodes and `epochs` x `minibatches` optimiser updates.
    """

    #: Its rows know the role in which each call was made.
    knows_roles: ClassVar[bool] = True
    #: Its attempts are at tasks of its split.
    reads_file: ClassVar[bool] = False
    #: They are scored.
    needs_rewards: ClassVar[bool] = True

    steps: Annotated[int, Field(ge=1)] = 100
    """Training steps: rollout and update."""
    tasks_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompts per step: different tasks attempted."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Attempts per task: the group over which advantages are computed."""
    rollout: GroupStructure = Field(default_factory=Independent)
    """Group structure of the attempts: independent, trees, or retry chains."""
    sampler: TaskSampler = Field(default_factory=Shuffled)
    """Sampler of tasks."""
    selection: GroupSelection = Field(default_factory=All)
    """Selection of groups to train on, and dynamic sampling."""
    advantage: AdvantageEstimator = Field(default_factory=GRPO)
    """Advantage estimator."""
    critic: CriticKind | None = None
    """Critic (value model): needed by `gae`, `turn_gae`, `bilevel_gae`, `archer` and `sweet`, optional with `oreal` and
    `progress`."""
    loss: PolicyLoss = Field(default_factory=PPOClip)
    """Policy loss."""
    reference_reset: ReferenceReset | None = None
    """Resets of the KL reference to the current policy; null keeps the policy of the stage's start."""
    correction: Correction = Field(default_factory=Truncated)
    """Importance-sampling correction for the sampler/trainer mismatch; an engine that shares the trainer's weights
    needs none."""
    reduction: Reduction = Field(default_factory=Reduction)
    """Aggregation of token losses."""
    filters: Filters = Field(default_factory=Filters)
    """Filters of rows excluded from the update."""
    group_demonstrations: GroupDemonstrations | None = None
    """Demonstrations added to the group of their task, for a loss that supports them; null adds none."""
    imitate_failed: ImitateFailed | None = None
    """SFT updates on demonstrations of tasks that every attempt failed; null makes none."""
    replay: Replay | None = None
    """Replay buffer: trajectories of recent steps that replace those filtered out; null replays nothing."""
    offline_data: OfflineData | None = None
    """Off-policy data: stored attempts of other runs, in addition to or instead of the policy's; null uses none."""
    self_certainty: SelfCertainty | None = None
    """Reward for the policy's self-certainty; null adds none."""
    reward_refresh: RewardRefresh | None = None
    """Online training of the reward model during the stage; null keeps it fixed."""
    judge_refresh: JudgeRefresh | None = None
    """Replacement of a reward's judge by a recent policy; null keeps the reward's judge."""
    opponents: Opponents | None = None
    """Past policy versions as opponents in self-play, or in turns of any attempts; null uses none."""
    train_roles: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Roles whose generations are trained, such as `plan` or a seat of a game; the empty role is that of plain actions.
    Null trains all. The others still count for the advantages."""
    layout: Literal["trajectory", "generation"] = "trajectory"
    """Row layout: one row per trajectory (folded where prompts extend each other), or one per reply."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs over the step's samples."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer updates per epoch; trajectories are not split."""
    routing_replay: bool = False
    """Routing replay for mixtures of experts (arXiv 2507.18071, section 5.3): all updates of a step use the experts
    that the policy chose for each token before the first. Layers are not compiled."""
    optimizer: AdamW = Field(default_factory=AdamW)
    """Optimizer of the policy."""
    trainer: TrainerKind = Field(default_factory=Torch)
    """Training backend; torch is for a single process."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature, also applied to the trainer's logits."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 16384
    """Rows are packed to this many tokens for one forward pass; changes memory and speed, never the result."""
    split: str = "train"
    """Split of the tasks."""
    token_stats: TokenStatsSettings | None = None
    """Entropy and trainer/engine gap per sampled token, stored with the attempts for the viewer; null stores neither.
    """
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations on `evaluation.validation_split`, none after the last step; 0 disables them.
    Independently, a run is evaluated before its first stage with rollouts and after its last."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Early stopping: consecutive evaluations of `evaluate_every` without a new best lower end of the interval; null
    never stops early."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: Annotated[int, Field(ge=2)] | Literal["all"] = 2
    """Number of latest checkpoints of this stage to keep, or `all`. The stage's start, every KL reference, and the best
    one of `evaluate_every` are always kept. `rlhf extrapolate` needs early ones."""
    checkpoint_in_background: bool = False
    """Write checkpoints in a background thread during the next step. Needs host memory for a copy of all trained
    weights and optimizer states."""

    @property
    def needs_weight(self) -> bool:
        """True if it learns nothing unless a reward has a weight."""
        return self.self_certainty is None and bool(LossNeeds(self.loss).needs_score)

    @property
    def n_warmup_steps(self) -> int:
        """Steps of the critic's warm-up, in which the policy is not updated."""
        return min(self.critic.warmup_steps, self.steps) if self.critic else 0

    @property
    def n_policy_steps(self) -> int:
        """Steps that update the policy: those after the critic's warm-up."""
        return self.steps - self.n_warmup_steps

    @property
    def n_evaluations(self) -> int:
        """Evaluations between the steps, of a policy that the stage has updated; there is none after the last step."""
        if not self.evaluate_every:
            return 0
        return max((self.steps - 1) // self.evaluate_every - self.n_warmup_steps // self.evaluate_every, 0)

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates of one step."""
        return self.epochs * self.minibatches

    @property
    def n_updates(self) -> int:
        """Optimiser updates of the policy in the stage, the horizon of its schedule; none in the critic's warm-up."""
        return self.n_policy_steps * self.updates_per_step

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse sizes, critics, samplers and keys that do not go with each other."""
        yield from self._of_sizes(context)
        yield from self._of_silence(context)
        if context.recipe.shares_policy and self.correction != type(self)().correction:
            why = "the engine shares the trainer's weights: what it reports is what the trainer computes"
            yield no_effect(context.at("correction"), context.kind_of("correction", self.correction), why)
        yield from self._of_critic(context)
        yield from self._of_starts(context)
        yield from self._of_routing(context)
        # The first one is the best so far, unless there was one in the critic's warm-up, of the same policy.
        n_first = int(self.evaluate_every > self.n_warmup_steps)
        if self.patience is not None and self.n_evaluations - n_first < self.patience:
            yield Problem(
                "patience has no effect: there are too few evaluations",
                where=context.at("patience"),
                got=f"{self.patience}, with {self.n_evaluations} evaluations between {self.n_policy_steps} steps",
                expected=f"at least {self.patience + n_first}{', the first being the best so far' if n_first else ''}",
                do=f"set {context.at('evaluate_every')}, a lower one, or a lower patience",
            )
        if not context.is_trained:
            yield from self._of_roles(context)
            yield from self._of_ratios(context)

    def _of_sizes(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with the number of trajectories."""
        n_episodes = self.tasks_per_step * self.group_size
        if self.minibatches > n_episodes:
            yield Problem(
                "there are more minibatches than trajectories",
                where=context.at("minibatches"),
                got=str(self.minibatches),
                expected=f"at most tasks_per_step x group_size = {n_episodes}",
                do="a trajectory is never cut in two",
            )

    def _of_silence(self, context: CheckContext) -> Iterator[Problem]:
        """Yield a problem where no attempt scores anything, and such groups are left out."""
        weights = [w.weight for w in self.own_rewards.values()] + list((self.weights or {}).values())
        is_scored = any(weights) or (self.rewards is None and context.recipe.has_weight)
        if not (is_scored or self.needs_weight or self.self_certainty) and self.filters.drop_zero_advantage:
            yield Problem(
                "no reward has a weight, so every group has equal scores, and these are left out",
                where=context.at("filters.drop_zero_advantage"),
                got="true",
                expected="false where no reward has a weight",
                do="set it to false, or give a reward a weight",
            )

    def _of_critic(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with a critic."""
        if self.critic is not None and self.train_roles is not None:
            yield Problem(
                "a critic learns from all generations",
                where=context.at("train_roles"),
                got=f"{', '.join(map(repr, self.train_roles))} beside a critic",
                expected="null",
                do="remove the key, or use an estimator without a critic, such as grpo",
            )
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            yield Problem(
                "the policy would never be updated",
                where=context.at("critic.warmup_steps"),
                got=str(self.critic.warmup_steps),
                expected=f"less than steps = {self.steps}",
                do="lower it, or raise steps",
            )

    def _of_routing(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with the replay of experts."""
        where = context.at("routing_replay")
        if not self.routing_replay:
            return
        if self.updates_per_step == 1 and not context.is_trained:
            why = "the stage makes one update per step, whose experts are those from before it"
            yield no_effect(where, True, why, "remove the key, or set minibatches or epochs above 1")
        if n_per_row_of(self.trainer) > 1:
            yield Problem(
                "routing replay needs whole rows",
                where=where,
                got="true, with trainer.sequence_parallel",
                expected="sequence_parallel: 1",
                do="remove one of the two",
            )
        if compiles(self.trainer):
            yield Problem(
                "routing replay does not support compilation",
                where=where,
                got="true, with trainer.compile: true",
                expected="compile: false, or auto",
                do="remove one of the two",
            )

    def _of_starts(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with episodes that begin in the middle."""
        recipe, where = context.recipe, context.at("sampler.kind")
        yield from unreplayable("sampler", self.sampler, context.path, context)
        yield from unreplayable("rollout", self.rollout, context.path, context)
        kind = context.kind_of("sampler", self.sampler)
        if replays(self.sampler) and Capabilities(recipe.agent).write is None:
            yield Problem(
                "this agent cannot render turns of demonstrations",
                where=where,
                got=f"{kind} with {context.kind_of('agent', recipe.agent)}, which lacks write",
                expected="a method `write(action)`, for turns without generations",
                do="use sampler: {kind: shuffled}, or write it as agents.chat.ChatAgent does",
            )
        if isinstance(self.sampler, DemonstratedSampler):
            got = f"{kind} with {context.kind_of('environment', recipe.environment)}"
            yield from unplanned(
                where, got, "use sampler: {kind: exploratory_iteration}, which needs no demonstrations", context
            )
        yield from unmakeable(self.rollout, self.group_size, context.path)

    def _of_roles(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with roles that are trained and that the agent never has."""
        known = context.recipe.roles
        for role in self.train_roles or ():
            if known and role not in known:
                yield never_called(context.at("train_roles"), role, known, PLAIN_IS_EMPTY)

    def _of_ratios(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with keys of the loss for ratios other than 1, where there are none."""
        recipe, loss = context.recipe, self.loss
        bypassed = isinstance(self.correction, Bypass) and not recipe.shares_policy
        is_old = bypassed or self.replay is not None or self.offline_data is not None  # tokens of a policy of before
        if (
            self.updates_per_step > 1
            or is_old
            or not recipe.is_listed("loss", loss)
            or not isinstance(loss, Regularized)
        ):
            return
        why = "the stage makes one update per step, in which every ratio is 1"
        for field in fields(loss):
            value = getattr(loss, field.name)
            if field.name in loss.ratio_keys and value != field.default:
                do = "remove the key, or set minibatches or epochs above 1"
                yield no_effect(context.at(f"loss.{field.name}"), value, why, do)

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution on an endless warm-up, and on losses with unsuited updates or reduction."""
        n_updates, traits = self.updates_per_step, LossNeeds(self.loss)
        if endless := self.optimizer.endless_warmup(self.n_updates, context.path):
            yield endless
        if traits.needs_fresh_samples and n_updates > 1:
            do = "set loss.max_weight" if traits.bounds_ratio else "set epochs and minibatches to 1"
            yield f"{context.path} makes {n_updates} updates per step and its loss is right for the first: {do}"
        if traits.needs_fresh_samples and isinstance(self.correction, Bypass) and not context.recipe.shares_policy:
            yield f"{context.at('correction')} is bypass and its loss has no ratio: the engine gap is not corrected"
        if traits.reductions and self.reduction.kind not in traits.reductions:
            meant = f"{context.kind_of('loss', self.loss)} is defined with {' or '.join(traits.reductions)}"
            yield f"{context.at('reduction')} is {self.reduction.kind}, and {meant}"
