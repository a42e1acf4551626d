"""The policy-gradient stage: its recipe keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.filters import Filters
from rlhf.credit.estimator import AdvantageEstimator
from rlhf.credit.grpo import GRPO
from rlhf.losses.importance_correction import Correction, Truncated
from rlhf.losses.policy_loss import PolicyLoss
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.rollout.group_structure import GroupStructure, Independent
from rlhf.settings import STRICT
from rlhf.tasks.sampler import TaskSampler
from rlhf.tasks.selection import All, GroupSelection
from rlhf.tasks.shuffled import Shuffled
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Torch, TrainerKind
from rlhf.training.contrib.judge_refresh_settings import JudgeRenewal
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh
from rlhf.training.critics.settings import CriticKind
from rlhf.training.hooks.demonstrations_in_groups import Expert
from rlhf.training.hooks.imitate_failed_tasks import Relift
from rlhf.training.hooks.opponent_settings import Opponents
from rlhf.training.hooks.reference_reset import ReferenceReset
from rlhf.training.hooks.replay import Replay


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyGradient:
    """Sample groups of trajectories, give every token its credit, update, deliver; repeat.

    One step makes `tasks_per_step` x `group_size` episodes and `epochs` x `minibatches` optimiser updates.
    """

    steps: Annotated[int, Field(ge=1)] = 100
    """Rounds of sampling and updating."""
    tasks_per_step: Annotated[int, Field(ge=1)] = 16
    """Different tasks attempted in one step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Attempts at each task; the group whose statistics give the advantage."""
    rollout: GroupStructure = Field(default_factory=Independent)
    """How these attempts come about: each on its own, or as the branches of trees."""
    sampler: TaskSampler = Field(default_factory=Shuffled)
    """Which tasks come next."""
    selection: GroupSelection = Field(default_factory=All)
    """Which groups of a step are trained on, and whether more tasks are to be drawn first."""
    advantage: AdvantageEstimator = Field(default_factory=GRPO)
    """The estimator that gives each sampled token its number."""
    critic: CriticKind | None = None
    """What learns the values that some estimators compare with: `gae`, `turn_gae`, `bilevel_gae`, `archer`,
    `sweet`."""
    loss: PolicyLoss = Field(default_factory=PPOClip)
    """What is minimised."""
    reference_reset: ReferenceReset | None = None
    """When the present policy becomes what the loss's KL term compares with; null keeps the policy of the stage's
    begin."""
    correction: Correction = Field(default_factory=Truncated)
    """What is done about an engine whose log-probs are not the trainer's; one that shares the trainer's weights needs
    none."""
    reduction: Reduction = Field(default_factory=Reduction)
    """How the losses of single tokens become one number."""
    filters: Filters = Field(default_factory=Filters)
    """Which rows are left out of the update."""
    expert: Expert | None = None
    """Demonstrations that join the attempts at their task, for a loss that takes them; null brings none."""
    imitate_failed: Relift | None = None
    """Supervised updates on demonstrations of tasks that every attempt failed; null makes none."""
    replay: Replay | None = None
    """Trajectories of the last steps that take the place of those left out; null replays nothing."""
    reward_refresh: RewardRefresh | None = None
    """When and how the reward model that the policy learns from is trained further; null leaves it as it is."""
    judge_refresh: JudgeRenewal | None = None
    """When the policy of some steps ago becomes the judge of a reward; null keeps the judge that the reward names."""
    opponents: Opponents | None = None
    """Games of self-play in which an older version of the policy has a seat; null plays all against the present one."""
    train_roles: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Roles whose generations are trained, such as `plan` or a seat of a game; the empty role is that of plain actions.
    Null trains all. The others count in the credit as ever."""
    layout: Literal["trajectory", "generation"] = "trajectory"
    """One row per trajectory (folded where prompts extend each other), or one row per generation."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the step's samples."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimiser updates in one pass; trajectories are kept whole."""
    optimizer: AdamW = Field(default_factory=AdamW)
    """How the weights are updated."""
    trainer: TrainerKind = Field(default_factory=Torch)
    """What computes the updates: plain torch in one process, or DeepSpeed in one or several."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 16384
    """Rows are packed to this many tokens for one forward pass; changes memory and speed, never the result."""
    split: str = "train"
    """Where the tasks come from."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations on `evaluation.watch_split`; 0 evaluates only before and after."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Evaluations in a row, of those that `evaluate_every` makes, without a new best lower end of the interval, after
    which the stage ends; null makes every step."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: Annotated[int, Field(ge=2)] | Literal["all"] = 2
    """How many checkpoints of this stage stay: the last so many, or all. The stage's start, every policy that a KL term
    compares with, and the best one that `evaluate_every` has found stay anyway. `rlhf extrapolate` needs early ones."""
    checkpoint_in_background: bool = False
    """Whether a thread writes checkpoints while the next step runs. Needs memory of the CPU for a copy of everything
    that is trained, and of the optimiser's state."""
