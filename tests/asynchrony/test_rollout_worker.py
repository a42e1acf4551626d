"""A rollout worker without Ray: what it says of groups that are played at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf.asynchrony.controller import Job
from rlhf.asynchrony.remote import Delivered
from rlhf.build.engine import fit_of
from rlhf.build.rollout_workers import RolloutWorker, WorkerSpec
from rlhf.errors import EngineError
from rlhf.inference.scripted import ScriptedEngine
from rlhf.inference.settings import VllmSettings
from rlhf.processes import free_port
from rlhf.recipe import load
from rlhf.recipe.model import values_of
from tests.training import runs
from tests.training.tiny import SAID

STAGE: dict[str, Any] = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 2}


class Failing(ScriptedEngine):
    """Asks a real engine for one group, and fails for another at the same time."""

    def __init__(self, real: Any) -> None:
        super().__init__(lambda text: "", max_context=real.max_context)
        self.real, self.first = real, ""
        self.all_ask = asyncio.Barrier(4)

    async def generate(self, prompt: Any, params: Any, session: str = "") -> Any:
        group = session.split("/")[0]
        self.first = self.first or group
        await self.all_ask.wait()
        try:
            if group == self.first:
                return await self.real.generate(prompt, params, session)
        finally:
            await self.all_ask.wait()
        raise EngineError("the engine did not answer in time")


def test_a_group_that_fails_while_another_finds_no_server_is_no_loss_of_servers(tmp_path: Path) -> None:
    recipe = load(runs.write(tmp_path, [STAGE], limits={"max_retries": 0}))
    policy = recipe.policy.build(0, SAID)
    spec = WorkerSpec(
        values=values_of(recipe),
        name=recipe.name,
        base=tmp_path,
        stage=0,
        engine=VllmSettings(servers=(f"http://127.0.0.1:{free_port()}",)),
        fit=fit_of(recipe, policy) | {"max_context": 128},
        dtype=torch.float32,
        tokenizer=policy.tokenizer,
        renderer={},
    )
    weights = Delivered("sender", 0, "fingerprint")

    async def play() -> list[Any]:
        worker = RolloutWorker(spec)
        await worker._follow(weights)
        worker._runner = replace(worker._runner, engine=Failing(worker._engine))
        tasks = list(recipe.environment.tasks("train"))[:2]
        return await asyncio.gather(*(worker.play(Job(0, task, 0), weights) for task in tasks))

    lost, failed = asyncio.run(play())
    assert lost.group is None and "no vLLM instance is left" in lost.fault
    assert failed.group is not None and len(failed.group.failures) == 2 and not failed.fault
