"""The engine process: what its start leaves alone, what its death does to a rollout, and why it may not start."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from agents.chat import ChatAgent
from rewards.shaping.outcome import EnvironmentReward
from rlhf.data import Finish, Outcome, SamplingParams
from rlhf.errors import DeliveryError, EngineError, ModelError, RlhfError, TrainingError
from rlhf.inference.vllm.local import LocalInstance
from rlhf.inference.vllm.start import StartOptions, engine_environment
from rlhf.inference.vllm.start_log import StartLog
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from tests.rollout.vllm.real_vllm import engine_over, full_weights, policy_like, prompt_of, start_options
from tests.training.tiny import Echoes


def state_of_this_process() -> dict[str, Any]:
    """What a trainer in this process relies on."""
    return {
        **{f"variable {name}": value for name, value in os.environ.items()},
        "torch random": torch.get_rng_state().tolist(),
        "python random": random.getstate(),
        "numpy random": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "distributed": torch.distributed.is_initialized(),
        "folder": os.getcwd(),
        "signals": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
        "terminal": [os.fstat(n).st_ino for n in (1, 2)],
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is not as it was."""
    names = before.keys() | after.keys()
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


@dataclass
class Own:
    """An instance of this module's own, the processes it started, and this process before and after."""

    instance: LocalInstance
    processes: list[psutil.Process]
    before: dict[str, Any]
    after: dict[str, Any]


@pytest.fixture(scope="module")
def own(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    me = psutil.Process()
    policy, folder = policy_like(), tmp_path_factory.mktemp("own")

    async def start() -> Own:
        options = start_options(policy, folder / "model")
        there, before = set(me.children(recursive=True)), state_of_this_process()
        instance = LocalInstance.start(options, folder / "engine.log")
        after = state_of_this_process()
        started = [p for p in me.children(recursive=True) if p not in there and "tracker" not in " ".join(p.cmdline())]
        return Own(instance, started, before, after)

    found = runner.run(start())
    yield found
    runner.run(found.instance.close())


def test_a_start_leaves_this_process_as_it_was(own):
    assert changes(own.before, own.after) == {}
    n_threads = torch.get_num_threads()
    torch.set_num_threads(n_threads + 1)  # vLLM makes this do nothing where it runs
    assert torch.get_num_threads() == n_threads + 1
    torch.set_num_threads(n_threads)


def test_sampling_leaves_this_process_as_it_was(own, runner):
    policy = policy_like(1)

    async def sample() -> None:
        engine = await engine_over(own.instance, policy=policy)
        await engine.load(full_weights(policy, 1))
        await asyncio.gather(*(engine.generate(prompt_of(20 + i), SamplingParams(seed=i)) for i in range(4)))
        await engine.close()

    before = state_of_this_process()
    runner.run(sample())
    after = state_of_this_process()
    assert changes(before, after) == {}


def test_death_of_the_engine_ends_a_rollout_in_errors_of_the_engine(own, runner):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(own.instance, policy=policy)
        await engine.load(full_weights(policy, 1))
        limits = Limits(max_turns=4, max_tokens=2000, max_error_fraction=1.0)
        collector = RolloutRunner(
            environment=Echoes(n_turns=4), agent=ChatAgent(system=""), engine=engine, limits=limits, seed=0,
            rewards={"env": WeightedReward("env", 1.0, EnvironmentReward())}, renderer=Renderer(policy.tokenizer),
        )  # fmt: skip
        calls = [
            asyncio.create_task(engine.generate(prompt_of(20 + i), SamplingParams(max_tokens=4000))) for i in range(8)
        ]
        rollout = asyncio.create_task(
            collector.collect(Echoes().tasks("train"), group_size=4, sampling=SamplingParams(), step=0)
        )
        await asyncio.sleep(0.5)
        assert not rollout.done() and not any(call.done() for call in calls)
        begin = time.monotonic()
        for process in own.processes:
            process.kill()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*calls, return_exceptions=True)
            collected = await rollout
        took = time.monotonic() - begin
        with pytest.raises(EngineError, match="no vLLM instance is left") as told:
            await engine.generate(prompt_of(5), SamplingParams())
        with pytest.raises(DeliveryError, match="no vLLM instance is left to deliver to"):
            await engine.load(full_weights(policy, 2))
        with pytest.raises(TrainingError):  # a training step of nothing but errors stops the run
            await RolloutRunner(**{**vars(collector), "limits": Limits()}).collect(
                Echoes().tasks("train"), group_size=4, sampling=SamplingParams(), step=1
            )
        await engine.close()
        return ended, collected, took, str(told.value)

    ended, collected, took, told = runner.run(go())
    assert took < 20 and "the vLLM engine died" in told
    # An answer that was on its way when the engine died is whole.
    errors = [e for e in ended if isinstance(e, EngineError)]
    assert all(isinstance(e, EngineError) or e.finish is not Finish.ABORT for e in ended) and len(errors) > 4
    failures = [f for group in collected.groups for f in group.failures]
    scored = [t for group in collected.groups for t in group.trajectories]
    assert len(failures) + len(scored) == 32 and len(failures) > 8
    assert {f.outcome for f in failures} == {Outcome.ENGINE_ERROR}
    assert Outcome.ENGINE_ERROR not in {t.outcome for t in scored}
    assert all(len(group.scores) == len(group.trajectories) for group in collected.groups)


