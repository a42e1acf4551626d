"""Two real servers, started by `rlhf serve`: sampling, deliveries, and what happens when one of them dies.

Servers take long to start. The tests share two and stand in an order: those that end a server come last.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from agents.chat import ChatAgent
from rewards.shaping.outcome import EnvironmentReward
from rlhf.cli import app
from rlhf.data import Generation, Outcome, SamplingParams, ScoredGroup
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.vllm.engine import AtUpdate, VllmEngine
from rlhf.inference.vllm.server import ServerInstance
from rlhf.processes import free_port
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.progress import Progress
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.training.policy.model import Policy
from rlhf.training.publisher import Publisher
from tests import recipe_parts
from tests.rollout.vllm.real_vllm import (
    adapter_weights,
    full_weights,
    gaps,
    lora_policy,
    policy_like,
    prompt_of,
)
from tests.rollout.vllm.served import Counting, Cut, Served, engine_on, post, write_recipe
from tests.tiers import tiered
from tests.training.tiny import Echoes

#: Most nats in float32 between a server's log-prob and that of a plain forward pass.
TOLERANCE = 1e-3

#: New tokens of a generation that weights arrive in the middle of: it outlasts a delivery on a busy machine too.
N_NEW = 1600


@dataclass
class Pair:
    """Two servers of one recipe."""

    recipe: Path
    first: Served
    second: Served

    @property
    def urls(self) -> list[str]:
        return [self.first.url, self.second.url]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers that hold the policy of seed 0, then what tests have delivered, with room for adapters."""
    folder = tmp_path_factory.mktemp("served")
    recipe = write_recipe(folder, policy_like())
    found = Pair(recipe, *(Served(recipe, free_port(), folder / f"{name}.txt") for name in ("first", "second")))
    try:
        found.first.wait_until_ready()
        found.second.wait_until_ready()
        yield found
    finally:
        found.first.stop()
        found.second.stop()


async def deliver_base(urls: list[str]) -> None:
    """Give the servers the policy of seed 0 back, which adapters here belong to."""
    base = policy_like()
    async with engine_on(urls, base) as engine:
        await engine.load(full_weights(base, 0))


def worst(policies: dict[int, Policy], generation: Generation, params: SamplingParams) -> float:
    """Largest gap over the tokens, each by the policy of the version that is said to have sampled it."""
    spans = generation.version_spans or ((generation.policy_version, len(generation.token_ids)),)
    begin, found = 0, 0.0
    for version, n in spans:
        found = max(found, float(gaps(policies[version], generation, params)[begin : begin + n].max()))
        begin += n
    return found


async def all_of(engine: VllmEngine, params: SamplingParams, name: str) -> list[Generation]:
    """Six calls at once, each of a session of its own."""
    return await asyncio.gather(*(engine.generate(prompt_of(20, n), params, f"{name}/{n}") for n in range(6)))


# --- a server by itself ----------------------------------------------------------------------------------------------


