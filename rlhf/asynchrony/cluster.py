"""Recipe key `cluster`: processes of a run on Ray, on one machine or many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, Silenced
from rlhf.inference.settings import EngineCapabilities, VllmSettings
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cluster:
    """Learners, rollout workers and servers as processes of Ray; attempts are made by the workers, on the servers."""

    silences: ClassVar[tuple[Silenced, ...]] = (Silenced("rollout_workers", 0, ("learners", "servers")),)

    learners: Annotated[int, Field(ge=1)] = 1
    """Processes that train together, with a GPU each where Ray has any; several need a trainer such as deepspeed."""
    rollout_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that play and score attempts, with a CPU each; 0 makes attempts in the learners, without Ray."""
    servers: Annotated[int, Field(ge=0)] = 0
    """Servers of the policy that are started, as by `rlhf serve`; 0 uses those of `engine.servers`, which run."""

    @property
    def is_on(self) -> bool:
        """True if the run is made of processes of Ray."""
        return self.rollout_workers > 0

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse workers without servers, with two kinds of them, or in turn with updates."""
        if not self.is_on:
            return
        recipe, engine = context.recipe, context.recipe.engine
        given = engine.servers if isinstance(engine, VllmSettings) else ()
        if not recipe.asynchrony.is_on:
            yield Problem(
                "rollout workers play while the learners train, which this recipe does in turn",
                where=context.at("rollout_workers"),
                got=f"{self.rollout_workers}, with asynchrony.staleness: 0",
                expected="asynchrony.staleness of 1 or more",
                do="set asynchrony.staleness: 1, or remove cluster",
            )
        if bool(given) == bool(self.servers):
            yield Problem(
                "rollout workers sample from servers, which are started or are there",
                where=context.at("servers"),
                got=f"{self.servers}, with engine.servers: [{', '.join(given)}]",
                expected="one of the two",
                do="remove engine.servers" if given else "set cluster.servers: 1, or engine.servers: [http://...]",
            )
        if recipe.policy.lora is not None and EngineCapabilities(engine).lora != "merged":
            yield Problem(
                "adapters on servers are known to the process that delivers them alone",
                where="engine.lora",
                got=engine.lora,
                expected="merged",
                do="set engine.lora: merged, which delivers full weights",
            )
