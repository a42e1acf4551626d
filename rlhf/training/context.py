"""Protocols of the run and the stage that hooks and critics are given.

They depend on these protocols alone, so that the run and the stage may depend on them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from rlhf.batching.filters import Filters
    from rlhf.credit.estimator import AdvantageEstimator
    from rlhf.data import Credit, ScoredGroup, TokenFigures
    from rlhf.losses.policy_loss import PolicyLoss
    from rlhf.rollout.runner import RolloutBatch, RolloutRunner
    from rlhf.tasks.sampler import Stateful
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.torch import TorchTrainer
    from rlhf.training.background_evaluation import BackgroundEvaluation
    from rlhf.training.checkpoints.store import Keep, State
    from rlhf.training.policy.model import Policy


class Progress(Protocol):
    """Shows a person what is going on."""

    def stage(self, name: str, total: int, done: int) -> None:
        """Start or continue a stage of `total` steps."""

    def advance(self, note: str) -> None:
        """Advance by a step; `note` says how it went."""

    def note(self, text: str) -> None:
        """Show a status line that the next one replaces, such as what is waited for."""

    def say(self, text: str) -> None:
        """Print a line."""


def is_due(every: int, step: int, n_steps: int) -> bool:
    """True if something is due after `step` of `n_steps`: each `every` steps but the last; 0 is never."""
    return every > 0 and step % every == 0 and step < n_steps


class RecordGroups(Protocol):
    """Keeps the trajectories of one step."""

    def __call__(
        self,
        stage: str,
        step: int,
        phase: Literal["train", "eval"],
        groups: Sequence[ScoredGroup],
        credits: Sequence[Credit | None] | None = None,
        figures: Sequence[TokenFigures | None] | None = None,
    ) -> object:
        """Write groups, each with its credit and the figures of its tokens where there are any."""


class StageKeys(Protocol):
    """The recipe keys of a policy-gradient stage that its parts read; `PolicyGradient` says what they mean."""

    @property
    def steps(self) -> int:
        """Rounds of sampling and updating."""

    @property
    def tasks_per_step(self) -> int:
        """Different tasks attempted in one step."""

    @property
    def group_size(self) -> int:
        """Attempts at each task."""

    @property
    def advantage(self) -> AdvantageEstimator:
        """Gives each sampled token its number."""

    @property
    def trainer(self) -> object:
        """Settings of the trainer."""

    @property
    def loss(self) -> PolicyLoss:
        """Loss that is minimised."""

    @property
    def train_roles(self) -> tuple[str, ...] | None:
        """Roles whose generations are trained; None for all."""

    @property
    def filters(self) -> Filters:
        """Which rows are trained on."""

    @property
    def layout(self) -> Literal["trajectory", "generation"]:
        """Unit that becomes a row."""

    @property
    def epochs(self) -> int:
        """Passes over the samples of a step."""

    @property
    def minibatches(self) -> int:
        """Optimiser updates in one pass."""

    @property
    def optimizer(self) -> AdamW:
        """Settings of the optimiser."""

    @property
    def temperature(self) -> float:
        """Sampling temperature of attempts."""

    @property
    def max_tokens_per_microbatch(self) -> int:
        """Tokens of one forward pass."""

    @property
    def keep_checkpoints(self) -> Keep:
        """Rule for the checkpoints of the stage that stay."""

    @property
    def checkpoint_in_background(self) -> bool:
        """True if a thread writes checkpoints."""


class LiveStage(Protocol):
    """The live parts of a policy-gradient stage, as the run and the hooks see them."""

    @property
    def stage(self) -> StageKeys:
        """The recipe keys."""

    @property
    def trainer(self) -> TorchTrainer:
        """Of the policy."""

    @property
    def kept(self) -> Mapping[str, Stateful]:
        """Live parts whose state a checkpoint keeps besides policy and optimiser, by name."""

    @property
    def n_critic_updates(self) -> int:
        """Updates of the critic so far; 0 without one."""

    @property
    def is_incomplete(self) -> bool:
        """True while something renewed between steps is half done, with no state to save."""


class RunContext(Protocol):
    """A live run, as the parts of its stages see it; see `rlhf.training.run.Run`."""

    folder: Path
    seed: int
    policy: Policy
    runner: RolloutRunner
    progress: Progress
    state: State
    demonstrations: Mapping[int, Any]
    background_evaluation: BackgroundEvaluation | None

    @property
    def estimate(self) -> Callable[[Sequence[bool], Sequence[str]], Any]:
        """Confidence interval of a share, of successes and their task ids."""

    @property
    def record(self) -> RecordGroups:
        """Keeps the trajectories of one step."""

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""

    def reseed(self, step: int) -> None:
        """Make every draw of torch a function of (process, seed, stage, step)."""

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """Profile `step` of the present stage, counted from 0."""

    def publish(self, *, same_version: bool = False) -> Awaitable[None]:
        """Hand the policy's present weights to the engine under a new version unless `same_version`."""

    def release_engine_memory(self) -> Awaitable[None]:
        """Let the engine free GPU memory until its next call or delivery."""

    def replace_reward(self, name: str, reward: Any) -> None:
        """Score with `reward` under this name, from now on."""

    def advance(self, **changes: Any) -> None:
        """Move the state on, the time since the last call included."""

    def save(
        self,
        parts: LiveStage | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        in_background: bool = False,
    ) -> Path:
        """Write a checkpoint of the present state."""

    def note_trainer(self, trainer: TorchTrainer) -> None:
        """Keep the configuration that a trainer was given for this stage."""

    def check_stop(self, save: Callable[[], Path] | None = None) -> Awaitable[None]:
        """Hear whether the user wants to stop, and save before."""

    def caution(self, collected: RolloutBatch, where: str) -> None:
        """Warn the user of faults that the run survives, once for each kind."""

    def warn_once(self, texts: Mapping[str, str]) -> None:
        """Print each of `texts` unless one of its name was printed before."""

    def log(self, step: int, values: Mapping[str, float], *, delivered: bool = True) -> None:
        """Write one line of metrics for the present stage."""
