"""Recipe keys of opponents: older versions of the policy that play seats or turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.contrib.self_play import SelfPlay
from environments.base import Capabilities
from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem, in_one_process
from rlhf.rollout.group_structure import Independent
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Opponents:
    """Past versions of the policy in some seats of its self-play games, or in some turns of its attempts.

    The policy of the stage's begin is the first version; after every `every` steps the present one joins, and of all of
    them the last `keep` stay. In about `share` of the games one seat is played by one of them, each as likely as
    another; which seat it is alternates from one such game of a group to the next. What it says is read by the others
    and never trained on, and `advantage: {kind: seats}` compares its seat with nobody's.

    With `by: turn` any environment will do: in each turn of an attempt, with chance `share`, one of them acts in the
    policy's place (cross-policy sampling), so that the policy meets states which it would not reach by itself.

    What a version costs are its trained parameters, of an adapter the adapter, in memory and in every checkpoint. It
    needs the engine that shares the trainer's module.

    Sources: sampling from stale snapshots turn by turn, AgentRL, arXiv 2510.04206; fictitious self-play, Heinrich,
    Lanctot, Silver, 2015.
    """

    by: Literal["seat", "turn"] = "seat"
    """Unit of sampling: a seat of a whole game, or turns of an attempt."""
    every: Annotated[int, Field(ge=1)] = 10
    """Steps between snapshots of the policy."""
    keep: Annotated[int, Field(ge=1)] = 4
    """Number of latest snapshots to keep."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Probability that a past version plays a seat of a game, or a turn."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse stages in which older versions could not play, or never would.

        An agent of kind `self_play` can be measured where the other seat is the environment's own: then the seats wait
        until somebody trains.
        """
        if self.by == "seat" and not isinstance(context.recipe.agent, SelfPlay):
            yield from self.check_seats(context)
        yield from self._beside(context)
        steps = context.stage.steps
        if self.keep > 1 and self.every >= steps:
            yield Problem(
                "this key has no effect",
                where=context.at("every"),
                got=f"{self.every}, and the stage has {steps} steps",
                expected=f"less than {steps}: else the stage's first policy is the only older version",
                do="lower it, or write keep: 1 to play against the stage's first policy only",
            )

    def check_seats(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a game without another seat."""
        recipe = context.recipe
        seats = recipe.properties.seats
        if len(seats) >= 2 or self.by == "turn":
            return
        do = "use environment: {kind: textarena, game: TicTacToe-v0, opponent: self}"
        if Capabilities(recipe.environment).opponent != ():
            do = "play both seats: environment.opponent=self"
        agent = "" if isinstance(recipe.agent, SelfPlay) else " and agent={kind: self_play}"
        kind = context.kind_of("environment", recipe.environment)
        yield Problem(
            "there is no other seat for an older version",
            where=context.path,
            got=f"{kind} with " + (f"the seat {seats[0]}" if seats else "no seats"),
            expected="an environment whose `properties` name two seats or more, or by: turn",
            do=f"{do}{agent}, or remove the key",
        )

    def _beside(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with the engine, the critic and the rollout."""
        recipe, stage = context.recipe, context.stage
        if not recipe.shares_policy:
            apart = recipe.sharded_by
            engine = f"engine: {context.kind_of('engine', recipe.engine)}"
            yield Problem(
                "older versions play on the engine that shares the trainer's module",
                where=context.path,
                got=f"a stage with {apart}" if apart else engine,
                expected=KEEPS_WHOLE if apart else "engine: {kind: transformers}",
                do=f"change {'the trainer' if apart else 'engine.kind'}, or remove the key",
            )
        if stage.critic is not None:
            yield Problem(
                "a critic would also learn from the generations of older versions",
                where=context.path,
                got=f"a critic of kind {context.kind_of('critic', stage.critic)} beside it",
                expected="critic: null",
                do="use an estimator without a critic, such as advantage: {kind: seats}",
            )
        if not isinstance(stage.rollout, Independent):
            yield Problem(
                "attempts that branch from others would have the same opponent",
                where=context.path,
                got=f"rollout: {context.kind_of('rollout', stage.rollout)}",
                expected="rollout: {kind: independent}",
                do="remove one of the two keys",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about a game without another seat, which can be measured and not trained."""
        if isinstance(context.recipe.agent, SelfPlay) and any(self.check_seats(context)):
            yield f"{context.path} has no seat in this environment: the recipe can be evaluated but not trained"

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        yield in_one_process("older versions of the policy are kept", context, n)