#: A run that is told to stop, and then samples and delivers once more.
RUN = """
import asyncio, signal, sys
from pathlib import Path
from rlhf.data import SamplingParams
from tests.rollout.vllm.real_vllm import engine_over, full_weights, policy_like, prompt_of, start_instance

async def go():
    told = {number: asyncio.Event() for number in (signal.SIGINT, signal.SIGTERM)}
    for number, event in told.items():
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    policy = policy_like()
    engine = await engine_over(start_instance(policy, Path(sys.argv[1])), policy=policy)
    await engine.load(full_weights(policy, 1))
    print("ready", flush=True)
    for event in told.values():
        await event.wait()
    await asyncio.sleep(1.0)
    found = await engine.generate(prompt_of(20), SamplingParams(max_tokens=5))
    await engine.load(full_weights(policy, 2))
    print("sampled", len(found.token_ids), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(go())
"""


@pytest.mark.extended
def test_a_signal_to_the_whole_group_leaves_the_engine_to_the_run_and_its_death_ends_the_engine(tmp_path):
    program = tmp_path / "run.py"
    program.write_text(RUN)
    root = Path(__file__).parents[3]
    run = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "model")], env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert run.stdout is not None and "ready\n" in run.stdout  # other lines may come first
        engines = [p for p in psutil.Process(run.pid).children(recursive=True) if "EngineCore" in p.name()]
        assert engines and all(os.getpgid(p.pid) != run.pid for p in engines)
        os.killpg(run.pid, signal.SIGTERM)
        os.killpg(run.pid, signal.SIGINT)
        assert "sampled 5\n" in run.stdout
        run.kill()
        gone, left = psutil.wait_procs(engines, timeout=20)
        assert len(gone) == len(engines) and not left
    finally:
        for process in psutil.Process(run.pid).children(recursive=True) if run.poll() is None else ():
            process.kill()
        run.kill()
        run.wait()


def start_error(runner: asyncio.Runner, folder: Path, **settings: Any) -> RlhfError:
    """The error of a start that fails."""
    shape = {name: settings.pop(name) for name in ("head_dim",) if name in settings}

    options = start_options(policy_like(**shape), folder / "model", **settings)

    async def go() -> RlhfError:
        with pytest.raises(RlhfError) as told:
            LocalInstance.start(options, folder / "engine.log")
        return told.value

    before = state_of_this_process()
    found = runner.run(go())
    assert changes(before, state_of_this_process()) == {}
    assert str(folder / "model") in found.where and str(folder / "engine.log") in found.hint
    return found


@pytest.mark.extended
def test_heads_that_vllm_has_no_kernel_for_are_named(runner, tmp_path):
    found = start_error(runner, tmp_path, head_dim=24)
    assert isinstance(found, ModelError) and "heads this wide" in found.what
    assert "policy.head_dim" in found.hint and "32, 64" in found.expected


@pytest.mark.extended
def test_a_cache_too_small_for_one_context_is_named(runner, tmp_path):
    found = start_error(runner, tmp_path, kv_cache_bytes=1000)
    assert isinstance(found, EngineError) and "there is too little memory for the KV cache" in found.what
    assert "raise engine.kv_cache_gb" in found.hint


@pytest.mark.parametrize("config", [None, {"model_type": "no_such_model"}], ids=["empty folder", "unknown model"])
def test_a_folder_that_is_no_model_is_named(runner, tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    options = StartOptions(str(tmp_path), 64, "float32", 4, 64, kv_cache_bytes=2**20)

    async def go() -> RlhfError:
        with pytest.raises(ModelError) as told:
            LocalInstance.start(options)
        return told.value

    found = runner.run(go())
    assert str(tmp_path) in found.where and "engine.kind transformers" in found.hint
    assert ("no_such_model" if config else "local directory") in found.got


def test_the_start_of_this_vllm_is_told_in_lines(full, tmp_path_factory):
    told = []
    StartLog(told.append).feed((tmp_path_factory.getbasetemp() / "full0" / "engine.log").read_text())
    assert told[0] == "the engine loads the weights", told
    assert any(line.startswith("weights loaded in") for line in told), told
    assert told[-1].startswith("room for keys and values of"), told


@pytest.mark.parametrize(("found", "level"), [(None, "INFO"), ("ERROR", "INFO"), ("debug", "DEBUG")])
def test_a_start_is_told_whatever_a_library_made_of_the_level(monkeypatch, found, level):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if found:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", found)
    assert engine_environment()["VLLM_LOGGING_LEVEL"] == level


#: A script that starts a process at its top level, as `rlhf.train` does with an engine.
UNGUARDED = """\
from multiprocessing import get_context
from rlhf.inference.vllm.process import without_main
print("begun", flush=True)
with without_main():
    child = get_context("spawn").Process(target=print, args=("started",))
    child.start()
    child.join()
print(__name__, child.exitcode)
"""


def test_a_script_without_a_main_guard_starts_an_engine_once(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["begun", "started", "__main__", "0"], done.stderr
