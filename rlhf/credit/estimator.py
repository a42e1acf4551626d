"""The contract of an advantage estimator, and its application to the groups of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

from rlhf.capabilities import Capability, CapabilityView
from rlhf.checking import CheckContext, Problem
from rlhf.data import Credit, Score, ScoredGroup, Values
from rlhf.data.scoring import TokensGNT
from rlhf.data.untrusted import shown
from rlhf.errors import DataError, nearest

_Given = TypeVar("_Given")


@runtime_checkable
class AdvantageEstimator(Protocol):
    """Advantage estimator: from scored groups to an advantage per sampled token; a frozen dataclass of its recipe keys.

    Where its statistics are over all groups of a step, it also has a method `over_batch` (see `BatchEstimator`).
    Attributes that it may have: `scale`, the units of its advantages (`rlhf.checking.Scale`); `needs_critic`, the kind
    of critic whose values it needs; `needs_branches`, if it compares attempts that branch off others; `turn_discount`,
    the name of its key that is a discount per turn.
    """

    @property
    def needs_values(self) -> bool:
        """True if it needs a critic."""

    @property
    def min_group(self) -> int:
        """Smallest group size that gives any signal."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Advantage of each sampled token of `group`, and counters of degenerate cases.

        Where it needs values it is given those of the group, and says in `Credit.returns_GNT` what the critic is to
        be trained on.
        """


@runtime_checkable
class BatchEstimator(Protocol):
    """Estimator whose numbers for one group depend on the other groups of the step."""

    @property
    def over_batch(self) -> Callable[..., list[Credit]]:
        """Credit of each of `groups`, in their order. Counters of the whole step stand in the first credit alone.

        A method `over_batch(groups)`; of an estimator that needs values, `over_batch(groups, values)` with the
        values of each group.
        """


class EstimatorCapabilities(CapabilityView):
    """Optional attributes of an estimator, with a default for each that it leaves out."""

    inner = Capability[object](None)
    """The estimator that it wraps."""
    needs_critic = Capability[str | None](None, str)
    """Kind of critic that it compares with."""
    takes_critic = Capability("", str)
    """Kind of critic that is optional for it."""
    turn_reward = Capability[str | None](None, str)
    """Name of the reward whose values per turn it reads."""
    needs_branches = Capability[object](False)
    """True if it compares attempts that branch."""
    compares_states = Capability(False, bool)
    """True if it compares turns that began in one state (`Turn.state_key`); without states it has no signal."""
    gamma = Capability(1.0, float)
    """Discount of its returns; per sampled token unless `turn_discount` names it."""
    turn_discount = Capability("", str)
    """Name of its key that is the discount per turn of its returns; empty where it has none."""


def critic_of(estimator: object) -> str | None:
    """Kind of critic that an estimator, or its `inner`, compares with; None where undeclared."""
    return EstimatorCapabilities(innermost(estimator)).needs_critic


def turn_discount(estimator: object) -> float:
    """Discount per turn of the returns of an estimator, or of its `inner`; 1.0 where undeclared."""
    estimator = innermost(estimator)
    key = EstimatorCapabilities(estimator).turn_discount
    return float(getattr(estimator, key)) if key else 1.0


def innermost(estimator: object) -> object:
    """The estimator in all `inner`."""
    while (inner := EstimatorCapabilities(estimator).inner) is not None:
        estimator = inner
    return estimator


def with_nested(estimator: object) -> Iterator[object]:
    """Yield an estimator and all within it: `inner`, or the levels `planner` and `executor`."""
    yield estimator
    for name in ("inner", "planner", "executor"):
        if (part := getattr(estimator, name, None)) is not None:
            yield from with_nested(part)


def may_take(estimator: object, critic: str) -> bool:
    """True if a critic of this kind is optional for the estimator (attribute `takes_critic`)."""
    return EstimatorCapabilities(estimator).takes_critic == critic


def needs_branches(estimator: object) -> bool:
    """True if the estimator compares attempts that branch (attribute `needs_branches`)."""
    return bool(EstimatorCapabilities(estimator).needs_branches)


def missing_part(estimator: object, context: CheckContext, why: str, do: str) -> Problem:
    """The problem of an estimator without the part that it compares by."""
    return Problem(
        "the recipe lacks a part that the advantage estimator needs",
        where=context.at("kind"),
        got=f"{context.kind_of('advantage', estimator)}, and {why}",
        expected="a recipe with that part",
        do=do,
    )


def unknown_reward_problem(name: str, key: str, context: CheckContext) -> Problem:
    """The problem of a key that names a reward which judges turns, and none of the recipe's."""
    rewards = context.recipe.trained_rewards
    return Problem(
        "there is no such reward",
        where=context.at(key),
        got=name,
        expected=", ".join(rewards),
        do=nearest(name, rewards) or "name a key of `rewards` that judges each turn",
    )


