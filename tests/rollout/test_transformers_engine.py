from __future__ import annotations

import asyncio
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data import Finish, Prompt, SamplingParams
from rlhf.errors import ContextFull, EngineError, ModelError
from rlhf.inference.embedded.sampling import SamplingRows, distributions, request_key, uniforms
from rlhf.inference.engine import RolloutEngine
from tests.rollout.tiny_models import (
    FAMILIES,
    N_VOCAB,
    blas_keeps_rows,
    gap,
    lora_model,
    make_engine,
    prompt_of,
    tiny_model,
)


async def episode(engine, number, n_turns=4):
    """Ragged turns with a stop token; the history grows, and now and then loses a piece of its past."""
    rng = random.Random(number)
    ids = [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 60))]
    generations = []
    for turn in range(n_turns):
        params = SamplingParams(max_tokens=rng.randint(1, 25), seed=100 * number + turn)
        generations.append(await engine.generate(Prompt(tuple(ids), (3,)), params, session=f"s{number}"))
        ids = [*generations[-1].full_ids, *(rng.randrange(N_VOCAB) for _ in range(rng.randint(0, 20)))]
        if rng.random() < 0.25:
            del ids[4:9]
        await asyncio.sleep(rng.choice([0, 0, 0.001]))
    await engine.release(f"s{number}")
    return generations


def play(engine, n_episodes=12):
    async def all_of_them():
        return await asyncio.gather(*(episode(engine, i) for i in range(n_episodes)))

    return [g for generations in asyncio.run(all_of_them()) for g in generations]


def test_it_is_an_engine():
    assert isinstance(make_engine(), RolloutEngine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [{}, {"max_sessions": 3, "max_batch_tokens": 30}], ids=["roomy", "narrow"])
def test_logprobs_equal_a_plain_pass(family, limits):
    engine = make_engine(tiny_model(family), **limits)
    generations = play(engine)
    plain = tiny_model(family)  # eager attention, one sequence, no cache
    assert max(gap(plain, g) for g in generations) < 2e-5
    assert {g.finish for g in generations} == {Finish.STOP, Finish.LENGTH}
    assert all((g.token_ids[-1] == 3) == (g.finish is Finish.STOP) and 3 not in g.token_ids[:-1] for g in generations)
    assert engine.stats.n_cached_tokens > 1000


def test_logprobs_equal_a_plain_pass_with_an_adapter():
    engine = make_engine(lora_model())
    plain = lora_model()
    assert max(gap(plain, g) for g in play(engine, 6)) < 2e-5
    with plain.disable_adapter():  # the adapter matters
        assert max(gap(plain, g) for g in play(engine, 1)) > 0.01


