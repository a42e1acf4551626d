"""Two-level credit: the planner's over subgoals, the executor's within one, by any estimator at each level."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.chat import ChatAgent
from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import (
    AdvantageEstimator,
    EstimatorCapabilities,
    compute_advantages,
    critic_of,
    innermost,
    missing_part,
    turn_discount,
    unknown_reward_problem,
)
from rlhf.credit.groups import call_numbers, per_turn, turn_rewards
from rlhf.credit.grpo import GRPO
from rlhf.data import Action, Credit, Outcome, Score, ScoredGroup, Trajectory, Turn, Values, Verdict
from rlhf.data.scoring import TokensGNT
from rlhf.errors import DataError
from rlhf.settings import STRICT

#: `Generation.role` of a call that names a subgoal.
PLAN = "plan"
#: Trajectory and generation: where a row of tokens stands in its group.
_Place = tuple[int, int]


@plain_dataclass(frozen=True, slots=True)
class Option:
    """Subgoal with the turns and rewards that followed it.

    Attributes:
        owner: number of its trajectory in the group.
        subgoal: what the planner said; empty before the first subgoal.
        plan: numbers of the pieces of the call that names the subgoal; empty before the first.
        own: numbers of the executor's generations, in order.
        turns: the turns whose action it chose.
        state_key: state of the environment in which it began.
    """

    owner: int
    subgoal: str
    plan: tuple[int, ...]
    own: tuple[int, ...]
    turns: range
    state_key: str | None


@plain_dataclass(frozen=True, slots=True)
class _Level:
    """Groups of one level, with the places of their rows in the original group."""

    groups: list[ScoredGroup]
    places: list[list[list[_Place]]]  # group, trajectory, generation


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TwoLevel:
    """Credit of `planner` for the tokens that name subgoals, and of `executor` for all others.

    A subgoal is an option: it begins where the planner names it (a generation with the role `plan`) and ends where the
    next is named, or the episode ends. At the high level an option is one turn. Option o that begins at turn t and
    lasts τ turns earns

        R_o = γ^t (r_t + γ r_{t+1} + ... + γ^{τ−1} r_{t+τ−1}),

    so that the sum over options is the discounted return of the episode: the semi-Markov return, seen from its
    beginning. An estimator at this level needs no discount of its own (`gamma: 1`).

    At the low level an option is a trajectory of its own. Its last turn l, in which the executor may have said `done`,
    also earns what the rest of the episode does (`horizon: episode`), or it has the rewards of its own turns alone
    (`option`). The rest is discounted from turn l on by the executor's own discount per turn, Σ_k γ_e^{k−l} r_k, so
    that each turn has the return to go that it has in the undivided episode, and `done` is worth no more than to act
    on; in the option's total it is not discounted, as in the episode's. It is compared with the options of the group
    that have the same subgoal (`compare: subgoal`), which began in the same state with it (`state`), or with all of the
    group (`all`). An option without its like gets what the estimator gives a lone trajectory: of one that compares, 0.
    To a critic, an option with a horizon of its own that the next one follows is cut in the state that that one is
    planned in.

    Without any generation of role `plan` a trajectory is one option, and this is `executor`.

    Sources: Sutton, Precup, Singh, "Between MDPs and semi-MDPs", 1999; GLIDER, arXiv 2505.19761; EPO, arXiv 2408.16090.
    """

    planner: AdvantageEstimator | None = Field(default_factory=GRPO)
    """Estimator over subgoals; null trains the executor alone."""
    executor: AdvantageEstimator | None = Field(default_factory=GRPO)
    """Estimator within a subgoal; null trains the planner alone."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per turn of an option's return."""
    compare: Literal["subgoal", "state", "all"] = "subgoal"
    """Options of the group that an option is compared with."""
    horizon: Literal["episode", "option"] = "episode"
    """Horizon of the executor's return: the rest of the episode, or its own subgoal. The latter needs intermediate
    rewards."""
    executor_reward: str | None = None
    """Name of the reward, a key of `rewards`, whose values per turn the low level is trained on; null is the score."""

    def __post_init__(self) -> None:
        """Refuse to train nothing, and levels that need different critics."""
        if self.planner is None and self.executor is None:
            raise ValueError("planner and executor are both null: nothing would be trained")
        if len(kinds := self._critics) > 1:
            needed = " and ".join(kind or "a value model" for kind in kinds)
            raise ValueError(f"planner and executor need different critics, {needed}; expected one that serves both")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse the name of no reward, and an agent that names no subgoals."""
        recipe = context.recipe
        if self.executor_reward is not None and self.executor_reward not in recipe.trained_rewards:
            yield unknown_reward_problem(self.executor_reward, "executor_reward", context)
        if isinstance(recipe.agent, ChatAgent) and not context.is_trained:
            why = f"an agent of kind {context.kind_of('agent', recipe.agent)} names no subgoals"
            yield missing_part(self, context, why, "use agent: {kind: planner}, or another estimator")
        executor = EstimatorCapabilities(innermost(self.executor))
        if self.horizon == "episode" and executor.gamma < 1 and not executor.turn_discount and not context.is_trained:
            yield Problem(
                "the executor discounts per token, and the rest of the episode is not discounted so: `done` would be "
                "worth more than to act on",
                where=context.at("executor"),
                got=f"gamma: {executor.gamma:g} with horizon: episode",
                expected="gamma: 1, or an executor that declares a discount per turn (`turn_discount`)",
                do="use gamma: 1, an executor such as turn_gae or turn_rloo, or horizon: option",
            )

    @property
    def turn_reward(self) -> str | None:
        """Name of the reward whose values per turn it reads."""
        return self.executor_reward

    @property
    def needs_values(self) -> bool:
        """True if the estimator of a level needs a critic."""
        return any(e.needs_values for e in (self.planner, self.executor) if e is not None)

    @property
    def needs_critic(self) -> str | None:
        """Kind of that critic; None for a value model."""
        return next(iter(self._critics), None)

    @property
    def _critics(self) -> tuple[str | None, ...]:
        levels = (e for e in (self.planner, self.executor) if e is not None and e.needs_values)
        return tuple(dict.fromkeys(map(critic_of, levels)))

    @property
    def min_group(self) -> int:
        """Smallest group size that gives both levels any signal."""
        return max(e.min_group for e in (self.planner, self.executor) if e is not None)

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group], None if values is None else [values])[0]

    def over_batch(self, groups: Sequence[ScoredGroup], values: Sequence[Values] | None = None) -> list[Credit]:
        """Return the credit of each group of a step."""
        cut = [options_of(group) for group in groups]
        per_group = [None] * len(groups) if values is None else list(values)
        found = [_Rows(group, v if self.needs_values else None) for group, v in zip(groups, per_group, strict=True)]
        counters: list[dict[str, float]] = []
        for estimator, level_of in ((self.planner, self._high), (self.executor, self._low)):
            levels = [level_of(group, options) for group, options in zip(groups, cut, strict=True)]
            counters.append(_estimate(estimator, self.horizon == "episode", levels, cut, per_group, found))
        _, n_alone = (found_at_level.pop("alone", 0.0) for found_at_level in counters)
        counts = {"credit/n_options": float(sum(map(len, cut))), "credit/n_singleton_options": n_alone}
        metrics = counts | _merged(counters)
        return [rows.credit(metrics if i == 0 else {}) for i, rows in enumerate(found)]

    def _high(self, group: ScoredGroup, options: Sequence[Option]) -> _Level:
        """Planner-level group, whose turns are options.

        Options without a plan go with the one after, or are left out.
        """
        rewards_GK = turn_rewards(group)
        trajectories: list[Trajectory] = []
        scores: list[Score] = []
        places: list[list[_Place]] = []
        for i, trajectory in enumerate(group.trajectories):
            own = [o for o in options if o.owner == i]
            planned = [o for o in own if o.plan]
            if not planned:
                continue
            earned = self._of_plans(own, rewards_GK[i])
            calls = trajectory.generations
            turns = tuple(
                Turn(Action(o.subgoal, tuple(calls[n] for n in o.plan)), "", x, o.state_key)
                for o, x in zip(planned, earned, strict=True)
            )
            trajectories.append(replace(trajectory, turns=turns, n_given=0, n_shared=0, parent=None))
            parts = _with_turns(group.scores[i], partial(self._of_plans, own))
            scores.append(Score(parts, earned, math.fsum(earned)))
            places.append([(i, n) for o in planned for n in o.plan])
        made = ScoredGroup(group.task_id, tuple(trajectories), tuple(scores), group.failures)
        return _Level([made], [places])

    def _of_plans(self, own: Sequence[Option], rewards_K: Sequence[float]) -> tuple[float, ...]:
        """Discounted reward of each option with a plan; turns before the first plan count for that one."""
        worth = [(o, math.fsum(self.gamma**t * rewards_K[t] for t in o.turns)) for o in own]
        first, *others = [w for o, w in worth if o.plan]
        return (first + math.fsum(w for o, w in worth if not o.plan), *others)

    def _low(self, group: ScoredGroup, options: Sequence[Option]) -> _Level:
        """Groups whose trajectories are options, those that are compared with each other together."""
        rewards_GK = (
            turn_rewards(group)
            if self.executor_reward is None
            else [per_turn(score, self.executor_reward, group) for score in group.scores]
        )
        together: dict[object, list[Option]] = {}
        for number, option in enumerate(options):
            if option.own:
                together.setdefault(self._key(option, number), []).append(option)
        groups, places = [], []
        for members in together.values():
            made = [self._alone(group, o, rewards_GK[o.owner]) for o in members]
            groups.append(ScoredGroup(group.task_id, tuple(t for t, _ in made), tuple(s for _, s in made)))
            places.append([[(o.owner, n) for n in o.own] for o in members])
        return _Level(groups, places)

    def _key(self, option: Option, number: int) -> object:
        if self.compare == "all":
            return None
        subgoal = " ".join(option.subgoal.casefold().split())
        if self.compare == "subgoal":
            return subgoal
        # A state that is not known is like no other.
        return (subgoal, number if option.state_key is None else option.state_key)

    def _alone(self, group: ScoredGroup, option: Option, rewards_K: Sequence[float]) -> tuple[Trajectory, Score]:
        """The option as a trajectory of its own, and its score."""
        whole = group.trajectories[option.owner]
        calls = whole.generations
        of_turn = _turn_numbers(whole)
        turns, earned = [], []
        numbers = sorted({of_turn[n] for n in option.own} | set(option.turns))
        for t in numbers:
            turn = whole.turns[t]
            own = tuple(calls[n] for n in option.own if of_turn[n] == t)
            worth = rewards_K[t] if t in option.turns else 0.0
            turns.append(replace(turn, action=replace(turn.action, generations=own), reward=worth))
            earned.append(worth)
        total = math.fsum(earned)
        if self.horizon == "episode" and earned:
            rest, gamma = rewards_K[option.turns.stop :], turn_discount(self.executor)
            ahead = option.turns.stop - numbers[-1]  # 0 where the last turn ends with the next option's action
            earned[-1] += math.fsum(gamma ** (ahead + k) * x for k, x in enumerate(rest))
            turns[-1] = replace(turns[-1], reward=earned[-1])
            total += math.fsum(rest)
        is_last = option.turns.stop == len(whole.turns) or self.horizon == "episode"
        outcome = whole.outcome if is_last else Outcome.TURN_LIMIT
        # Attempts are told apart by number: there may be several options of one attempt.
        trajectory = replace(whole, turns=tuple(turns), outcome=outcome, n_given=0, n_shared=0, parent=None)
        parts = _with_turns(
            group.scores[option.owner], lambda per_turn: [per_turn[t] if t in option.turns else 0.0 for t in numbers]
        )
        return trajectory, Score(parts, tuple(earned), total)


def _with_turns(score: Score, cut: Callable[[Sequence[float]], Sequence[float]]) -> dict[str, Verdict]:
    """The parts of a score, with `cut` applied to the numbers of turns where there are some."""
    return {
        name: verdict if verdict.per_turn is None else replace(verdict, per_turn=tuple(cut(verdict.per_turn)))
        for name, verdict in score.parts.items()
    }


def options_of(group: ScoredGroup) -> list[Option]:
    """Cut all trajectories of `group` into options, in order.

    A turn belongs to the option of its last generation, which is the one that acted; a turn without any generation
    belongs to the option of the turn before.
    """
    return [option for i, trajectory in enumerate(group.trajectories) for option in _cut(i, trajectory)]


def _cut(owner: int, trajectory: Trajectory) -> Iterator[Option]:
    calls, of_turn = trajectory.generations, _turn_numbers(trajectory)
    plans = [numbers for numbers in call_numbers(trajectory) if calls[numbers[0]].role == PLAN]
    began = [of_turn[first] for first, *_ in plans]
    acts: list[int] = []  # of each turn, how many plans were made until it acted
    for t in range(len(trajectory.turns)):
        acts.append(sum(begin <= t for begin in began))
    borders = [0, *(first for first, *_ in plans), len(calls)]
    for k, (first, end) in enumerate(pairwise(borders)):
        plan = plans[k - 1] if k else ()
        own = tuple(range(first + len(plan), end))
        turns = [t for t, n in enumerate(acts) if n == k]
        if not plan and not own and not turns:
            continue
        begin = began[k - 1] if plan else 0
        span = range(turns[0], turns[-1] + 1) if turns else range(begin, begin)
        text = _subgoal(trajectory.turns[begin], began[: k - 1].count(begin)) if plan else ""
        key = trajectory.turns[begin].state_key if trajectory.turns else None
        yield Option(owner, text, plan, own, span, key)


def _subgoal(turn: Turn, i: int) -> str:
    """The i-th subgoal that a turn names; the note has a line for each."""
    return turn.action.notes.get("subgoal", "").split("\n")[: i + 1][-1]


def _turn_numbers(trajectory: Trajectory) -> list[int]:
    """Of each generation, the number of its turn."""
    return [t for t, turn in enumerate(trajectory.turns) for _ in turn.generations]


class _Rows:
    """The numbers of one group, filled in level by level."""

    def __init__(self, group: ScoredGroup, values: Values | None) -> None:
        self.credit_GN = [[(0.0,) * g.n_tokens for g in t.generations] for t in group.trajectories]
        self.returns_GN = None if values is None else _own_returns(group, values)

    def fill(self, places: Sequence[Sequence[_Place]], credit: Credit) -> None:
        """Take over what an estimator says of the rows at `places`."""
        for given, kept in ((credit.advantages_GNT, self.credit_GN), (credit.returns_GNT, self.returns_GN)):
            if given is not None and kept is not None:
                for rows, of_rows in zip(given, places, strict=True):
                    for row, (i, n) in zip(rows, of_rows, strict=True):
                        kept[i][n] = row

    def credit(self, metrics: dict[str, float]) -> Credit:
        """The credit of the group."""
        returns = None if self.returns_GN is None else _frozen(self.returns_GN)
        return Credit(_frozen(self.credit_GN), metrics, returns)


def _own_returns(group: ScoredGroup, values: Values) -> list[list[tuple[float, ...]]]:
    """Critic targets where no level gives any, equal to its values so that it is not drawn to 0.

    A plan is worth what the critic says of the call after it, for an option may be cut in its value; anything else is
    worth what the critic says itself.
    """
    found: list[list[tuple[float, ...]]] = []
    for trajectory, rows_NT in zip(group.trajectories, values.values_GNT, strict=True):
        rows = list(map(tuple, rows_NT))
        calls = trajectory.generations
        for plan, (after, *_) in pairwise(call_numbers(trajectory)):
            if calls[plan[0]].role == PLAN and rows_NT[after]:
                for n in plan:
                    rows[n] = (rows_NT[after][0],) * len(rows[n])
        found.append(rows)
    return found


def _frozen(rows_GN: Sequence[Sequence[tuple[float, ...]]]) -> TokensGNT:
    return tuple(map(tuple, rows_GN))


def _estimate(
    estimator: AdvantageEstimator | None,
    whole: bool,
    levels: Sequence[_Level],
    cut: Sequence[Sequence[Option]],
    values: Sequence[Values | None],
    found: Sequence[_Rows],
) -> dict[str, float]:
    """Fill in the credit of one level's groups by `estimator`; returns its counters."""
    flat = [(k, group, places) for k, level in enumerate(levels) for group, places in _pairs(level)]
    flat = [(k, group, places) for k, group, places in flat if group.trajectories]
    if estimator is None or not flat:
        return {}
    given: list[Values] | None = None
    if estimator.needs_values:
        given = [_values_at(_needed(values[k]), places, cut[k], group, whole) for k, group, places in flat]
    credits = compute_advantages(estimator, [group for _, group, _ in flat], given)
    for (k, _, places), credit in zip(flat, credits, strict=True):
        found[k].fill(places, credit)
    metrics = _merged([credit.metrics for credit in credits])
    return metrics | {"alone": float(sum(len(group.trajectories) == 1 for _, group, _ in flat))}


