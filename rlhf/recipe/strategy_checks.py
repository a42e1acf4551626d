"""Strategies of evaluations: built, and refused where they could not work."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlhf.catalog import CATALOG
from rlhf.errors import RecipeError
from rlhf.recipe.builder import build_part
from rlhf.recipe.environment_properties import properties_declared_by
from rlhf.recipe.text import parse
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from environments.base import Environment
    from rlhf.rollout.contrib.strategies import Strategy


def strategy_of(values: Any, base: Path) -> Strategy | None:
    """Build a strategy from plain values; None of None. Raises RecipeError."""
    found: Strategy | None = None if values is None else build_part("strategy", values, "strategy", base=base)
    return found


def strategy_said(text: str) -> Strategy:
    """Strategy from a command line: a kind, or a mapping with a kind and keys. Raises RecipeError."""
    is_mapping = text.lstrip().startswith("{")
    if not is_mapping:
        _refuse_keys(text)
    found = strategy_of(parse(text, "--strategy") if is_mapping else {"kind": text}, Path.cwd())
    assert found is not None
    return found


def _refuse_keys(text: str) -> None:
    """Raise RecipeError for keys written beside a kind (`best_of_n n=3`), with the right form."""
    kind = re.match(r"\s*(\w+)(?=[\s,(:=])", text)
    if kind is None or re.search(r"\.py:\w+$", text) or (kind[1] not in CATALOG["strategy"] and "=" not in text):
        return
    keys = dict(re.findall(r"(\w+)\s*[=:]\s*([^\s,()=:]+)", text))
    named = "..." if kind[1] in keys else kind[1]
    example = ", ".join(f"{key}: {value}" for key, value in {"kind": named, **keys}.items())
    raise RecipeError(
        "give a kind alone, or a mapping with keys",
        where="--strategy",
        got=text,
        expected="a kind, or '{kind: ..., key: value}'",
        hint=f"write --strategy '{{{example}}}'",
    )


def check_strategy(
    strategy: Strategy | None,
    environments: Mapping[str, Environment],
    has_tokens: bool,
    policy: str,
    solving: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise RecipeError where a strategy cannot work with a policy or an environment.

    Args:
        strategy: None for none.
        environments: part of a suite -> its environment.
        has_tokens: whether the policy samples tokens whose log-probs are known.
        policy: names it.
        solving: part of a suite -> its reward that decides success.
    """
    from rewards.base import reads_tokens
    from rlhf.rollout.contrib.strategies import StrategyCapabilities
    from rlhf.rollout.group_structure import replays, shows_attempts

    if strategy is None:
        return
    kind = kind_of("strategy", strategy)
    has = StrategyCapabilities(strategy)
    if has.needs_tokens and not has_tokens:
        raise RecipeError(
            "the log-probs of this policy are unknown",
            where="strategy.judge",
            got=f"{kind} without a judge, for {policy}",
            expected="a judge, or a local model",
            hint=f"write strategy: {{kind: {kind}, judge: {{kind: ...}}}}",
        )
    if not has_tokens and reads_tokens(has.judge):
        raise RecipeError(
            "this judge reads token ids, and those of this policy are unknown",
            where="strategy.judge",
            got=f"{kind_of('reward', has.judge)}, for {policy}",
            expected="a judge that reads text, or a local model",
            hint="judge: {kind: grade, url: ...} asks a language model",
        )
    if getattr(strategy.rollout, "until", "") == "solved" and solving:
        part, reward = next(iter(solving.items()))
        raise RecipeError(
            "retries stop before rewards are computed",
            where="strategy.until",
            got=f"solved, which the reward {reward} of parts.{part} says",
            expected="end",
            hint=f"write strategy: {{kind: {kind}, until: end}}",
        )
    for name, environment in environments.items():
        properties = properties_declared_by(environment)
        if shows_attempts(strategy.rollout) and len(properties.seats) > 1:
            raise RecipeError(
                "a candidate would show a seat the private observations of other seats",
                where=f"parts.{name}.environment",
                got=f"{kind} in {kind_of('environment', environment)}, for the seats {', '.join(properties.seats)}",
                expected="a game of one seat",
                hint="use strategy: {kind: best_of_n}, whose candidates are independent",
            )
        if replays(strategy.rollout) and not properties.replayable:
            raise RecipeError(
                "candidates would begin with a replay, and this environment is not replayable",
                where=f"parts.{name}.environment",
                got=f"{kind} in {kind_of('environment', environment)}",
                expected="an environment whose `properties` say replayable=True",
                hint="use strategy: {kind: best_of_n}, whose candidates all begin at the task's start",
            )
