"""An engine that gives the GPU's memory back between rollouts, and takes it again for whoever needs it first."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf.build.engine import start_engine
from rlhf.data import Finish, PolicyWeights, Prompt, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.engine import SleepableEngine
from rlhf.inference.settings import VllmSettings
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import Sampled
from rlhf.inference.vllm.start import StartOptions
from rlhf.recipe import load
from tests import recipe_parts
from tests.training import tiny


class Sleeper:
    """An instance without a model that must be awake to be asked. No CPU build of vLLM can sleep."""

    name = "sleeper"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.is_awake = True

    async def sleep(self) -> None:
        assert self.is_awake
        self.is_awake = False
        self.said.append("sleep")

    async def wake(self) -> None:
        await asyncio.sleep(0.01)
        assert not self.is_awake
        self.is_awake = True
        self.said.append("wake")

    async def sample(self, request_id: str, ids: Sequence[int], params: SamplingParams, *_: Any) -> Sampled:
        assert self.is_awake
        self.said.append("sample")
        return Sampled((1,), (-1.0,), Finish.LENGTH, (("0", 1),))

    async def pause(self, mode: str) -> None:
        assert self.is_awake
        self.said.append("deliver")
        raise EngineError("far enough", where="here")

    async def call(self, method: str, *_: Any) -> list[Any]:
        return [{"n_vocab": 9, "max_context": 9, "lora_rank": 0, "shapes": {}, "logprobs_mode": "processed_logprobs"}]

    async def is_up(self) -> bool:
        return True

    async def connect_transfer(self, info: Any) -> None:
        return None

    async def abort(self, request_ids: Any) -> None:
        return None

    async def close(self) -> None:
        return None


async def engine_of(sleeper: Any, *, sleeps: bool = True) -> VllmEngine:
    engine = VllmEngine([sleeper], sleeps=sleeps)
    await engine.connect(shapes={}, n_vocab=9, max_context=9)
    return engine


def ask(engine: VllmEngine) -> Any:
    return engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=1))


def test_whoever_asks_first_wakes_it_once() -> None:
    async def go() -> list[str]:
        engine = await engine_of(sleeper := Sleeper())
        assert isinstance(engine, SleepableEngine)
        await ask(engine)
        await engine.sleep()
        await engine.sleep()  # it sleeps already
        await asyncio.gather(*(ask(engine) for _ in range(3)))
        await engine.sleep()
        await engine.close()
        return sleeper.said

    assert asyncio.run(go()) == ["sample", "sleep", "wake", "sample", "sample", "sample", "sleep"]


def test_a_delivery_wakes_it() -> None:
    async def go() -> list[str]:
        engine = await engine_of(sleeper := Sleeper())
        await engine.sleep()
        with pytest.raises(EngineError, match="the delivery failed"):
            await engine.load(PolicyWeights(1, "", lambda: iter(())))
        await engine.close()
        return sleeper.said

    assert asyncio.run(go()) == ["sleep", "wake", "deliver"]


def test_it_sleeps_only_where_the_recipe_says_so() -> None:
    async def go() -> list[str]:
        engine = await engine_of(sleeper := Sleeper(), sleeps=False)
        await engine.sleep()
        await ask(engine)
        await engine.close()
        return sleeper.said

    assert asyncio.run(go()) == ["sample"]
    assert "enable_sleep_mode" not in StartOptions("m", 9, "float32", 1, 9).arguments()
    assert StartOptions("m", 9, "float32", 1, 9, sleep=True).arguments()["enable_sleep_mode"] is True


def test_a_shorter_context_than_asked_for_is_said() -> None:
    async def connect(max_context: int) -> int:
        engine = VllmEngine([Sleeper()])
        await engine.connect(shapes={}, n_vocab=9, max_context=max_context)
        return engine.max_context

    with pytest.warns(UserWarning, match=r"a context of 9 tokens: .* not at 12 .*limits\.max_context=9"):
        assert asyncio.run(connect(12)) == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(connect(7)) == 7


def test_without_a_gpu_the_key_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = load(str(recipe_parts.write(tmp_path)), ["engine.kind=vllm", "engine.sleep=true"])
    assert isinstance(recipe.engine, VllmSettings) and recipe.engine.sleep
    with pytest.raises(EngineError, match="the engine has no GPU memory to release"):
        asyncio.run(start_engine(recipe, tiny.policy()))
