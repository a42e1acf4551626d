"""Compatibility rules between contracts of different sections, whatever the classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.base import Capabilities as agent_says
from environments.base import Capabilities as environment_says
from rewards.base import GroupReward
from rlhf.catalog import CATALOG
from rlhf.checking import Problem, RecipeView, no_effect, no_split
from rlhf.errors import nearest
from rlhf.recipe.keys import keys_of
from rlhf.recipe.rewards import plain_rewards
from rlhf.recipe.view import Place, places
from rlhf.registry import resolve
from rlhf.sections import DEFAULT_KIND

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Looks at all parts and their places.
Rule = Callable[[RecipeView, Sequence[Place]], Iterator[Problem]]


def check_processes(recipe: Recipe, n: int) -> None:
    """Raise RecipeError where a part of the recipe cannot work in `n` processes."""
    _ask("check_processes", places(recipe) if n > 1 else (), n)


def check_seated(recipe: Recipe) -> None:
    """Raise RecipeError where seats are compared, or older versions play, and the game has one seat.

    An agent of kind `self_play` can be measured where the other seat is the environment's own: then this waits until
    somebody trains.
    """
    _ask("check_seats", places(recipe))


def _ask(method: str, found: Sequence[Place], *arguments: object) -> None:
    """Raise the first problem of the parts that have a method of this name."""
    for place in found:
        check = getattr(type(place.part), method, None)
        for problem in check(place.part, place.context, *arguments) if check is not None else ():
            raise problem.error


def _tools(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    if agent_says(view.agent).needs_tools and not environment_says(view.environment).tools:
        yield Problem(
            "this agent needs tools and the environment offers none",
            where="agent.kind",
            got=f"{view.kind_of('agent', view.agent)} in {view.kind_of('environment', view.environment)}",
            expected="an environment with an attribute `tools`, or an agent without needs_tools",
            do="use {kind: chat}, or another environment",
        )


def _seats(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    seats = view.properties.seats
    if seats and not agent_says(view.agent).plays_seats:
        yield Problem(
            "this agent would play all seats of the game as one player",
            where="agent.kind",
            got=f"{view.kind_of('agent', view.agent)}, for {', '.join(seats)}",
            expected="an agent that keeps a conversation for each seat",
            do="write agent: {kind: self_play}; an agent of your own that can do so sets plays_seats = True",
        )


def _rewards(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    needing = [place.context.path for place in found if place.section == "stage" and place.part.needs_rewards]
    is_silent = not view.has_weight and any(stage.needs_weight for _, stage in view.learning)
    if (needing and not view.rewards) or is_silent:
        yield Problem(
            "the recipe has no reward for training" if not view.rewards else "every reward has weight 0",
            where="rewards",
            got=", ".join(view.rewards) or "no rewards",
            expected="at least one reward" + (" with a weight" if view.rewards else f", for {needing[0]}"),
            do="add rewards: {outcome: {kind: outcome}}, or {earned: {kind: environment}} for the environment's own "
            "number, such as the reward that an agent's program posts",
        )


def _held_out(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    """Refuse monitored rewards that are trained on too, or monitored twice."""
    plain = plain_rewards(view.rewards) if any(w.monitor is not None for w in view.rewards.values()) else {}
    bare = {name: {k: v for k, v in p.items() if k not in ("monitor", "weight")} for name, p in plain.items()}
    names = list(bare)
    for name in (name for name in names if view.rewards[name].monitor is not None):
        for other in names:
            is_trained = view.rewards[other].monitor is None
            is_twice = not is_trained and names.index(other) < names.index(name) and bare[other] == bare[name]
            if is_twice or (is_trained and _holds(bare[other], bare[name])):
                yield Problem(
                    "this reward is not held out: the policy is trained on it too"
                    if is_trained
                    else "this reward is monitored already",
                    where=f"rewards.{name}",
                    got=f"the same as rewards.{other}" if bare[other] == bare[name] else f"a part of rewards.{other}",
                    expected="a reward that the policy never learns from" if is_trained else "another reward",
                    do="monitor a second, stricter verifier of the same thing" if is_trained else "remove one of them",
                )


def _holds(outer: Any, inner: Mapping[str, Any]) -> bool:
    """True if the plain values of a reward are, or contain, those of another."""
    if outer == inner:
        return True
    values = outer.values() if isinstance(outer, Mapping) else outer if isinstance(outer, list) else ()
    return any(_holds(value, inner) for value in values)


def _groups(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    for place in found:
        stage, estimator = place.context.stage, place.part
        if place.section == "advantage" and stage.group_size < estimator.min_group:
            yield Problem(
                "this group size gives no advantages: all would be 0",
                where=f"{place.context.stage_path}.group_size",
                got=str(stage.group_size),
                expected=f"at least {estimator.min_group} for {view.kind_of('advantage', estimator)}",
                do="set group_size: 8",
            )


def _votes(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    for context in (place.context for place in found if place.section == "stage" and place.context.learns):
        path, stage = context.path, context.stage
        for name, weighted in context.recipe.rewards.items():
            if weighted.weight and isinstance(weighted.reward, GroupReward) and stage.group_size < 2:
                yield Problem(
                    "this reward compares the attempts at a task, and group_size is 1",
                    where=f"{path}.group_size",
                    got=str(stage.group_size),
                    expected=f"at least 2 for rewards.{name}, {view.kind_of('reward', weighted.reward)}",
                    do="set group_size: 8",
                )


def _critics(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    for path, stage in view.learning:
        own = [place for place in found if place.section == "advantage" and place.context.stage is stage]
        needing = [place for place in own if place.part.needs_values]
        wanted, estimator = _critic_for(stage.advantage), view.kind_of("advantage", stage.advantage)
        if stage.critic is None and needing:
            first = needing[0]
            yield Problem(
                "this estimator needs a critic and the stage trains none",
                where=first.context.at("kind"),
                got=view.kind_of("advantage", first.part),
                expected=f"{path}.critic, or an estimator with needs_values = False",
                do=f"add critic: {_written(_critic_for(first.part))} to the stage, or use grpo, rloo or gigpo",
            )
        if stage.critic is None:
            continue
        given = view.kind_of("critic", stage.critic)
        if not needing:
            why = f"{estimator} compares with no values: use {' or '.join(_estimators_for(given))}"
            yield no_effect(f"{path}.critic", "a critic", why)
        if given in CATALOG["critic"] and given != wanted:
            yield Problem(
                "this critic does not provide the values that the estimator needs",
                where=f"{path}.critic.kind",
                got=f"{given} for {estimator}",
                expected=wanted,
                do=f"write critic: {_written(wanted)}, or use advantage {' or '.join(_estimators_for(given))}",
            )


def _critic_for(estimator: object) -> str:
    from rlhf.credit.estimator import critic_of

    return critic_of(estimator) or DEFAULT_KIND["critic"]


def _written(kind: str) -> str:
    """Return the shortest way to write a critic of that kind."""
    return "{}" if kind == DEFAULT_KIND["critic"] else f"{{kind: {kind}}}"


def _estimators_for(critic: str) -> list[str]:
    """Estimators that use such a critic, for a hint; wrappers are left out."""
    from rlhf.credit.estimator import may_take

    known = {kind: resolve("advantage", kind, base=Path()) for kind in CATALOG["advantage"]}
    needing = {kind: found for kind, found in known.items() if found.needs_values is True}
    kinds = [kind for kind, found in needing.items() if _critic_for(found) == critic]
    # progress alone may do with or without
    kinds += [f"{kind} with contributions: critic" for kind, found in known.items() if may_take(found, critic)]
    return kinds or list(needing)


def _wrapped(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    from rlhf.credit.estimator import BatchEstimator

    for place in found:
        outer = place.context.parent if place.section == "advantage" else None
        if outer is not None and isinstance(place.part, BatchEstimator) and not isinstance(outer, BatchEstimator):
            yield Problem(
                "this estimator compares the groups of a step, and its wrapper passes one group at a time",
                where=place.context.at("kind"),
                got=f"{view.kind_of('advantage', place.part)} in {view.kind_of('advantage', outer)}",
                expected=f"a method {type(outer).__name__}.over_batch",
                do="write `over_batch` as rlhf/credit/wrapper.py does, or inherit from its Wrapper",
            )


def _branches(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    from rlhf.credit.estimator import missing_part, needs_branches
    from rlhf.rollout.group_structure import Independent, Retry

    for place in found:
        if place.section != "advantage" or place.context.is_trained or not needs_branches(place.part):
            continue
        if isinstance(place.context.stage.rollout, Independent | Retry):
            do = "add rollout: {kind: tree}, or use grpo"
            yield missing_part(place.part, place.context, "attempts do not branch", do)


def _ignored(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    """Keys that another key of the same class leaves without effect; a subclass says so of itself."""
    for place in found:
        if place.context.parent is not None and place.section != "advantage":
            continue
        part = place.part
        for ignored in vars(type(part)).get("ignored_keys", ()):
            if getattr(part, ignored.by) != ignored.value:
                continue
            value = "false" if ignored.value is False else ignored.value
            keys = keys_of(type(part))
            for name in ignored.keys:
                default = keys[name].make_default
                if default is not None and getattr(part, name) != default():
                    do = f"remove the key, or change {ignored.by}"
                    yield no_effect(place.context.at(name), getattr(part, name), f"{ignored.by} is {value}", do)


def _splits(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    wanted = {"evaluation.split": view.evaluation.split}
    for place in (place for place in found if place.section == "stage" and not place.part.reads_file):
        yield from no_split(place.part.split, place.context.recipe.properties.splits, place.context.at("split"))
    if any(stage.evaluate_every for _, stage in view.learning):
        wanted["evaluation.validation_split"] = view.evaluation.validation_split
    for where, split in wanted.items():
        yield from no_split(split, view.properties.splits, where)


def _weights(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    """Yield problems of stages that weigh an unknown reward, or only one not yet trained."""
    from rewards.models.model_folder import stage_of

    known = {name: w.weight for name, w in view.trained_rewards.items()}
    awaited = {name: stage_of(w.reward) for name, w in view.trained_rewards.items()}
    for i, stage in enumerate(view.stages):
        where, own = f"stages[{i}].rewards", known if stage.weights is None else stage.weights
        for name in stage.own_rewards.keys() & known.keys():
            do = "give it another name, or a number, which is the weight of the recipe's"
            yield Problem("a reward of the recipe has this name", f"{where}.{name}", name, "a name of its own", do)
        for name in own:
            if name not in known:
                do = nearest(name, known) or "name a reward of the recipe that is not monitored"
                yield Problem("there is no such reward", f"{where}.{name}", name, ", ".join(known) or "no rewards", do)
        counting = {name for name, weight in own.items() if weight and name in known}
        is_learning = any(stage is one and one.needs_weight for _, one in view.learning)
        if is_learning and stage.weights is not None and not counting and not stage.own_rewards:
            yield Problem(
                "every reward has weight 0",
                where=where,
                got=", ".join(stage.rewards) or "no rewards",
                expected="at least one reward with a weight",
                do=f"add {where}: {{NAME: 1.0}}, or remove the key, which leaves the recipe's weights",
            )
        late = {name for name in counting if (at := awaited[name]) is not None and at >= i}
        if late and late == counting and not stage.own_rewards and not stage.reads_file:
            yield Problem(
                "the reward model of this stage is not trained yet",
                where=where,
                got=", ".join(sorted(late)),
                expected="a weight for a reward that exists by then",
                do=f"add {where}: {{NAME: 1.0}}, or move the stage after the one that trains the model",
            )


def _own_worlds(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    """Yield problems of stages that are played elsewhere than the recipe says."""
    for place in (place for place in found if place.section == "stage" and place.part.differs):
        stage, own, at = place.part, place.context.recipe, place.context.at
        for rule in OF_TASKS:
            for problem in rule(own, found):
                moves = problem.where.startswith("rewards")
                yield replace(problem, where=at(problem.where)) if moves else problem
        if own.limits.max_context != view.limits.max_context:
            yield Problem(
                "all stages share one engine with one context length",
                where=at("limits.max_context"),
                got=str(own.limits.max_context),
                expected=f"limits.max_context = {view.limits.max_context}",
                do="set limits.max_context of the recipe to the longest",
            )
        for key in ("reward_refresh", "judge_refresh"):
            if place.context.learns and vars(stage)[key] is not None:
                yield Problem(
                    "rewards of the recipe are refreshed, and this stage has other rewards",
                    where=at(key),
                    got=f"{key} beside environment, limits or rewards of its own",
                    expected="one of them",
                    do=f"remove {key}, or move the stage to a separate recipe",
                )


def _ray_workers(view: RecipeView, found: Sequence[Place]) -> Iterator[Problem]:
    """Yield problems of stages that are scored or played elsewhere than the recipe says, which Ray workers do not."""
    from rewards.models.model_folder import stage_of

    if not view.cluster.is_on:
        return
    own = {
        place.context.path: "environment, limits or rewards of its own"
        for place in found
        if place.section == "stage"
        and (place.part.differs or (place.context.learns and place.part.weights is not None))
    }
    trained = {
        f"rewards.{name}": f"a model that stages[{stage_of(weighted.reward)}] trains"
        for name, weighted in view.rewards.items()
        if stage_of(weighted.reward) is not None
    }
    for where, got in (own | trained).items():
        yield Problem(
            "rollout workers on Ray use the settings of the recipe in every stage",
            where=where,
            got=got,
            expected="none, with cluster.rollout_workers",
            do="use one recipe per stage, each from the newest checkpoint: policy.path; or remove cluster",
        )


#: What the agent, the environment and the rewards ask of each other.
OF_TASKS: tuple[Rule, ...] = (_tools, _held_out, _seats, _rewards)
#: What stages ask of parts beside them, before each part is looked at: behind these, much else would be a consequence.
OF_STAGES: tuple[Rule, ...] = (_groups, _critics, _wrapped, _ignored, _votes)
#: What is asked last.
OF_ALL: tuple[Rule, ...] = (_splits, _branches, _weights, _own_worlds, _ray_workers)


def unseen(view: RecipeView) -> Iterator[str]:
    """Caution about success that is measured on tasks of training."""
    split = view.evaluation.split
    here = ((i, stage) for i, stage in enumerate(view.stages) if stage.environment is None)
    drawn = ((i, stage.split) for i, stage in here if not stage.reads_file)
    if stages := [f"stages[{i}]" for i, its in drawn if its == split]:
        judged = f"evaluation.split {split} is that of {' and '.join(stages)}"
        yield f"{judged}: success is measured on training tasks"


def cut(view: RecipeView) -> Iterator[str]:
    """Caution about episodes that limits cut before the environment does."""
    steps = environment_says(view.environment).max_steps
    if steps is not None and steps > view.limits.max_turns:
        yield f"limits.max_turns {view.limits.max_turns} cuts episodes before the environment's {steps} steps"


def one_for_all(view: RecipeView) -> Iterator[str]:
    """Caution about seats that share one credit; an estimator that is not listed may read notes of who had a turn."""
    from rewards.combinators.parts import with_parts
    from rlhf.credit.contrib.self_play import Seats

    for path, stage in view.learning if len(view.properties.seats) > 1 else ():
        kind = view.kind_of("advantage", stage.advantage)
        if ":" in kind or any(isinstance(part, Seats) for _, part in with_parts("", stage.advantage)):
            continue
        inner = "" if stage.advantage.needs_values else f", inner: {{kind: {kind}}}"
        others = ", an older version's among them" if stage.opponents is not None else ""
        yield (
            f"{path}.advantage {kind} does not separate seats: a win of one credits the moves of the other{others}; "
            f"unless they win together, write advantage: {{kind: seats{inner}}}"
        )


CAUTIONS: tuple[Callable[[RecipeView], Iterator[str]], ...] = (unseen, cut, one_for_all)