@pytest.mark.parametrize(
    "params", [{"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 1.5, "top_p": 0.8, "top_k": 30}]
)
def test_logprobs_are_those_of_the_distribution_sampled_from(params):
    model = tiny_model()
    generation = asyncio.run(make_engine(tiny_model()).generate(prompt_of(20), SamplingParams(max_tokens=30, **params)))
    settings = SamplingParams(**params)
    n = len(generation.token_ids)
    logits = model(torch.tensor([generation.full_ids])).logits[0, 19:-1]
    numbers = uniforms(torch.full((n,), int(request_key(0)), dtype=torch.uint64).numpy(), torch.arange(n).numpy())
    rows = SamplingRows(
        *(torch.full((n,), float(x)).double().numpy() for x in (settings.temperature, settings.top_p)),
        torch.full((n,), settings.top_k).numpy(),
        numbers,
    )
    logp = distributions(logits.detach(), rows)
    expected = logp.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=2e-5)


def test_greedy_follows_the_largest_logit():
    generation = asyncio.run(make_engine().generate(prompt_of(20), SamplingParams(max_tokens=30, temperature=0)))
    model = tiny_model()
    logits = model(torch.tensor([generation.full_ids])).logits[0, 19:-1]
    assert logits.argmax(-1).tolist() == list(generation.token_ids)
    assert gap(model, generation) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_does_not_depend_on_what_else_runs(family):
    model = tiny_model(family)
    busy = play(make_engine(model))
    alone = []
    for number in range(12):
        alone += asyncio.run(episode(make_engine(model, max_sessions=1), number))
    assert [g.token_ids for g in alone] == [g.token_ids for g in busy]
    assert [g.finish for g in alone] == [g.finish for g in busy]
    both = [zip(g.logprobs, h.logprobs, strict=True) for g, h in zip(alone, busy, strict=True)]
    assert max(abs(a - b) for pairs in both for a, b in pairs) <= (0 if blas_keeps_rows() else 2e-5)


@pytest.mark.parametrize("seed", range(8))
def test_attempts_at_a_task_do_not_depend_on_when_they_begin(seed):
    rng = random.Random(seed)
    shared = [rng.randrange(N_VOCAB) for _ in range(rng.randint(10, 200))]
    tasks = [[*shared, *(rng.randrange(N_VOCAB) for _ in range(rng.randint(0, 140)))] for _ in range(3)]
    prompts = [rng.choice(tasks) for _ in range(8)]

    async def group(engine, delays):
        async def attempt(number):
            for _ in range(delays[number]):
                await asyncio.sleep(0)
            params, name = SamplingParams(max_tokens=5, seed=number), str(number)
            first = await engine.generate(Prompt(tuple(prompts[number])), params, session=name)
            return first.logprobs, (
                await engine.generate(Prompt((*first.full_ids, 1, 2)), params, session=name)
            ).logprobs

        return await asyncio.gather(*(attempt(number) for number in range(8)))

    model, many = tiny_model(), {"max_context": 512, "max_sessions": 16}
    at_once = asyncio.run(group(make_engine(model, **many), [0] * 8))
    later = make_engine(model, **many, max_batch_tokens=rng.choice([97, 130, 300]))
    found = asyncio.run(group(later, [rng.randint(0, 60) for _ in range(8)]))
    assert found == (at_once if blas_keeps_rows() else pytest.approx(at_once, abs=2e-5))


@given(st.integers(1, 6), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_slots_and_pieces_change_nothing(max_sessions, max_batch_tokens, seed):
    async def turns(engine, number):
        rng = random.Random(f"{seed}/{number}")
        ids, said = [rng.randrange(N_VOCAB) for _ in range(rng.choice([2, 30, 90]))], []
        for turn in range(2):
            params = SamplingParams(max_tokens=rng.randint(1, 6), seed=seed + turn)
            said.append(await engine.generate(Prompt(tuple(ids)), params, session=str(number)))
            ids = [*said[-1].full_ids, 1, 2]
        return said

    async def together(engine):
        return await asyncio.gather(*(turns(engine, number) for number in range(6)))

    model = tiny_model()
    roomy = asyncio.run(together(make_engine(model)))
    narrow = asyncio.run(together(make_engine(model, max_sessions=max_sessions, max_batch_tokens=max_batch_tokens)))
    assert [[g.token_ids for g in said] for said in narrow] == [[g.token_ids for g in said] for said in roomy]


def test_a_turn_computes_its_new_tokens_only():
    engine = make_engine()

    async def two_turns():
        first = await engine.generate(prompt_of(50), SamplingParams(max_tokens=10), session="a")
        await engine.generate(Prompt((*first.full_ids, 1, 2, 3)), SamplingParams(max_tokens=5), session="a")

    asyncio.run(two_turns())
    stats = engine.stats
    # 50 + 10 tokens are known; the last sampled one was never fed, so it and the 3 new ones are computed.
    assert (stats.n_cached_tokens, stats.n_prefill_tokens, stats.n_generated_tokens) == (59, 50 + 4, 10 + 5)
    assert stats.n_forward == 10 + 5
    assert stats.forward_s > 0


def test_asleep_it_holds_no_cache_and_a_session_goes_on():
    def second_of(sleeps):
        engine = make_engine()

        async def two_turns():
            first = await engine.generate(prompt_of(50), SamplingParams(max_tokens=10, seed=1), session="a")
            assert engine.cache_bytes > 0
            if sleeps:
                await engine.sleep()
                assert engine.cache_bytes == 0
            prompt = Prompt((*first.full_ids, 1, 2, 3))
            return await engine.generate(prompt, SamplingParams(max_tokens=5, seed=2), session="a")

        return asyncio.run(two_turns()).token_ids, engine.stats.n_cached_tokens

    (slept, n_cached), (awake, n) = second_of(True), second_of(False)
    assert slept == awake and n_cached < n == 59


def test_slots_are_added_as_sessions_come():
    engine = make_engine(max_sessions=128)

    async def sessions(n):
        await asyncio.gather(*(engine.generate(prompt_of(5), SamplingParams(max_tokens=2), session=str(i)) for i in n))

    asyncio.run(sessions(range(40)))
    of_40 = engine.cache_bytes
    asyncio.run(sessions(range(64)))
    assert of_40 < engine.cache_bytes <= 2 * of_40 * 0.9


def test_the_same_prompt_again_computes_one_token():
    engine = make_engine()

    async def twice():
        for _ in range(2):
            generation = await engine.generate(prompt_of(50), SamplingParams(max_tokens=5), session="a")
        return generation

    generation = asyncio.run(twice())
    assert engine.stats.n_cached_tokens == 49
    assert gap(tiny_model(), generation) < 2e-5


def test_prompts_that_begin_alike_are_computed_once():
    engine = make_engine()
    prompts = [Prompt((*prompt_of(60).token_ids, i)) for i in range(8)]

    async def group():
        params = [SamplingParams(max_tokens=6, seed=i) for i in range(8)]
        return await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))

    generations = asyncio.run(group())
    assert max(gap(tiny_model(), g) for g in generations) < 2e-5
    assert (
        engine.stats.n_cached_tokens == 7 * 59
    )  # what ends a prompt is read with the token before it, as in the first
    assert [g.prompt for g in generations] == prompts