def _pairs(level: _Level) -> Iterator[tuple[ScoredGroup, list[list[_Place]]]]:
    yield from zip(level.groups, level.places, strict=True)


def _needed(values: Values | None) -> Values:
    if values is None:
        raise DataError("this estimator needs the values of a critic", where="TwoLevel", got="no values")
    return values


def _values_at(
    values: Values, places: Sequence[Sequence[_Place]], options: Sequence[Option], group: ScoredGroup, whole: bool
) -> Values:
    """Critic values of the rows at `places`; an option cut by another ends where that one is planned.

    With `whole`, an option has what follows among its rewards: it is cut where its episode is.
    """
    tokens = tuple(tuple(values.values_GNT[i][n] for i, n in rows) for rows in places)
    actions = values.actions_GNT
    of_actions = actions and tuple(tuple(actions[i][n] for i, n in rows) for rows in places)
    follows = {(a.owner, n): b.plan[0] for a, b in pairwise(options) if a.owner == b.owner for n in (*a.own[-1:],)}
    cuts = []
    for rows, trajectory in zip(places, group.trajectories, strict=True):
        i, n = rows[-1]
        plan = follows.get((i, n))
        if plan is not None and not whole and values.values_GNT[i][plan]:
            cuts.append(values.values_GNT[i][plan][0])
        else:
            cuts.append(
                values.bootstrap_values_G[i] if trajectory.outcome in (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT) else 0.0
            )
    return Values(tokens, tuple(cuts), of_actions)


def _merged(many: Sequence[object]) -> dict[str, float]:
    """Summed counters of several credits; a mean or a deviation is the first that is given."""
    total: dict[str, float] = {}
    for metrics in many:
        for name, value in dict(metrics).items():  # type: ignore[call-overload]
            counts = name.partition("/")[2].startswith("n_") or name == "alone"
            total[name] = total.get(name, 0.0) + value if counts else total.get(name, value)
    return total
