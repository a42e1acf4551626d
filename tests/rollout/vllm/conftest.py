"""What the tests on real vLLM share. Starting an engine takes seconds, so engines live as long as the session.

An engine belongs to the event loop that first used it: everything of one session runs in one `asyncio.Runner`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhf.inference.vllm.local import LocalInstance
from rlhf.training.policy.model import Policy
from tests.rollout.vllm.real_vllm import lora_policy, policy_like, start_instance


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of the session."""
    with asyncio.Runner() as found:
        yield found


@pytest.fixture
def tiny_policy() -> Callable[..., Policy]:
    """Makes a policy of some 50 thousand parameters that vLLM can run; one seed gives one policy."""
    return policy_like


@pytest.fixture(scope="session")
def full(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalInstance]:
    """An instance that takes full weights. What it holds is what the last test left: deliver first."""
    yield from _instance(runner, policy_like(), tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="session")
def adapted(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalInstance]:
    """An instance that takes adapters over the policy of seed 0, and has no tokenizer."""
    yield from _instance(runner, lora_policy(), tmp_path_factory.mktemp("adapted"), texts=False)


def _instance(runner: asyncio.Runner, policy: Policy, folder: Path, **options: Any) -> Iterator[LocalInstance]:
    async def start() -> LocalInstance:
        return start_instance(policy, folder / "model", folder / "engine.log", **options)

    found = runner.run(start())
    yield found
    runner.run(found.close())
