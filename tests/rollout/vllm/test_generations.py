"""What vLLM samples, and what it says about it: the same as the embedded engine, and as a plain forward pass."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agents.chat import ChatAgent
from rlhf.build.engine import decoder_of
from rlhf.data import Finish, Prompt, SamplingParams, Task, Trajectory
from rlhf.errors import ContextFull, EngineError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.training.policy.model import Policy
from tests.rollout.vllm.real_vllm import (
    MAX_CONTEXT,
    engine_over,
    full_weights,
    gaps,
    lora_policy,
    policy_like,
    prompt_of,
    weights,
)
from tests.training.tiny import Echoes


@dataclass(frozen=True)
class Fifty(Echoes):
    """Up to six turns, and fifty tasks."""

    n_turns: int = 6

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"echoes/{i}", seed=i) for i in range(50)]


async def play(engine: RolloutEngine, policy: Policy, sampling: SamplingParams) -> list[Trajectory]:
    """Fifty episodes of several turns through the runner that training uses."""
    environment = Fifty()
    groups = await run_groups(
        environment.tasks("train"), environment, ChatAgent(system=""), engine, Renderer(policy.tokenizer),
        Limits(max_turns=6, max_tokens=12, max_retries=0), sampling, group_size=1, seed=0,
    )  # fmt: skip
    return [trajectory for (trajectory,) in groups]


@pytest.fixture
def engine(runner, full):
    """An engine that holds the policy of seed 3 as version 1."""
    policy = policy_like(3)

    async def start() -> VllmEngine:
        found = await engine_over(full, policy=policy)
        await found.load(full_weights(policy, 1))
        return found

    engine = runner.run(start())
    yield engine
    runner.run(engine.close())


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_greedy_episodes_are_those_of_the_embedded_engine(runner, request, kind):
    instance = request.getfixturevalue("full" if kind == "full" else "adapted")
    policy = policy_like(3) if kind == "full" else lora_policy(3)
    greedy = SamplingParams(temperature=0.0)

    async def both():
        mine = await engine_over(instance, policy=policy)
        await mine.load(weights(policy, 1))
        theirs = TransformersEngine(policy.model, max_context=MAX_CONTEXT)
        try:
            return await play(mine, policy, greedy), await play(theirs, policy, greedy)
        finally:
            await mine.close()
            await theirs.close()

    mine, theirs = runner.run(both())
    generations = [g for t in mine for g in t.generations]
    assert [[g.full_ids for g in t.generations] for t in mine] == [[g.full_ids for g in t.generations] for t in theirs]
    assert [(t.outcome, [turn.reward for turn in t.turns]) for t in mine] == [
        (t.outcome, [turn.reward for turn in t.turns]) for t in theirs
    ]
    assert max(len(t.turns) for t in mine) == 6 and len({t.generations[0].token_ids for t in mine}) > 5
    assert max(float(gaps(policy, g, SamplingParams()).max()) for g in generations) < 1e-3


def test_a_sampled_episode_has_the_logprobs_of_a_plain_pass(runner, engine, record_property):
    found = runner.run(play(engine, policy_like(3), SamplingParams()))
    generations = [g for t in found for g in t.generations]
    gap = max(float(gaps(policy_like(3), g, SamplingParams()).max()) for g in generations)
    record_property("largest gap in nats", gap)
    assert len(generations) > 100 and {g.finish for g in generations} >= {Finish.LENGTH}
    assert gap < 1e-3


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 1.5, "top_p": 0.8, "top_k": 30}],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(runner, engine, settings):
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=40, seed=seed, **settings)

    async def sample():
        return await asyncio.gather(*(engine.generate(prompt_of(20 + i, i), params(i)) for i in range(12)))

    found = runner.run(sample())
    assert len({g.token_ids for g in found}) == 12
    assert max(float(gaps(policy_like(3), g, params(0)).max()) for g in found) < 1e-3
    if settings:  # and of no other
        assert max(float(gaps(policy_like(3), g, SamplingParams()).max()) for g in found) > 0.1


def test_one_seed_gives_one_generation_whatever_else_runs(runner, engine):
    async def sample(numbers: Any) -> dict[int, tuple[int, ...]]:
        params = [SamplingParams(max_tokens=10 + 3 * i, seed=2**63 - 1 - i, top_p=0.9 if i % 2 else 1) for i in numbers]
        calls = (engine.generate(prompt_of(10 + 7 * i, i), p) for i, p in zip(numbers, params, strict=True))
        return dict(zip(numbers, [g.token_ids for g in await asyncio.gather(*calls)], strict=True))

    together = runner.run(sample(range(16)))
    alone = {i: runner.run(sample([i]))[i] for i in (0, 3, 8, 15)}
    assert alone == {i: together[i] for i in alone}
    assert runner.run(sample(range(15, -1, -1))) == together


def test_a_stop_id_ends_a_generation_and_stays_in_it(runner, engine):
    params = SamplingParams(max_tokens=40, seed=1)
    free = runner.run(engine.generate(prompt_of(20), params))
    # Stop at what it says tenth; where it says so earlier, it stops there.
    stop = free.token_ids[9]
    found = runner.run(engine.generate(Prompt(free.prompt.token_ids, (stop, free.token_ids[30])), params))
    assert found.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (found.finish, free.finish, len(free.token_ids)) == (Finish.STOP, Finish.LENGTH, 40)
    # The end-of-sequence id of the model is an ordinary token unless the prompt names it.
    eos = int(policy_like(3).tokenizer.eos_token_id)
    sampled = [runner.run(engine.generate(prompt_of(20), replace(params, max_tokens=400, seed=i))) for i in range(3)]
    assert any(eos in g.token_ids[:-1] for g in sampled)


def test_stop_strings_end_a_generation_where_the_embedded_engine_ends_it(runner, engine):
    policy = policy_like(3)
    theirs = TransformersEngine(policy.model, max_context=MAX_CONTEXT, decode=decoder_of(policy))
    params = SamplingParams(max_tokens=60, temperature=0.0, stop_strings=("omeg", " pois", "j", "lpha the"))
    # Prompts of whole characters, as all real ones are.
    prompts = [Prompt(tuple(policy.tokenizer.encode("alpha the poison waits " + "xyz"[i % 3] * i))) for i in range(32)]

    async def both():
        found = []
        for each in (engine, theirs):
            found.append(await asyncio.gather(*(each.generate(prompt, params) for prompt in prompts)))
        await theirs.close()
        return found

    mine, theirs_said = runner.run(both())
    assert [(g.token_ids, g.finish) for g in mine] == [(g.token_ids, g.finish) for g in theirs_said]
    assert {g.finish for g in mine} == {Finish.STOP, Finish.LENGTH}


def test_a_control_token_may_be_a_stop_string(runner, engine):
    tokenizer = policy_like(3).tokenizer
    n_ended = 0
    for seed in range(3):
        params = SamplingParams(max_tokens=400, seed=seed)
        free = runner.run(engine.generate(prompt_of(20), params)).token_ids
        ended = runner.run(engine.generate(prompt_of(20), replace(params, stop_strings=(tokenizer.eos_token,))))
        at = free.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in free else 400
        assert (ended.token_ids, ended.finish) == (free[:at], Finish.LENGTH if at == 400 else Finish.STOP)
        n_ended += at < 400
    assert n_ended


def test_the_context_caps_a_generation_and_a_full_one_is_refused(runner, engine):
    params = SamplingParams(max_tokens=1000)
    found = runner.run(engine.generate(prompt_of(MAX_CONTEXT - 7), params))
    assert (len(found.token_ids), found.finish) == (7, Finish.LENGTH)
    assert float(gaps(policy_like(3), found, params).max()) < 1e-3
    for n in (MAX_CONTEXT, MAX_CONTEXT + 20):
        with pytest.raises(ContextFull, match="no room"):
            runner.run(engine.generate(prompt_of(n), params))


@pytest.mark.parametrize("token", [-1, 100_000])
def test_ids_outside_the_vocabulary_are_refused(runner, engine, token):
    with pytest.raises(EngineError, match="outside the model's vocabulary"):
        runner.run(engine.generate(Prompt((1, token, 2)), SamplingParams()))
    last = policy_like(3).model.config.vocab_size - 1
    assert runner.run(engine.generate(Prompt((1, last)), SamplingParams(max_tokens=2))).prompt.token_ids == (1, last)


def test_engines_that_do_not_fit_the_policy_are_refused(runner, full):
    with pytest.raises(EngineError, match="another model") as told:
        runner.run(engine_over(full, policy=policy_like(n_layers=1)))
    assert "num_hidden_layers 2" in told.value.got and "num_hidden_layers 1" in told.value.expected
    with pytest.raises(EngineError, match="no room for adapters"):
        runner.run(engine_over(full, policy=lora_policy()))
