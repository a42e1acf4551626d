"""Recipe keys of stages that learn from pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem, unused
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Torch
from rlhf.training.stages.pairs import Pairs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OnPairs:
    """Pairs come from somewhere, and TRL's trainer passes over them in batches."""

    #: Its rows do not know the role in which a call was made.
    knows_roles: ClassVar[bool] = False

    pairs: Pairs = Field(default_factory=Pairs)
    """Source of the pairs."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the pairs."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Pairs per optimiser update."""
    pairs_per_microbatch: Annotated[int, Field(ge=1)] = 8
    """Pairs of one forward pass; they are padded to the longest. A larger `batch_size` is a multiple of it. Changes
    memory and speed only: means are over the pairs, or the chosen tokens, of an update."""
    optimizer: AdamW = Field(default_factory=AdamW)
    """Optimizer of the stage."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass and keep those between layers only."""
    split: str = "train"
    """Split of the tasks."""
    rewards: dict[str, float] | None = None
    """Weights of the rewards in this stage, by name; one that is not named is asked and has none. Null: as the recipe
    says. A model that a later stage trains is not asked."""

    def __post_init__(self) -> None:
        if self.batch_size % self.at_once:
            raise ValueError("pairs_per_microbatch must divide batch_size")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse pairs of two places, keys that mean nothing to them, and weights in pieces."""
        yield from self._sources(context.path, context.at("pairs"))
        recipe, source = context.recipe, self.pairs
        if source.level == "trajectory":
            why, do = "whole attempts are compared by their score", "remove the key, or use level: state or parting"
            yield from unused(source, ("gamma",), context.at("pairs"), why, do)
        if source.file is None and not recipe.has_weight:
            yield Problem(
                "no attempt can be better than another: every reward has weight 0",
                where="rewards",
                got=", ".join(recipe.rewards) or "no rewards",
                expected=f"a reward with a weight, for {context.at('pairs')}",
                do="add rewards: {outcome: {kind: outcome}}, or name a file of pairs",
            )
        if recipe.sharded:
            yield Problem(
                "this stage cannot train weights that lie in pieces",
                where=context.at("kind"),
                got=f"{context.kind_of('stage', self)} beside a stage with {recipe.sharded_by}",
                expected=KEEPS_WHOLE,
                do="use such a trainer, or run the stage by itself on a checkpoint",
            )

    def _sources(self, path: str, where: str) -> Iterator[Problem]:
        """Yield problems with the place that pairs come from."""
        source = self.pairs
        if source.file is not None and source.from_run is not None:
            yield Problem(
                "pairs come from one place",
                where=where,
                got=f"file {source.file} and from_run {source.from_run}",
                expected="one of the two, or neither",
                do="remove one",
            )
        name = "file" if source.file is not None else "from_run"
        if not source.is_attempted:
            why, do = f"the pairs are those of {where}.{name}", f"remove the key, or {name}"
            yield from unused(source, ("tasks", "group_size", "temperature"), where, why, do)
            yield from unused(self, ("split",), path, why, do)
            if name == "file":
                yield from unused(source, ("level", "gamma", "margin", "max_per_task"), where, why, do)

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        yield Problem(
            "this stage works in one process",
            where=context.at("kind"),
            got=f"{context.kind_of('stage', self)}, and {n} processes were started",
            expected="one process",
            do="start one process, or run the stage by itself on the checkpoint of the others",
        )

    @property
    def reads_file(self) -> bool:
        """True if it learns from a file, and from no task of its split."""
        return self.pairs.file is not None

    @property
    def trainer(self) -> Torch:
        """TRL's trainer is plain torch in one process."""
        return Torch(gradient_checkpointing=self.gradient_checkpointing)

    @property
    def at_once(self) -> int:
        """Pairs of one forward pass."""
        return min(self.pairs_per_microbatch, self.batch_size)

    def n_updates(self, n_pairs: int) -> int:
        """Optimiser updates of the stage: an epoch's last one may be smaller than the others."""
        return self.epochs * math.ceil(math.ceil(n_pairs / self.at_once) / (self.batch_size // self.at_once))
