"""Recipe key `asynchrony`: how far rollouts may run ahead of training, and what that asks of the other parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.stores.remembering import Remembering
from rewards.contrib.episodic_memory import remembering
from rlhf.asynchrony.pipeline import Order, Rules
from rlhf.checking import CheckContext, IgnoredKeys, Problem
from rlhf.inference.settings import VllmSettings
from rlhf.losses.importance_correction import Bypass
from rlhf.losses.policy_loss import LossNeeds
from rlhf.settings import STRICT
from rlhf.tasks.sampler import SamplerCapabilities
from rlhf.tasks.selection import SelectionCapabilities

#: Keys of a stage whose parts act within rollouts, or learn from their order, and are not made for groups played ahead.
_NOT_YET = (
    "critic",
    "replay",
    "offline_data",
    "self_certainty",
    "group_demonstrations",
    "imitate_failed",
    "reward_refresh",
    "judge_refresh",
    "opponents",
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Asynchrony:
    """Asynchronous rollouts: attempts are generated during updates, by a policy at most `staleness` updates old."""

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys("staleness", 0, ("max_steps_ahead", "order", "weight_update", "checkpoint")),
    )

    staleness: Annotated[int, Field(ge=0)] = 0
    """Maximum staleness S: steps by which the policy that sampled a token may be behind the one trained on it. 0 is
    synchronous."""
    max_steps_ahead: Annotated[int, Field(ge=1)] | None = None
    """Steps that rollouts may run ahead of training; at most `staleness`, the default."""
    order: Order = "in_order"
    """Order in which groups are trained: sampler order, however long they take; or as they finish, which favours short
    episodes, see `asynchrony/length_bias`."""
    weight_update: Literal["immediate", "deterministic"] = "immediate"
    """When running attempts get new weights: at once, or once all earlier groups have finished. `deterministic` samples
    group n with the policy of step max(0, n // tasks_per_step - max_steps_ahead), so that runs are reproducible."""
    checkpoint: Literal["drain", "restart"] = "drain"
    """Running attempts at a checkpoint: wait for them, or restart them on resume."""

    @property
    def is_on(self) -> bool:
        """True if attempts are made ahead."""
        return self.staleness > 0

    @property
    def steps_ahead(self) -> int:
        """Steps that are played ahead."""
        return self.staleness if self.max_steps_ahead is None else self.max_steps_ahead

    def rules(self, n_per_step: int, n_steps: int) -> Rules:
        """Return the rules of a stage."""
        is_fixed = self.weight_update == "deterministic"
        return Rules(n_per_step, n_steps, self.staleness, self.steps_ahead, self.order, is_fixed)

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse bounds that contradict each other, and parts that cannot work with attempts made ahead."""
        if not self.is_on:
            return
        if self.steps_ahead > self.staleness:
            yield Problem(
                "rollouts would run further ahead than the staleness bound allows",
                where=context.at("max_steps_ahead"),
                got=f"{self.max_steps_ahead} with staleness: {self.staleness}",
                expected=f"1 to {self.staleness}",
                do=f"lower it, or set {context.at('staleness')}: {self.max_steps_ahead}",
            )
        if self.weight_update == "deterministic" and self.order != "in_order":
            yield Problem(
                "the order in which attempts finish is not deterministic, so weight_update cannot be deterministic",
                where=context.at("order"),
                got=f"{self.order} with weight_update: deterministic",
                expected="in_order",
                do="remove one of the two keys",
            )
        yield from self._of_parts(context)
        for path, stage in context.recipe.learning:
            yield from self._of_loss(path, stage, context)
            yield from self._of_stage(path, stage, context)

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse a step that has no group for some of the processes."""
        for path, stage in context.recipe.learning if self.is_on else ():
            if stage.tasks_per_step < n:
                yield Problem(
                    "a process would have no group to generate ahead",
                    where=f"{path}.tasks_per_step",
                    got=f"{stage.tasks_per_step}, and {n} processes were started",
                    expected=f"at least {n} with {context.at('staleness')} above 0",
                    do="raise it, or start fewer processes",
                )

    def _of_loss(self, path: str, stage: Any, context: CheckContext) -> Iterator[Problem]:
        """Yield a problem where nothing tells a token of an old policy from one of the present policy."""
        if self.staleness > 1 and isinstance(stage.correction, Bypass) and LossNeeds(stage.loss).needs_fresh_samples:
            yield Problem(
                "tokens of old policies would count as on-policy: the loss has no ratio, and there is no correction",
                where=f"{path}.correction",
                got=f"bypass with {context.kind_of('loss', stage.loss)}, {context.at('staleness')}: {self.staleness}",
                expected="a correction, or a loss with a ratio",
                do=f"write {path}.correction: {{kind: truncated}}, or {path}.loss: {{kind: ppo_clip}}",
            )

    def _of_stage(self, path: str, stage: Any, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with parts of a stage that are not made for this yet."""
        said: list[tuple[str, str, str]] = [
            (key, context.kind_of("critic", stage.critic) if key == "critic" else "set", "remove the key")
            for key in _NOT_YET
            if getattr(stage, key) is not None
        ]
        if not SamplerCapabilities(stage.sampler).is_stream:
            kind = context.kind_of("sampler", stage.sampler)
            said.append(("sampler", f"{kind}, which learns from each step what comes next", "use {kind: shuffled}"))
        if SelectionCapabilities(stage.selection).max_rounds > 1:
            kind = context.kind_of("selection", stage.selection)
            said.append(("selection", f"{kind}, which draws more tasks within a step", "use {kind: all}"))
        for key, got, do in said:
            yield _not_yet(f"{path}.{key}", got, context, do)

    def _of_parts(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with parts outside of the stages."""
        recipe = context.recipe
        if isinstance(recipe.agent, Remembering):
            yield _not_yet(
                "agent", "an agent with a store, which is written between steps", context, "use another agent"
            )
        of_stages = [(f"stages[{i}].rewards", stage.own_rewards) for i, stage in enumerate(recipe.stages)]
        for where, rewards in (("rewards", recipe.rewards), *of_stages):
            for path, _ in remembering("", {name: one.reward for name, one in rewards.items()}):
                yield _not_yet(f"{where}.{path}", "a reward that remembers attempts", context, "remove the reward")
        if recipe.policy.lora is not None and recipe.policy.lora.roles:
            yield _not_yet("policy.lora.roles", str(recipe.policy.lora.roles), context, "remove the key")
        if isinstance(recipe.engine, VllmSettings) and recipe.engine.sleep:
            yield Problem(
                "the engine would sleep during rollouts",
                where="engine.sleep",
                got="true",
                expected=f"false with {context.at('staleness')} above 0",
                do="remove the key",
            )


def _not_yet(where: str, got: str, context: CheckContext, do: str) -> Problem:
    return Problem(
        "this is not yet supported with asynchronous training",
        where=where,
        got=got,
        expected=f"nothing of the kind while {context.at('staleness')} is above 0",
        do=f"{do}, or set {context.at('staleness')}: 0",
    )
