"""Resolves the arguments of `rlhf evaluate` to a policy and a suite, without loading weights."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.tools import ToolDefinitions
from rlhf.chat_api import RetryPolicy
from rlhf.errors import ModelError, RecipeError, nearest
from rlhf.gateway.agent import external_agent
from rlhf.gateway.environment import External
from rlhf.recipe import Recipe, load
from rlhf.recipe.builder import build_part, plain_part
from rlhf.recipe.describe import given as described
from rlhf.recipe.evaluation_request import BASELINES, EvaluationRequest, is_model, is_program
from rlhf.recipe.model import recipe_of
from rlhf.recipe.splits import check_declared_split
from rlhf.recipe.strategy_checks import check_strategy, strategy_said
from rlhf.recipe.suites import Suite, load_suite, suite_of_recipe
from rlhf.recipe.text import parse_fields

#: Keys that a model without a recipe may be given.
_OF_MODELS = ("policy", "engine")


@dataclass(frozen=True)
class EvaluationTarget:
    """A policy and the suite to evaluate it on.

    Attributes:
        kind: `model`, `endpoint`, `program`, `random` or `oracle`.
        name: for the reader.
        suite: with the agents and limits that this policy brings.
        recipe: of a model.
        checkpoint: of a model, where it is not the recipe's own.
        endpoint: address of the server.
        model: its name there.
        patience: with the server.
    """

    kind: str
    name: str
    suite: Suite
    recipe: Recipe | None = None
    checkpoint: Path | None = None
    endpoint: str = ""
    model: str = ""
    patience: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def has_tokens(self) -> bool:
        """True if numbers of tokens mean anything."""
        return self.kind == "model"


def contender(asked: EvaluationRequest) -> EvaluationTarget:
    """Resolve the policy and tasks of an evaluation. Loads nothing.

    Raises:
        RecipeError: it is nothing that can be evaluated, or not with these keys.
    """
    found = _contender(asked)
    if asked.command:
        found = replace(found, suite=_outside(found.suite, asked, found.kind))
    environments = {part.name: part.environment for part in found.suite.parts}
    solving = {
        part.name: name
        for part in found.suite.parts
        for name, w in part.rewards.items()
        if w.success_threshold is not None
    }
    check_strategy(found.suite.strategy, environments, found.has_tokens, found.name, solving)
    return found


def _contender(asked: EvaluationRequest) -> EvaluationTarget:
    suite = load_suite(asked.suite) if asked.suite else None
    if is_program(asked.target) or asked.endpoint:
        if suite is None:
            raise _needs_suite(asked)
        if not asked.target:
            _refuse(asked.overrides, (), "an endpoint")
            return _on_server(asked, asked.model, _changed(suite, asked))
        if asked.target in BASELINES:
            _refuse(asked.overrides, (), asked.target)
            return EvaluationTarget(asked.target, asked.target, _changed(suite, asked))
        kind = {"kind": asked.target, **parse_fields(asked.overrides)}
        agent = build_part("agent", kind, "agent", base=Path.cwd())
        parts = tuple(replace(part, agent=agent) for part in suite.parts)
        suite = _changed(replace(suite, parts=parts), asked)
        if asked.endpoint:
            return _on_server(asked, f"{asked.target} on {asked.model}", suite)
        return EvaluationTarget("program", asked.target, suite)
    if suite is not None and is_model(asked.target):
        return _model(asked, suite)
    if asked.checkpoint is not None:
        _refuse_seed(asked)
    recipe = load(asked.target, asked.overrides, is_trained=asked.checkpoint is not None)
    suite = suite_of_recipe(recipe) if suite is None else suite.taken_by(recipe)
    checkpoint = Path(asked.checkpoint) if asked.checkpoint else None
    return EvaluationTarget("model", asked.checkpoint or asked.target, _changed(suite, asked), recipe, checkpoint)


def _outside(suite: Suite, asked: EvaluationRequest, kind: str) -> Suite:
    """The suite as a program outside plays it: the same tasks, its worlds behind the gateway."""
    parts = []
    for part in suite.parts:
        own = part.environment
        command = tuple(shlex.split(asked.command))
        outside = own if isinstance(own, External) else External(environment=own, command=command, reward="environment")
        environment: Any = replace(outside, command=command, n_programs=asked.programs)
        place: ToolDefinitions = "chat_template" if kind == "endpoint" else "system_prompt"
        agent = external_agent(part.agent, place, override_sampling=True)
        slow = max(part.limits.step_timeout_s, External.limits_defaults["step_timeout_s"])
        limits = replace(part.limits, step_timeout_s=slow)
        parts.append(replace(part, environment=environment, agent=agent, limits=limits))
    return replace(suite, parts=tuple(parts))


def _on_server(asked: EvaluationRequest, name: str, suite: Suite) -> EvaluationTarget:
    patience = RetryPolicy.within(max(part.limits.episode_timeout_s for part in suite.parts))
    if asked.tries is not None:
        patience = replace(patience, n_tries=asked.tries)
    return EvaluationTarget("endpoint", name, suite, endpoint=asked.endpoint, model=asked.model, patience=patience)


def _model(asked: EvaluationRequest, suite: Suite) -> EvaluationTarget:
    """A model in Hugging Face format, or an adapter over one, with the suite's own agents."""
    _refuse_seed(asked)
    _refuse(asked.overrides, _OF_MODELS, "a model")
    given = parse_fields(asked.overrides)
    adapter = Path(asked.target).expanduser() / "adapter_config.json"
    policy = _policy_keys(given, asked.target, has_base=adapter.is_file())
    path = policy.get("path") or (_base_of(adapter) if adapter.is_file() else asked.target)
    part = suite.parts[0]
    values = {
        "policy": {"kind": "pretrained", **policy, "path": path},
        "engine": given.get("engine", {}),
        "environment": plain_part("environment", part.environment),
        "rewards": {"success": {"kind": "outcome"}},
        "limits": plain_part(None, replace(part.limits, max_context=_longest_context(suite))),
        "stages": [{"kind": "policy_gradient", "steps": 1}],  # a recipe has one; an evaluation never looks at it
    }
    recipe = recipe_of(values, name=suite.name, base=Path.cwd())
    checkpoint = adapter.parent if adapter.is_file() else None
    return EvaluationTarget("model", asked.target, _changed(suite, asked), recipe, checkpoint)


