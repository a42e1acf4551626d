"""The supervised stage: imitate demonstrations of the environment's oracle, or the policy's own best attempts."""

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
from rlhf.training.shown import unplanned, unwritten


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Supervised:
    """Next-token training on the actions of demonstrations; observations are masked unless they are given a weight.

    The demonstrations are played by the environment's oracle. `random_share` and `unsolved_share` spoil them on
    purpose, so that the policy that reinforcement learning starts from is weak but not hopeless. With `attempts` the
    policy imitates the best of its own attempts instead, and these three keys have no effect.
    """

    #: Its rows know the role in which each call was made.
    knows_roles: ClassVar[bool] = True

    attempts: Attempts | None = None
    """Imitate the policy's own best attempts, in rounds; null imitates the oracle's demonstrations."""

    n_demonstrations: Annotated[int, Field(ge=1)] = 512
    """Tasks that the oracle plays, from the first of the split on; they come again where the split has fewer."""
    random_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the actions drawn at random, half of them possible where they are taken, half possible somewhere else;
    the oracle plans on from where they lead."""
    unsolved_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the demonstrations that are random throughout."""
    observation_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of an observation token's loss beside an action token's 1. Above 0 a model made from scratch also learns
    to predict what the environment says, and with it to copy from the context; a pretrained model needs none."""
    epochs: Annotated[int, Field(ge=1)] = 3
    """Passes over the demonstrations, or over what a round keeps."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Demonstrations per optimiser update."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=1e-3, schedule="cosine", warmup_steps=10))
    """How the weights are updated."""
    trainer: TrainerKind = Field(default_factory=Torch)
    """What computes the updates, in one process or in several: plain torch is for one."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 16384
    """Rows are packed to this many tokens for one forward pass; changes memory and speed, never the result."""
    split: str = "train"
    """Where the tasks come from."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse demonstrations that cannot be made, and keys of demonstrations beside attempts."""
        if self.attempts is not None:
            why = f"{context.at('attempts')} takes the place of demonstrations"
            keys = ("n_demonstrations", "random_share", "unsolved_share")
            yield from unused(self, keys, context.path, why, "remove the key, or attempts")
            return
        environment = context.kind_of("environment", context.recipe.environment)
        remove = "remove the stage and start from a pretrained policy"
        yield from unplanned(context.at("kind"), f"supervised with {environment}", remove, context)
        agent = context.kind_of("agent", context.recipe.agent)
        yield from unwritten(context.at("kind"), f"supervised with {agent}", "remove the stage", context)
        if self.unsolved_share == 1 and self.random_share:
            why = "unsolved_share is 1: all actions are random"
            yield no_effect(context.at("random_share"), self.random_share, why)
