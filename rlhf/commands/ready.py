"""Whether engine and models that a recipe names can be had: looked for before a run begins, which would notice late."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf.errors import EngineError, MissingPackageError

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

#: Seconds that a server has to take a connection.
CONNECT_S = 10.0


def refuse_absent_engine(recipe: Recipe) -> None:
    """Raise where the engine cannot be had.

    Raises:
        MissingPackageError: its package is not installed.
        EngineError: a server takes no connection.
    """
    from rlhf.rollout.engines import VllmSettings

    if not isinstance(recipe.engine, VllmSettings):
        return
    if not recipe.engine.servers:
        _need("vllm", "vLLM is not installed", "engine.kind", "vllm", "make install-vllm")
        return
    _need("aiohttp", "aiohttp is not installed", "engine.servers", "servers", "pip install 'rlhf-agents[servers]'")
    _reach(recipe.engine.servers)


def refuse_absent_quantization(recipe: Recipe) -> None:
    """Raise MissingPackageError or ModelError where the policy's base cannot be held in as few bits as it should."""
    from rlhf.trainers.lora import refuse_unquantizable

    if recipe.policy.lora is not None and recipe.policy.lora.quantization is not None:
        refuse_unquantizable()


def refuse_absent_models(recipe: Recipe) -> None:
    """Raise RecipeError where policy or reward names a folder without a model; a name on a hub is not looked up."""
    from rewards.asking import AsksModel
    from rewards.model_folder import ModelReward
    from rewards.parts import with_parts
    from rlhf.recipe.model_folders import refuse_no_model

    if isinstance(path := getattr(recipe.policy, "path", None), str):
        refuse_no_model(path, "policy.path", "give the folder of a saved model, or a hub name such as Qwen/Qwen3-0.6B")
    hint = (
        "a reward_model stage leaves its model in reward_model/ of its run, another one its policy in "
        "checkpoints/NAME/policy"
    )
    rewards = {name: weighted.reward for name, weighted in recipe.rewards.items()}
    for path, reward in with_parts("rewards", rewards):
        if isinstance(reward, ModelReward | AsksModel) and reward.path is not None:
            refuse_no_model(reward.path, f"{path}.path", hint)


def _need(package: str, what: str, where: str, extra: str, hint: str) -> None:
    if find_spec(package) is None:
        raise MissingPackageError(
            what, where=where, got=f"no module named {package}", expected=f"the extra '{extra}'", hint=hint
        )


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
                got=f"{address}: {getattr(error, 'strerror', None) or error}",
                expected="a server that runs",
                hint="start it with `rlhf serve RUN`, or correct the address, or use 'engine={kind: transformers}'",
            ) from error