def compute_advantages(
    estimator: AdvantageEstimator, groups: Sequence[ScoredGroup], values: Sequence[Values] | None = None
) -> list[Credit]:
    """Credit of each group of a step, jointly where the estimator works on whole steps.

    The estimator does not see turns that were given to the policy (`Trajectory.n_given`): they hold no token, and what
    nobody did is not compared with what the policy did.

    Args:
        estimator: sees `values` only if it needs them.
        groups: of one step.
        values: aligned with `groups`.

    Raises:
        DataError: a score or a credit is not finite, a credit does not match the tokens of its group, `over_batch`
            returned another number of credits than there are groups, or values that the estimator needs are missing or
            do not match the groups.
    """
    groups = [without_given(group) for group in groups]
    given: list[Sequence[Values]] = []
    if estimator.needs_values:
        values = require_values(values, type(estimator).__name__)
        _check_number(len(values), len(groups), "values", "compute_advantages")
        for group, of_group in zip(groups, values, strict=True):
            of_group.check(group)
        given = [values]
    if not isinstance(estimator, BatchEstimator):
        return [_checked(estimator(*of_group), of_group[0], estimator) for of_group in zip(groups, *given, strict=True)]
    credits = estimator.over_batch(groups, *given)
    _check_number(len(credits), len(groups), "credits", f"{type(estimator).__name__}.over_batch")
    return [_checked(credit, group, estimator) for credit, group in zip(credits, groups, strict=True)]


def _checked(credit: object, group: ScoredGroup, estimator: object) -> Credit:
    """Return what an estimator says of a group. Raises DataError where that is no credit of it."""
    if isinstance(credit, Credit):
        try:
            credit.check(group)
        except DataError as error:
            error.where = f"{type(estimator).__name__}, {error.where}"
            raise
        return credit
    raise DataError(
        "an advantage estimator did not return the credit of a group",
        where=type(estimator).__name__,
        got=shown(credit),
        expected="a Credit, with a number for each token of each generation of each trajectory",
        hint="return rlhf.data.Credit(advantages_GNT) on every path",
    )


def without_given(group: ScoredGroup) -> ScoredGroup:
    """Return `group` without the turns that its trajectories were given. The sampled tokens stay as they are."""
    if not any(t.n_given for t in group.trajectories):
        return group
    return replace(
        group,
        trajectories=tuple(
            replace(t, turns=t.turns[t.n_given :], n_given=0, n_shared=max(t.n_shared - t.n_given, 0))
            for t in group.trajectories
        ),
        scores=tuple(_from(s, t.n_given) for s, t in zip(group.scores, group.trajectories, strict=True)),
    )


def _from(score: Score, first: int) -> Score:
    parts = {
        name: verdict if verdict.per_turn is None else replace(verdict, per_turn=verdict.per_turn[first:])
        for name, verdict in score.parts.items()
    }
    return replace(score, parts=parts, turns=score.turns[first:])


def require_values(values: _Given | None, estimator: str) -> _Given:
    """Return `values`, which `estimator` cannot do without.

    Raises:
        DataError: there are none.
    """
    if values is None:
        raise DataError(
            "this estimator needs the values of a critic",
            where=estimator,
            got="no values",
            expected="one value per sampled token",
            hint="train a critic, or use an estimator with needs_values = False, such as grpo",
        )
    return values


def require_action_values(values: Values | None, estimator: str, critic: str) -> TokensGNT:
    """Return what `values` say of turns, which `estimator` cannot do without.

    Raises:
        DataError: there are no values, or none of turns, as a critic of kind `critic` would give.
    """
    found = require_values(values, estimator).actions_GNT
    if found is None:
        raise DataError(
            "this estimator needs the values of actions",
            where=estimator,
            got="values of states alone",
            expected="Values.actions_GNT",
            hint=f"use critic: {{kind: {critic}}}",
        )
    return found


def _check_number(got: int, expected: int, what: str, where: str) -> None:
    if got != expected:
        raise DataError(
            f"{'credit does' if what == 'credits' else f'{what} do'} not match the groups",
            where=where,
            got=f"{got} {what}",
            expected=f"one for each of {expected} groups",
        )