def test_one_slot_serves_everybody_in_turn():
    engine = make_engine(max_sessions=1)
    shared = prompt_of(40).token_ids

    async def group():
        return await asyncio.gather(
            *(engine.generate(Prompt((*shared, i)), SamplingParams(max_tokens=4), session=str(i)) for i in range(4))
        )

    assert max(gap(tiny_model(), g) for g in asyncio.run(group())) < 2e-5
    assert engine.stats.n_evictions == 3
    assert engine.stats.n_cached_tokens == 3 * 39  # the slot's own past, taken over by the next session


def test_the_longest_idle_session_loses_its_slot():
    engine = make_engine(max_sessions=2)

    async def turns():
        for session, seed in (("a", 1), ("b", 2), ("a", 1), ("c", 3)):  # c takes the slot of b
            await engine.generate(prompt_of(30, seed), SamplingParams(max_tokens=2), session=session)
        cached = [engine.stats.n_cached_tokens]
        for session, seed in (("a", 1), ("b", 2)):
            await engine.generate(prompt_of(30, seed), SamplingParams(max_tokens=2), session=session)
            cached.append(engine.stats.n_cached_tokens)
        return cached[1] - cached[0], cached[2] - cached[1]

    assert asyncio.run(turns()) == (29, 0)


def test_sessions_wait_for_a_slot_rather_than_take_each_others_cache():
    engine = make_engine(max_sessions=2)

    async def turns(session):
        ids = prompt_of(40, seed=session).token_ids
        for _ in range(3):
            ids = (await engine.generate(Prompt(ids), SamplingParams(max_tokens=5), session=str(session))).full_ids
        await engine.release(str(session))

    async def crowd():
        await asyncio.gather(*(turns(session) for session in range(6)))

    asyncio.run(crowd())
    assert engine.stats.n_evictions == 0
    # The second turn finds 44 of 45 tokens cached, the third 49 of 50.
    assert engine.stats.n_cached_tokens == 6 * (44 + 49)


def test_a_session_that_stays_away_does_not_hold_its_slot_for_ever():
    engine = make_engine(max_sessions=2)

    async def stay_away():
        await engine.generate(prompt_of(30, 1), SamplingParams(max_tokens=2), session="gone")
        long = asyncio.create_task(engine.generate(prompt_of(30, 2), SamplingParams(max_tokens=300), session="busy"))
        await engine.generate(prompt_of(30, 3), SamplingParams(max_tokens=2), session="new")
        return long.done(), await long

    done, long = asyncio.run(stay_away())
    assert not done
    assert engine.stats.n_evictions == 1
    assert gap(tiny_model(), long) < 2e-5


def test_calls_of_one_session_run_at_the_same_time_and_the_first_keeps_its_cache():
    engine = make_engine(max_sessions=3)

    async def at_once():
        prompts = [prompt_of(40, seed) for seed in range(3)]
        found = [asyncio.create_task(engine.generate(p, SamplingParams(max_tokens=8), session="a")) for p in prompts]
        generations = await asyncio.gather(*found)
        n_forward = engine.stats.n_forward
        goes_on = Prompt((*generations[0].full_ids, 1, 2))
        last = await engine.generate(goes_on, SamplingParams(max_tokens=1), session="a")
        free = [await engine.generate(prompt_of(40, 9 + i), SamplingParams(max_tokens=1), session="b") for i in (0, 1)]
        return n_forward, [*generations, last, *free]

    n_forward, generations = asyncio.run(at_once())
    assert n_forward == 8
    assert max(gap(tiny_model(), g) for g in generations) < 2e-5
    assert engine.stats.n_cached_tokens == 47 and engine.stats.n_evictions == 0


def test_the_context_ends_a_generation():
    engine = make_engine(max_context=40)
    generation = asyncio.run(engine.generate(prompt_of(30), SamplingParams(max_tokens=64)))
    assert (len(generation.token_ids), generation.finish) == (10, Finish.LENGTH)
    assert asyncio.run(engine.generate(prompt_of(39), SamplingParams())).finish is Finish.LENGTH
    with pytest.raises(ContextFull, match="40 tokens"):
        asyncio.run(engine.generate(prompt_of(40), SamplingParams()))


def test_the_whole_context_can_be_used():
    engine = make_engine(max_context=512)
    generation = asyncio.run(engine.generate(prompt_of(300), SamplingParams(max_tokens=512)))
    assert len(generation.full_ids) == 512
    assert gap(tiny_model(), generation) < 5e-5


@pytest.mark.parametrize("bad", [-1, N_VOCAB])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(EngineError, match="outside the model's vocabulary"):
        asyncio.run(make_engine().generate(Prompt((1, bad)), SamplingParams()))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ModelError, match="at most 512"):
        make_engine(max_context=513)


def test_the_event_loop_runs_between_steps():
    engine = make_engine()
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def both():
        task = asyncio.create_task(tick())
        await engine.generate(prompt_of(5), SamplingParams(max_tokens=30))
        task.cancel()

    asyncio.run(both())
    assert ticks >= 29
