"""Preflight check that the engine and models of a recipe can be had."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf.checking import CONNECT_S, refuse_unreachable
from rlhf.errors import EngineError
from rlhf.extras import missing

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

#: Keys that name a model.
_NAMES_MODEL = {"path", "teacher"}


def refuse_absent_engine(recipe: Recipe) -> None:
    """Raise if the engine is unavailable.

    Raises:
        MissingPackageError: its package is not installed.
        EngineError: a server takes no connection.
    """
    from rlhf.inference.settings import VllmSettings

    if not isinstance(recipe.engine, VllmSettings):
        return
    if not recipe.engine.servers:
        _need("vllm", "vllm", "vLLM is not installed", "engine.kind")
        return
    _need("aiohttp", "servers", "aiohttp is not installed", "engine.servers")
    _reach(recipe.engine.servers)


def refuse_absent_trackers(recipe: Recipe) -> None:
    """Raise MissingPackageError where the package of a tracker is not installed."""
    from rlhf.training.trackers import TrackerCapabilities

    for i, tracker in enumerate(recipe.trackers):
        if package := TrackerCapabilities(tracker).package:
            extra = package.partition(".")[0]
            _need(package, extra, f"{extra} is not installed", f"trackers[{i}].kind")


def refuse_absent_hub(recipe: Recipe) -> None:
    """Raise ModelError where the trained policy could not be pushed to where the recipe says."""
    if recipe.push_to_hub is not None:
        from rlhf.build.model_folder import refuse_unwritable

        refuse_unwritable(recipe.push_to_hub)


def refuse_absent_quantization(recipe: Recipe) -> None:
    """Raise MissingPackageError where the base cannot be quantised as asked."""
    from rlhf.training.policy.lora import refuse_unquantizable

    if recipe.policy.lora is not None and recipe.policy.lora.quantization is not None:
        refuse_unquantizable()


def refuse_absent_models(recipe: Recipe) -> None:
    """Raise RecipeError where policy or reward names a folder without a model; hub names are skipped."""
    from rewards.combinators.parts import with_parts
    from rewards.judges.asking import AsksModel
    from rewards.models.model_folder import ModelReward, stage_of
    from rlhf.checking import Problem, no_model
    from rlhf.training.policy.model import Pretrained
    from rlhf.training.policy.model_files import way_to

    problems: list[Problem] = []
    if isinstance(recipe.policy, Pretrained):
        problems += no_model(recipe.policy.path, "policy.path", way_to(recipe.policy.path))
    hint = (
        "a reward_model stage leaves its model in reward_model/ of its run, another one its policy in "
        "checkpoints/NAME/policy"
    )
    rewards = {path: weighted.reward for path, weighted in recipe.all_rewards.items()}
    for path, reward in with_parts("", rewards):
        if isinstance(reward, ModelReward | AsksModel) and reward.path is not None and stage_of(reward) is None:
            problems += no_model(reward.path, f"{path}.path", hint)
    for problem in problems:
        raise problem.error


def refuse_unreachable_models(recipe: Recipe) -> None:
    """Raise ModelError where a hub model of the recipe is neither cached nor reachable, before hours of other work."""
    from rlhf.training.policy.model_files import base_or

    for where, named in models_of(recipe):
        refuse_unreachable(base_or(named), where)


def models_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield YAML path and name of every model in a recipe: policy, critics, judges, rewards, teachers."""
    from rewards.combinators.parts import with_parts

    held = {name: getattr(recipe, name) for name in ("policy", "stages", "agent")}
    held["rewards"] = {name: weighted.reward for name, weighted in recipe.rewards.items()}
    for path, part in with_parts("", held):
        for key in sorted(_NAMES_MODEL & {f.name for f in fields(part)}) if is_dataclass(part) else ():
            if isinstance(named := getattr(part, key), str) and (key != "path" or _is_of_model(part)):
                yield f"{path}.{key}", named


def _is_of_model(part: object) -> bool:
    """True if `path` of these settings names a model, which they declare by naming a hub."""
    from rewards.judges.asking import AsksModel
    from rewards.models.model_folder import ModelReward, stage_of
    from rlhf.training.critics.value_model import CriticModelSettings
    from rlhf.training.policy.model import Pretrained

    return isinstance(part, AsksModel | ModelReward | CriticModelSettings | Pretrained) and stage_of(part) is None


def _need(package: str, extra: str, what: str, where: str) -> None:
    parent = package.partition(".")[0]
    if find_spec(parent) is None or find_spec(package) is None:
        raise missing(extra, what, where, f"no module named {package}")


def _reach(servers: Sequence[str]) -> None:
    for i, address in enumerate(servers):
        parts = urlsplit(address)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S):
                pass
        except (OSError, ValueError) as error:
            raise EngineError(
                "the server does not answer",
                where=f"engine.servers[{i}]",
                got=f"{address}: {(error.strerror if isinstance(error, OSError) else None) or error}",
                expected="a running server",
                hint="start it with `rlhf serve RUN`, or correct the address, or use 'engine={kind: transformers}'",
            ) from error
