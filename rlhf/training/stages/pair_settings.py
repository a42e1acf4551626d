"""Recipe keys of stages that learn from pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.chat import ChatAgent
from agents.memory.base import MEMORY
from agents.memory.full import FullHistory
from agents.roles import PLAIN_IS_EMPTY, never_called
from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem, unused
from rlhf.rollout.group_structure import unmakeable, unreplayable
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Torch
from rlhf.training.backends.sharding import unscaled
from rlhf.training.demonstration_requirements import unplanned, unwritten
from rlhf.training.stages.overrides import StageOverrides
from rlhf.training.stages.pairs import Pairs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PairStage(StageOverrides):
    """Common settings of the stages trained on preference pairs (`preference`, `reward_model`), by TRL's trainers."""

    #: Its rows do not know the role in which a call was made.
    knows_roles: ClassVar[bool] = False

    pairs: Pairs = Field(default_factory=Pairs)
    """Source of the pairs."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs over the pairs."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Pairs per optimizer update."""
    pairs_per_microbatch: Annotated[int, Field(ge=1)] = 8
    """Pairs per forward pass, padded to the longest; must divide a larger `batch_size`. Changes memory and speed only,
    as means are over the pairs, or the chosen tokens, of an update; except of `kto`, whose KL is estimated and cut off
    at 0 in each forward pass."""
    optimizer: AdamW = Field(default_factory=AdamW)
    """Optimizer of the stage."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: recompute activations in the backward pass."""
    split: str = "train"
    """Split of the tasks."""

    def __post_init__(self) -> None:
        if self.batch_size % self.at_once:
            raise ValueError("pairs_per_microbatch must divide batch_size")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse two sources of pairs, keys without effect, float16 and sharded weights."""
        yield from unscaled(f"{context.kind_of('stage', self)} in {context.path}", context)
        yield from self._sources(context.path, context.at("pairs"))
        recipe, source = context.recipe, self.pairs
        if source.level == "trajectory":
            why, do = "whole attempts are compared by their score", "remove the key, or use level: state or parting"
            yield from unused(source, ("gamma",), context.at("pairs"), why, do)
        if source.level != "parting":
            why, do = f"{context.at('pairs')} compares no segments", "remove the key, or use level: parting"
            yield from unused(source, ("turns",), context.at("pairs"), why, do)
        if source.level == "expert":
            yield from self._of_experts(context)
        if self.needs_pairs and not context.is_trained:
            yield from self._in_one_row(context)
        known = recipe.roles
        if source.role is not None and known and source.role not in known:
            yield never_called(context.at("pairs.role"), source.role, known, PLAIN_IS_EMPTY)
        if self.needs_rewards and not recipe.has_weight:
            yield Problem(
                "no attempt can be better than another: every reward has weight 0",
                where="rewards",
                got=", ".join(recipe.rewards) or "no rewards",
                expected=f"a reward with a weight, for {context.at('pairs')}",
                do="add rewards: {outcome: {kind: outcome}}, or name a file of pairs",
            )
        if recipe.sharded:
            yield Problem(
                "this stage cannot train sharded weights",
                where=context.at("kind"),
                got=f"{context.kind_of('stage', self)} beside a stage with {recipe.sharded_by}",
                expected=KEEPS_WHOLE,
                do="use such a trainer, or run the stage by itself on a checkpoint",
            )

    def _in_one_row(self, context: CheckContext) -> Iterator[Problem]:
        """Yield the problem of fresh pairs whose sides would be calls under several prompts."""
        source, recipe, seats = self.pairs, context.recipe, context.recipe.properties.seats
        roles = [role for role in recipe.roles if role != MEMORY]
        # Calls of one turn: those of one seat, or in all other roles.
        in_turn = [role for role in roles if role not in seats] + [role for role in roles if role in seats][:1]
        compared = roles if source.level == "trajectory" else in_turn
        if source.is_attempted and source.role is None and len(compared) > 1:
            agent = context.kind_of("agent", recipe.agent)
            own = "parting, with pairs.role: ROLE" if len(in_turn) > 1 else "state or parting"
            yield Problem(
                "the calls that would be compared are no single row of tokens: each role has a prompt of its own",
                where=context.at("pairs.level"),
                got=f"{source.level} with {agent}, which calls the policy as {', '.join(map(repr, compared))}",
                expected=f"calls of one role, or an agent with one, such as {{kind: chat}}, for level: {source.level}",
                do=f"use pairs.level: {own}; a reward_model also learns of all roles by objective: outcome",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about whole attempts of an agent that may forget, whose prompts then do not extend each other."""
        source, agent = self.pairs, context.recipe.agent
        is_whole = self.needs_pairs and source.is_attempted and source.level == "trajectory"
        if is_whole and isinstance(agent, ChatAgent) and not isinstance(agent.memory, FullHistory):
            yield (
                f"{context.at('pairs.level')} trajectory compares attempts whose prompts each extend the one before: "
                f"the run ends where agent.memory {context.kind_of('memory', agent.memory)} forgets; use level: state "
                "or parting, or memory: {kind: full}"
            )

    def _of_experts(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with the states of demonstrations."""
        where, recipe = context.at("pairs.level"), context.recipe
        environment = context.kind_of("environment", recipe.environment)
        do = "use level: parting"
        yield from unplanned(where, f"expert with {environment}", do, context)
        yield from unwritten(where, f"expert with {context.kind_of('agent', recipe.agent)}", do, context)
        if not recipe.properties.replayable:
            yield Problem(
                "attempts would begin with a replay, and this environment is not replayable",
                where=where,
                got=f"expert in {environment}",
                expected="an environment whose `properties` say replayable=True",
                do=do,
            )
        why = "the oracle's action is the better one, whatever was earned"
        yield from unused(self.pairs, ("gamma", "margin", "role"), context.at("pairs"), why, "remove the key")
        if not self.pairs.is_attempted:
            yield from unused(self.pairs, ("level",), context.at("pairs"), "the pairs are there already", "remove it")

    def _sources(self, path: str, where: str) -> Iterator[Problem]:
        """Yield problems with the place that pairs come from."""
        source = self.pairs
        if source.file is not None and source.from_run is not None:
            yield Problem(
                "pairs must have one source",
                where=where,
                got=f"file {source.file} and from_run {source.from_run}",
                expected="one of the two, or neither",
                do="remove one",
            )
        if source.from_run is None:
            why, do = f"{where}.from_run names no run whose attempts are chosen", "name one, or remove the key"
            yield from unused(source, ("rejected_from",), where, why, do)
        name = "file" if source.file is not None else "from_run"
        if not source.is_attempted:
            why, do = f"the pairs are those of {where}.{name}", f"remove the key, or {name}"
            yield from unused(source, ("tasks", "group_size", "temperature"), where, why, do)
            yield from unused(self, ("split",), path, why, do)
            if name == "file":
                yield from unused(source, ("level", "gamma", "margin", "max_per_task", "role"), where, why, do)

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        yield Problem(
            "this stage runs in one process",
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
    def needs_rewards(self) -> bool:
        """True if it scores attempts of its own; those of another run have been scored."""
        return self.pairs.file is None and self.pairs.from_run is None

    @property
    def needs_pairs(self) -> bool:
        """True if it compares attempts, or actions, in pairs."""
        return True

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


def made_as(stage: Any, context: CheckContext) -> Iterator[Problem]:
    """Yield problems with the `rollout` of a stage that learns from attempts."""
    source: Pairs = stage.pairs
    if source.is_attempted and source.level != "expert":
        yield from unmakeable(stage.rollout, source.group_size, context.at("pairs"))
        yield from unreplayable("rollout", stage.rollout, context.path, context)
        return
    why = "no groups are made of attempts from the beginning"
    yield from unused(stage, ("rollout",), context.path, why, "remove the key")
