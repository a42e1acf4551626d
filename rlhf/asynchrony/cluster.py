"""Recipe key `cluster`: processes of a run on Ray, on one machine or many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem, no_effect
from rlhf.inference.settings import EngineCapabilities, VllmSettings
from rlhf.settings import STRICT

#: Values of labels; more, such as in(a, b), Ray would take for a condition.
_LABEL = r"^[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cluster:
    """Learners, rollout workers and servers as processes of Ray; workers generate attempts on the servers."""

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys("rollout_workers", 0, ("learners", "servers", "eval_servers", "worker_labels")),
    )

    learners: Annotated[int, Field(ge=1)] = 1
    """Trainer processes, with a GPU each if Ray has any; several need a trainer such as deepspeed."""
    rollout_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that generate and score attempts, with a CPU each; 0 runs rollouts in the learners, without Ray."""
    servers: Annotated[int, Field(ge=0)] = 0
    """Inference servers to start, as by `rlhf serve`; 0 uses the running ones of `engine.servers`."""

    eval_servers: Annotated[int, Field(ge=0)] = 0
    """Additional servers for evaluations of `evaluate_every`, which then run in parallel with training, in a separate
    process and with the policy of their step; 0 pauses rollouts during evaluations."""

    worker_labels: dict[str, Annotated[str, Field(pattern=_LABEL)]] = field(default_factory=dict)
    """Labels of the nodes for rollout workers, which have the environment's packages, as set by `ray start --labels
    KEY=VALUE`; empty takes any node."""

    @property
    def is_on(self) -> bool:
        """True if the run is made of processes of Ray."""
        return self.rollout_workers > 0

    @property
    def n_cpus(self) -> int:
        """CPUs of all of them; who plays evaluations takes one."""
        return self.learners + self.rollout_workers + self.servers + self.eval_servers + (self.eval_servers > 0)

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse workers without servers, with two kinds of them, or in turn with updates."""
        if not self.is_on:
            return
        recipe, engine = context.recipe, context.recipe.engine
        given = engine.servers if isinstance(engine, VllmSettings) else ()
        if not recipe.asynchrony.is_on:
            yield Problem(
                "rollout workers need asynchronous training, and this recipe is synchronous",
                where=context.at("rollout_workers"),
                got=f"{self.rollout_workers}, with asynchrony.staleness: 0",
                expected="asynchrony.staleness of 1 or more",
                do="set asynchrony.staleness: 1, or remove cluster",
            )
        if bool(given) == bool(self.servers):
            yield Problem(
                "rollout workers need inference servers",
                where=context.at("servers"),
                got=f"{self.servers}, with engine.servers: [{', '.join(given)}]",
                expected="one of the two",
                do="remove engine.servers" if given else "set cluster.servers: 1, or engine.servers: [http://...]",
            )
        yield from self._of_evaluation(context)
        if recipe.policy.lora is not None and EngineCapabilities(engine).lora != "merged":
            yield Problem(
                "unmerged adapters on servers need a single process",
                where="engine.lora",
                got=engine.lora,
                expected="merged",
                do="set engine.lora: merged, which delivers full weights",
            )

    def _of_evaluation(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse servers for evaluations that none are made on, cannot be started, or would say when a stage ends."""
        where, got = context.at("eval_servers"), str(self.eval_servers)
        if not self.eval_servers:
            return
        if not self.servers:
            yield Problem(
                "evaluation servers are started like rollout servers, and these run already",
                where=where,
                got=f"{got}, with {context.at('servers')}: 0",
                expected=f"{context.at('servers')} of 1 or more",
                do=f"set {context.at('servers')}, or remove the key",
            )
        if not any(stage.evaluate_every for _, stage in context.recipe.learning):
            yield no_effect(where, got, "no stage sets evaluate_every")
        for path, stage in context.recipe.learning:
            reset = stage.reference_reset
            for key, patience in (("patience", stage.patience), ("reference_reset.patience", reset and reset.patience)):
                if patience is not None:
                    yield Problem(
                        "a parallel evaluation finishes at an unpredictable step, so patience cannot use it",
                        where=f"{path}.{key}",
                        got=f"{patience}, with {where}: {got}",
                        expected="no patience",
                        do=f"remove it, or {where}",
                    )