def serve(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_a_server_answers_an_openai_client(pair: Pair) -> None:
    """Under the recipe's name it is the policy with its adapter, which is new here and adds nothing."""
    prompt = prompt_of(20)
    for name in ("echo", "echo-base"):
        found = post(
            f"{pair.first.url}/v1/completions", model=name, prompt=list(prompt.token_ids), max_tokens=8,
            temperature=0.0, logprobs=0, return_token_ids=True,
        )["choices"][0]  # fmt: skip
        said = Generation(prompt, tuple(found["token_ids"]), tuple(found["logprobs"]["token_logprobs"]), "length", 0)
        assert len(said.token_ids) == 8
        assert gaps(policy_like(), said, SamplingParams()).max() < TOLERANCE


def test_a_server_tells_its_load(runner: asyncio.Runner, pair: Pair) -> None:
    async def ask() -> Any:
        instance = ServerInstance(pair.first.url)
        try:
            return await instance.load()
        finally:
            await instance.close()

    found = runner.run(ask())
    assert found is not None and (found.name, found.running, found.waiting) == (pair.first.url, 0, 0)
    assert 0.0 <= found.cache <= 1.0 and found.n_preempted == 0


def test_serving_what_cannot_be_served(pair: Pair, tmp_path: Path) -> None:
    used = serve(pair.recipe, "--port", pair.first.port)
    assert used.exit_code == 2 and "the server cannot listen at this address" in used.output
    assert f"--port {pair.first.port}" in used.output and "Address already in use" in used.output
    defaults = ("engine.kv_cache_gb=null", "engine.max_sessions=128")
    servers = serve(pair.recipe, f"engine.servers=[{pair.first.url}]", *defaults)
    assert servers.exit_code == 2 and "this recipe uses running servers" in servers.output, servers.output
    scratch = recipe_parts.write(tmp_path)  # a recipe whose policy is made from scratch
    nothing = serve(scratch, "--port", free_port())
    assert nothing.exit_code == 2 and "there are no weights" in nothing.output, nothing.output
    assert "--checkpoint FOLDER" in nothing.output


# --- one engine over both --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["shared_memory", "http"])  # the second is how servers elsewhere get theirs
def test_a_full_delivery_reaches_both_and_is_proven(runner: asyncio.Runner, pair: Pair, way: str) -> None:
    async def go() -> None:
        policy = policy_like(3)
        params = SamplingParams(max_tokens=16, temperature=0.8, seed=5)
        pieces = {"buffer_bytes": 4096} if way == "shared_memory" else {}
        async with engine_on(pair.urls, policy, delivery=way, **pieces) as engine:
            await engine.load(full_weights(policy, 7))
            fingerprints = [await ServerInstance(url).call("rlhf_fingerprint") for url in pair.urls]
            assert fingerprints == [[engine.policy_fingerprint]] * 2
            found = await all_of(engine, params, "new")
            assert {g.policy_version for g in found} == {7}
            assert max(worst({7: policy}, g, params) for g in found) < TOLERANCE
            publisher = Publisher(policy, engine)
            policy.version = 8
            await publisher.publish()
            assert publisher.figures["delivery/canary_gap"] < TOLERANCE

    runner.run(go())


def test_a_session_stays_where_its_prefix_is_and_a_new_one_goes_where_less_runs(
    runner: asyncio.Runner, pair: Pair
) -> None:
    async def go() -> None:
        policy = policy_like()
        clients = [Counting(url) for url in pair.urls]

        async def episode(engine: VllmEngine, number: int) -> None:
            prompt = prompt_of(10 + number, number)
            for turn in range(4):
                params = SamplingParams(max_tokens=8 + 4 * (number % 3), seed=turn)
                found = await engine.generate(prompt, params, f"episode {number}")
                assert gaps(policy, found, params).max() < TOLERANCE
                prompt = type(prompt)((*found.full_ids, 1, 2, 3))
            await engine.release(f"episode {number}")

        async with engine_on(clients, policy) as engine:
            await engine.load(full_weights(policy, 0))
            await asyncio.gather(*(episode(engine, number) for number in range(12)))
        openings = [{prompt[:10] for prompt in client.prompts} for client in clients]
        assert not openings[0] & openings[1]  # all four turns of an episode went to one server
        assert [len(client.prompts) for client in clients] == [24, 24]  # twelve opened at once: six each
        assert [client.most for client in clients] == [6, 6]

    runner.run(go())


@pytest.mark.parametrize("form", ["full", "adapter"])
@pytest.mark.parametrize("at_update", tiered(["drain", "keep", "abort_and_resume"], "keep"))
def test_weights_that_arrive_while_both_sample(
    runner: asyncio.Runner, pair: Pair, form: str, at_update: AtUpdate
) -> None:
    """Every token was sampled by the version it is said to be from, whatever the mode."""
    make: Callable[[int], Policy] = policy_like if form == "full" else lora_policy
    send = full_weights if form == "full" else adapter_weights
    policies = {1: make(1), 2: make(2)}
    params = SamplingParams(max_tokens=N_NEW, seed=3)

    async def go() -> list[Generation]:
        if form == "adapter":
            await deliver_base(pair.urls)
        async with engine_on(pair.urls, policies[1], form, at_update=at_update) as engine:
            await engine.load(send(policies[1], 1))
            running = asyncio.create_task(all_of(engine, params, "running"))
            await all_of(engine, replace(params, max_tokens=N_NEW // 40), "beside")  # some tokens are sampled by then
            await engine.load(send(policies[2], 2))
            assert engine.policy_version == 2
            after = await all_of(engine, replace(params, max_tokens=5), "after")
            assert {g.versions for g in after} == {(2,)}
            return await running

    found = runner.run(go())
    assert all(len(g.token_ids) == N_NEW for g in found)
    assert max(worst(policies, g, params) for g in found) < TOLERANCE
    versions = {g.versions for g in found}
    keeps_its_own = at_update == "drain" or (form == "adapter" and at_update == "keep")
    assert versions == {(1,)} if keeps_its_own else (1, 2) in versions
    if not keeps_its_own:
        assert versions <= {(1,), (1, 2)}


def test_adapters_are_swapped_while_in_use_and_old_ones_freed(runner: asyncio.Runner, pair: Pair) -> None:
    async def go() -> None:
        await deliver_base(pair.urls)
        policies = {version: lora_policy(version) for version in range(1, 6)}
        params = SamplingParams(max_tokens=12, seed=1)
        async with engine_on(pair.urls, policies[1], "adapter") as engine:
            for version, policy in policies.items():
                await engine.load(adapter_weights(policy, version))
                found = await all_of(engine, params, f"{version}")
                assert max(worst(policies, g, params) for g in found) < TOLERANCE
                assert {g.versions for g in found} == {(version,)}
            for url in pair.urls:
                with urlopen(f"{url}/v1/models", timeout=30) as response:
                    names = [row["id"] for row in json.loads(response.read())["data"]]
                assert len(names) == 3, names  # the base, the recipe's own adapter, the one in use

    runner.run(go())


def test_servers_with_different_bases_cannot_share_an_adapter(runner: asyncio.Runner, pair: Pair) -> None:
    async def go() -> None:
        await deliver_base(pair.urls[:1])
        other, policy = policy_like(9), lora_policy(1)
        async with engine_on(pair.urls[1:], other) as engine:
            await engine.load(full_weights(other, 0))
        async with engine_on(pair.urls, policy, "adapter") as engine:
            with pytest.raises(DeliveryError, match="they have different bases") as raised:
                await engine.load(adapter_weights(policy, 1))
            assert all(url in raised.value.where for url in pair.urls)

    runner.run(go())


# --- servers that die ------------------------------------------------------------------------------------------------


async def play(
    engine: VllmEngine, policy: Policy, n_tasks: int, on_progress: Callable[[Progress], None], max_retries: int = 1
) -> list[ScoredGroup]:
    """Many episodes of up to six turns, scored."""
    environment = Echoes(n_turns=6)
    tasks = environment.tasks("train") * (n_tasks // 8)
    attempts = await run_groups(
        tasks, environment, ChatAgent(system=""), engine, Renderer(policy.tokenizer),
        Limits(max_turns=6, max_tokens=24, max_retries=max_retries), SamplingParams(temperature=0.9), group_size=4,
        seed=0, on_progress=on_progress,
    )  # fmt: skip
    reward = {"env": WeightedReward("env", 1.0, EnvironmentReward())}
    return [await score_group(task, found, reward) for task, found in zip(tasks, attempts, strict=True)]


def check(groups: list[ScoredGroup], policies: dict[int, Policy]) -> None:
    """Every trajectory that is scored is whole, and what the policy said it was."""
    params = SamplingParams(temperature=0.9)
    for group in groups:
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            assert trajectory.turns and not trajectory.outcome.is_infrastructure_error
            assert score.total == pytest.approx(sum(turn.reward for turn in trajectory.turns))
            for generation in trajectory.generations:
                assert worst(policies, generation, params) < TOLERANCE


def test_weights_from_elsewhere_are_refused(runner: asyncio.Runner, pair: Pair) -> None:
    """Another run, or a server started again behind the same address: the calls go to the other server."""

    async def go() -> None:
        policy, other = policy_like(4), policy_like(5)
        params = SamplingParams(max_tokens=8, seed=2)
        async with engine_on(pair.urls, policy) as engine, engine_on(pair.urls[1:], other) as another:
            await engine.load(full_weights(policy, 3))
            await another.load(full_weights(other, 3))
            found = await all_of(engine, params, "new")
            assert max(worst({3: policy}, g, params) for g in found) < TOLERANCE
            assert len(engine._replicas.in_use) == 1
            await engine.load(full_weights(policy, 3))
            assert len(engine._replicas.in_use) == 2
            with pytest.raises(EngineError, match="no vLLM instance is left") as raised:
                await another.generate(prompt_of(9), params)
            assert "the server has different weights by now" in raised.value.got

    runner.run(go())


@pytest.mark.extended
def test_a_server_dies_while_episodes_run_and_comes_back(runner: asyncio.Runner, pair: Pair, tmp_path: Path) -> None:
    policy = policy_like(4)
    clients = [Counting(url) for url in pair.urls]
    params = SamplingParams(max_tokens=8, seed=2)
    kill = Cut(pair.second.server.kill)

    async def sample(engine: VllmEngine, version: int) -> None:
        found = await all_of(engine, params, f"{version}")
        assert {g.versions for g in found} == {(version,)}
        assert max(worst({version: policy}, g, params) for g in found) < TOLERANCE

    async def go() -> None:
        async with engine_on(clients, policy) as engine:
            await engine.load(full_weights(policy, 3))
            groups = await play(engine, policy, 16, kill)
            assert kill.at is not None and kill.at.n_running > 8
            assert [len(group.trajectories) for group in groups] == [4] * 16  # none is lost, none has failed
            check(groups, {3: policy})
            assert len(engine._replicas.in_use) == 1
            await engine.load(full_weights(policy, 4))  # goes to the one that is left
            await sample(engine, 4)
            # Whoever started the server is told, and no process of it is left behind.
            assert pair.second.ended() == 2 and "the server ended" in pair.second.said
            assert pair.second.n_left() == 0 and not pair.second.folder.exists()
            pair.second = Served(pair.recipe, pair.second.port, tmp_path / "again.txt")
            await asyncio.to_thread(pair.second.wait_until_ready)
            n_before = len(clients[1].prompts)
            await sample(engine, 4)
            assert len(clients[1].prompts) == n_before  # it is there, with the weights it was started with
            await engine.load(full_weights(policy, 5))
            await sample(engine, 5)
            assert len(engine._replicas.in_use) == 2 and len(clients[1].prompts) == n_before + 3

    runner.run(go())


@pytest.mark.extended
def test_when_no_server_is_left_episodes_fail_by_type_and_nothing_hangs(runner: asyncio.Runner, pair: Pair) -> None:
    """The one is stopped by Ctrl-C, as its user would; the other loses its engine."""
    policy = policy_like(4)

    def end() -> None:
        pair.first.process.send_signal(signal.SIGINT)
        pair.second.engine.kill()

    cut = Cut(end)

    async def go() -> None:
        async with engine_on(pair.urls, policy, delivery_timeout_s=60.0) as engine:
            await engine.load(full_weights(policy, 3))
            groups = await asyncio.wait_for(play(engine, policy, 16, cut), 120)
            assert cut.at is not None
            assert [len(group.trajectories) + len(group.failures) for group in groups] == [4] * 16
            failures = [failure for group in groups for failure in group.failures]
            assert {failure.outcome for failure in failures} == {Outcome.ENGINE_ERROR}
            assert any("no vLLM instance is left" in failure.message for failure in failures)
            assert sum(len(group.trajectories) for group in groups) >= cut.at.n_done
            check(groups, {3: policy})
            assert len(engine._replicas.in_use) == 0
            with pytest.raises(DeliveryError, match="no vLLM instance is left to deliver to") as raised:
                await engine.load(full_weights(policy, 4))
            assert all(url in raised.value.got for url in pair.urls)

    runner.run(go())
    assert pair.first.ended() == 0 and pair.first.said.endswith("stopped\n"), pair.first.said
    assert pair.second.ended() == 2 and "the server ended" in pair.second.said
    for server in (pair.first, pair.second):
        assert server.n_left() == 0 and not server.folder.exists()