def _policy_keys(given: Mapping[str, Any], target: str, *, has_base: bool) -> Mapping[str, Any]:
    """Overrides of `policy`. Raises RecipeError for no mapping, and for another model than the target."""
    policy = given.get("policy", {})
    if not isinstance(policy, Mapping):
        raise RecipeError(
            "wrong type", where="policy", got=described(policy), expected="a mapping", hint="write policy.KEY=VALUE"
        )
    for key in ("kind",) if has_base else ("kind", "path"):
        if key in policy:
            raise RecipeError(
                "the model to evaluate is named already",
                where=f"policy.{key}",
                got=f"{policy[key]} beside {target}",
                expected="other keys of a policy, such as policy.dtype",
                hint=f"remove policy.{key}, or name the other model in place of {target}",
            )
    return policy


def _longest_context(suite: Suite) -> int | None:
    """Context that the engine needs for every part; None where one of them sets no limit."""
    limits = [part.limits.max_context or math.inf for part in suite.parts]
    return None if math.inf in limits else int(max(limits))


def _base_of(adapter: Path) -> str:
    try:
        values = json.loads(adapter.read_text("utf-8"))
    except ValueError as error:
        values, got = None, str(error)
    else:
        got = "no base_model_name_or_path" if isinstance(values, Mapping) else "no mapping"
    base = values.get("base_model_name_or_path") if isinstance(values, Mapping) else None
    if not base:
        raise ModelError(
            "the adapter does not name its base model",
            where=str(adapter),
            got=got,
            expected="the folder or hub name of its base model",
            hint="name the run that it comes from, or the base with policy.path=NAME",
        )
    return str(base)


def _changed(suite: Suite, asked: EvaluationRequest) -> Suite:
    """The suite with what the command line says of it."""
    pairs = (("split", asked.split), ("n", asked.n))
    tasks: dict[str, Any] = {key: value for key, value in pairs if value is not None}
    for part in suite.parts if asked.split is not None else ():
        check_declared_split(asked.split or "", part.environment, "--split")
    if tasks:
        # Another list of tasks is not what the hash was made of.
        parts = (replace(part, tasks=replace(part.tasks, **{**tasks, "sha256": ""})) for part in suite.parts)
        suite = replace(suite, parts=tuple(parts))
    if asked.strategy:
        suite = replace(suite, strategy=strategy_said(asked.strategy))
    return suite if asked.attempts is None else replace(suite, attempts=asked.attempts)


def _refuse(overrides: Sequence[str], known: Sequence[str], what: str) -> None:
    for override in overrides:
        key = override.partition("=")[0].partition(".")[0]
        if key not in known:
            raise RecipeError(
                f"this key has no effect on the evaluation of {what}",
                where=key,
                got=override,
                expected=" or ".join(f"{name}.KEY=VALUE" for name in known) or "no keys",
                hint=nearest(key, known) or "remove it; to change a suite, write your own",
            )


def _refuse_seed(asked: EvaluationRequest) -> None:
    """Raise RecipeError for the seed of a training: of trained weights it draws nothing."""
    for override in asked.overrides:
        if override.partition("=")[0] == "seed":
            own = "seed: N in a copy of the suite, --suite ./mine.yaml" if asked.suite else "evaluation.seed=N"
            raise RecipeError(
                "this seed has no effect on the evaluation of trained weights",
                where="seed",
                got=override,
                expected="the seed that attempts are sampled with",
                hint=f"write {own}; or take more attempts at each task: --attempts N",
            )


def _needs_suite(asked: EvaluationRequest) -> RecipeError:
    return RecipeError(
        "this target defines no tasks",
        where=asked.target or asked.endpoint,
        got="no --suite",
        expected="--suite NAME" + ("" if asked.endpoint else ", or a recipe, a run or a checkpoint of one"),
        hint="`rlhf recipes --suites` lists the included suites",
    )
