"""The supervised stage: imitate the environment's oracle, data, or the policy's own best attempts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, no_effect, unused
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Torch, TrainerKind
from rlhf.training.contrib.expert_iteration import Attempts
from rlhf.training.demonstration_requirements import unplanned, unwritten
from rlhf.training.stages.chat_settings import Chats
from rlhf.training.stages.overrides import StageOverrides


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Supervised(StageOverrides):
    """SFT on the actions of demonstrations; observations are masked unless they have a weight.

    The demonstrations are played by the environment's oracle. `random_share` and `unsolved_share` spoil them on
    purpose, so that the policy that reinforcement learning starts from is weak but not hopeless. With
    `rejection_sampling` the policy imitates the best of its own attempts instead, with `data` chats of a file or
    attempts of another run, and these three keys have no effect.
    """

    #: Its rows know the role in which each call was made.
    knows_roles: ClassVar[bool] = True

    rejection_sampling: Attempts | None = None
    """Train on the policy's own best attempts, in rounds; null trains on the oracle's demonstrations."""

    data: Chats | None = None
    """Train on chats of a file, or attempts of another run, instead; null trains on demonstrations."""

    n_demonstrations: Annotated[int, Field(ge=1)] = 512
    """Number of demonstrations: the first tasks of the split, repeated if it has fewer."""
    random_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of random actions, half of them admissible, half admissible elsewhere; the oracle continues from the
    resulting state."""
    unsolved_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the demonstrations that are random throughout."""
    observation_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Loss weight of observation tokens, relative to 1 for action tokens. Above 0 a model from scratch also learns to
    predict observations, and so to copy from the context; a pretrained model does not need it."""
    epochs: Annotated[int, Field(ge=1)] = 3
    """Epochs over the demonstrations, or over the kept attempts of a round."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Demonstrations per optimizer update."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=1e-3, schedule="cosine", warmup_steps=10))
    """Optimizer of the policy."""
    trainer: TrainerKind = Field(default_factory=Torch)
    """Training backend; torch is for a single process."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Updates between checkpoints for resume; with 0 one is written where the run is stopped, and after a kill the
    stage restarts. Rounds of `rejection_sampling` have their own."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 16384
    """Rows are packed to this many tokens for one forward pass; changes memory and speed, never the result."""
    split: str = "train"
    """Split of the tasks."""

    @property
    def reads_file(self) -> bool:
        """True if it learns from a file, and from no task of its split."""
        return self.data is not None and self.data.path is not None

    @property
    def needs_rewards(self) -> bool:
        """True if it scores attempts of its own."""
        return self.rejection_sampling is not None

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse demonstrations that cannot be made, and keys of demonstrations beside attempts."""
        other = "rejection_sampling" if self.rejection_sampling is not None else "data" if self.data is not None else ""
        if other:
            why = f"{context.at(other)} takes the place of demonstrations"
            keys: tuple[str, ...] = ("n_demonstrations", "random_share", "unsolved_share")
            keys += (
                ("data", "checkpoint_every") if other == "rejection_sampling" else ("split",) if self.reads_file else ()
            )
            yield from unused(self, keys, context.path, why, f"remove the key, or {other}")
            return
        environment = context.kind_of("environment", context.recipe.environment)
        remove = "remove the stage and start from a pretrained policy"
        yield from unplanned(context.at("kind"), f"supervised with {environment}", remove, context)
        agent = context.kind_of("agent", context.recipe.agent)
        yield from unwritten(context.at("kind"), f"supervised with {agent}", "remove the stage", context)
        if self.unsolved_share == 1 and self.random_share:
            why = "unsolved_share is 1: all actions are random"
            yield no_effect(context.at("random_share"), self.random_share, why)
