from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, N_VOCAB, lora_model, plain_logprobs, tiny_model

from rlhf.data import Finish, PolicyWeights, Prompt, SamplingParams
from rlhf.errors import ContextFull, DeliveryError, EngineError, ModelError
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.sampling import SamplingRows, distributions, request_key, uniforms
from rlhf.rollout.transformers_engine import TransformersEngine, fingerprint


def make_engine(model=None, **settings):
    return TransformersEngine(model or tiny_model(), **{"max_context": 400, **settings})


def prompt_of(n, seed=0, stop_ids=()):
    rng = random.Random(seed)
    return Prompt(tuple(rng.randrange(N_VOCAB) for _ in range(n)), stop_ids)


def gap(model, generation, temperature=1.0):
    """Largest difference between the engine's log-probs and those of a plain pass."""
    plain = plain_logprobs(model, generation, temperature)
    return float((plain - torch.tensor(generation.logprobs)).abs().max()) if len(plain) else 0.0


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


def blas_keeps_rows():
    """Whether this machine's matrix products round a row alike whatever rows are beside it."""
    x, w = torch.randn(64, 48), torch.randn(97, 48)
    return all(torch.equal(F.linear(x[:n], w), F.linear(x, w)[:n]) for n in (8, 16, 24, 40))


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
        engine.stats.reset()
        await engine.generate(Prompt((*first.full_ids, 1, 2, 3)), SamplingParams(max_tokens=5), session="a")
        return engine.stats.snapshot()

    stats = asyncio.run(two_turns())
    # 50 + 10 tokens are known; the last sampled one was never fed, so it and the 3 new ones are computed.
    assert (stats.n_cached_tokens, stats.n_prefill_tokens, stats.n_generated_tokens) == (59, 4, 5)
    assert stats.n_forward == 5
    assert stats.forward_s > 0
    assert stats.other_s > 0


def test_the_same_prompt_again_computes_one_token():
    engine = make_engine()

    async def twice():
        for _ in range(2):
            engine.stats.reset()
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
    assert engine.stats.n_cached_tokens == 7 * 60
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
    assert engine.stats.n_cached_tokens == 3 * 40  # the slot's own past, taken over by the next session


def test_the_longest_idle_session_loses_its_slot():
    engine = make_engine(max_sessions=2)

    async def turns():
        for session, seed in (("a", 1), ("b", 2), ("a", 1), ("c", 3)):  # c takes the slot of b
            await engine.generate(prompt_of(30, seed), SamplingParams(max_tokens=2), session=session)
        engine.stats.reset()
        await engine.generate(prompt_of(30, 1), SamplingParams(max_tokens=2), session="a")
        kept = engine.stats.n_cached_tokens
        await engine.generate(prompt_of(30, 2), SamplingParams(max_tokens=2), session="b")
        return kept, engine.stats.n_cached_tokens - kept

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


def test_calls_of_one_session_run_one_after_the_other():
    engine = make_engine()

    async def at_once():
        return await asyncio.gather(
            *(engine.generate(prompt_of(20, seed), SamplingParams(max_tokens=8), session="a") for seed in range(3))
        )

    generations = asyncio.run(at_once())
    assert max(gap(tiny_model(), g) for g in generations) < 2e-5
    assert engine.stats.n_forward == 24


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


async def steps(n):
    for _ in range(n):
        await asyncio.sleep(0)


def test_cancelling_frees_the_slot_and_keeps_the_rest():
    engine = make_engine(max_sessions=1)

    async def cancel():
        long = asyncio.create_task(engine.generate(prompt_of(30), SamplingParams(max_tokens=300), session="a"))
        waiting = asyncio.create_task(engine.generate(prompt_of(30, 1), SamplingParams(max_tokens=300), session="b"))
        last = asyncio.create_task(engine.generate(prompt_of(30, 2), SamplingParams(max_tokens=5), session="c"))
        await steps(10)
        waiting.cancel()
        long.cancel()
        results = await asyncio.gather(long, waiting, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        return await asyncio.wait_for(last, 10)

    generation = asyncio.run(cancel())
    assert len(generation.token_ids) == 5
    assert gap(tiny_model(), generation) < 2e-5
    assert engine.stats.n_generated_tokens < 30


def test_a_cancelled_session_goes_on_from_what_it_had():
    engine = make_engine()

    async def cancel():
        task = asyncio.create_task(engine.generate(prompt_of(50), SamplingParams(max_tokens=300), session="a"))
        await steps(10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        engine.stats.reset()
        return await engine.generate(prompt_of(50), SamplingParams(max_tokens=10), session="a")

    assert gap(tiny_model(), asyncio.run(cancel())) < 2e-5
    assert engine.stats.n_cached_tokens == 49


def test_release_ends_what_runs_and_what_waits():
    engine = make_engine()

    async def release():
        calls = [
            asyncio.create_task(engine.generate(prompt_of(20), SamplingParams(max_tokens=200), session="a"))
            for _ in range(2)
        ]
        other = asyncio.create_task(engine.generate(prompt_of(20), SamplingParams(max_tokens=20), session="b"))
        await steps(8)
        await engine.release("a")
        await engine.release("a")
        await engine.release("never heard of")
        return *(await asyncio.gather(*calls)), await other

    running, waiting, other = asyncio.run(release())
    assert (running.finish, waiting.finish, other.finish) == (Finish.ABORT, Finish.ABORT, Finish.LENGTH)
    assert 0 < len(running.token_ids) < 20
    assert waiting.token_ids == ()
    assert max(gap(tiny_model(), g) for g in (running, other)) < 2e-5


def change(model, seed=5):
    """An optimiser's step, so to speak: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_load_forgets_what_the_old_weights_computed():
    model = tiny_model()
    engine = make_engine(model)

    async def two_versions():
        first = await engine.generate(prompt_of(50), SamplingParams(max_tokens=5), session="a")
        change(model)
        await engine.load(PolicyWeights(1, fingerprint(model)))
        second = await engine.generate(Prompt((*first.full_ids, 1)), SamplingParams(max_tokens=20), session="a")
        return first, second

    first, second = asyncio.run(two_versions())
    assert (first.policy_version, second.policy_version, engine.policy_version) == (0, 1, 1)
    assert engine.policy_fingerprint == fingerprint(model)
    assert gap(tiny_model(), first) < 2e-5
    changed = tiny_model()
    change(changed)
    assert gap(changed, second) < 2e-5
    assert gap(tiny_model(), second) > 0.1


def test_a_generation_across_a_load_goes_on_with_the_new_weights_and_says_the_old_version():
    model = tiny_model()
    engine = make_engine(model)

    async def load_midway():
        task = asyncio.create_task(engine.generate(prompt_of(30), SamplingParams(max_tokens=40), session="a"))
        await steps(12)
        n_old = engine.stats.n_generated_tokens
        change(model)
        await engine.load(PolicyWeights(1, ""))
        return n_old, await task

    n_old, generation = asyncio.run(load_midway())
    assert 0 < n_old < 40
    assert generation.policy_version == 0
    changed = tiny_model()
    change(changed)
    said = torch.tensor(generation.logprobs)
    assert torch.allclose(said[:n_old], plain_logprobs(tiny_model(), generation)[:n_old], atol=2e-5)
    assert torch.allclose(said[n_old:], plain_logprobs(changed, generation)[n_old:], atol=2e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (PolicyWeights(2, ""), "older than those in use"),
        (PolicyWeights(4, "0123456789abcdef"), "not those that were published"),
        (PolicyWeights(4, "", path="somewhere"), "reads no files"),
    ],
)
def test_bad_deliveries_are_refused(weights, message):
    engine = make_engine(version=3)
    with pytest.raises(DeliveryError, match=message):
        asyncio.run(engine.load(weights))
    assert engine.policy_version == 3


def test_a_version_stands_for_one_set_of_parameters():
    model = tiny_model()
    engine = make_engine(model)

    async def deliver_twice():
        await engine.load(PolicyWeights(1, ""))
        await engine.load(PolicyWeights(1, fingerprint(model)))
        change(model)
        with pytest.raises(DeliveryError, match="delivered before"):
            await engine.load(PolicyWeights(1, fingerprint(model)))

    asyncio.run(deliver_twice())


def test_a_model_in_training_mode_is_put_in_eval_mode():
    model = tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    engine = make_engine(model)
    model.train()
    generation = asyncio.run(engine.generate(prompt_of(30), SamplingParams(max_tokens=20)))
    assert not model.training
    assert gap(tiny_model(), generation) < 2e-5


def test_the_model_trains_after_the_engine_used_it():
    model = tiny_model()
    engine = make_engine(model)
    asyncio.run(engine.generate(prompt_of(30), SamplingParams(max_tokens=5)))
    model.train()
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_error_of_the_model_reaches_those_it_concerns():
    model = tiny_model()
    engine = make_engine(model)

    def refuse_13(_, arguments):
        if (arguments[0] == 13).any():
            raise RuntimeError("unlucky")

    model.model.embed_tokens.register_forward_pre_hook(refuse_13)

    async def calls():
        good = Prompt((5, 6, 7))
        with pytest.raises(EngineError, match="RuntimeError: unlucky") as caught:
            await engine.generate(Prompt((1, 13)), SamplingParams(), session="a")
        assert isinstance(caught.value.__cause__, RuntimeError)
        return await engine.generate(good, SamplingParams(max_tokens=3, temperature=0), session="a")

    assert len(asyncio.run(calls()).token_ids) == 3


def test_logits_that_are_not_finite_fail_their_request_only():
    model = tiny_model("qwen2-mha")  # embeddings are not tied, so one token's NaN stays with those who read it
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = torch.nan
    engine = make_engine(model)

    async def calls():
        return await asyncio.gather(
            engine.generate(Prompt((1, 13)), SamplingParams(), session="a"),
            engine.generate(Prompt((5, 6, 7)), SamplingParams(max_tokens=3, temperature=0), session="b"),
            return_exceptions=True,
        )

    broken, fine = asyncio.run(calls())
    assert isinstance(broken, EngineError)
    assert "not finite" in str(broken)
    assert gap(tiny_model("qwen2-mha"), fine) < 2e-5

    async def again():  # in the slot where the NaN was
        return await engine.generate(Prompt((8, 9)), SamplingParams(max_tokens=3, temperature=0), session="a")

    assert gap(tiny_model("qwen2-mha"), asyncio.run(again())) < 2e-5


def test_an_engine_outlives_its_event_loop():
    engine = make_engine()
    first = asyncio.run(engine.generate(prompt_of(30), SamplingParams(max_tokens=5), session="a"))

    async def leave_running():
        task = asyncio.create_task(engine.generate(prompt_of(30), SamplingParams(max_tokens=300), session="b"))
        await steps(5)
        assert not task.done()

    asyncio.run(leave_running())
    again = asyncio.run(engine.generate(prompt_of(30), SamplingParams(max_tokens=5), session="b"))
    assert again.token_ids == first.token_ids


def test_close_fails_what_runs_and_what_comes():
    engine = make_engine()

    async def close():
        task = asyncio.create_task(engine.generate(prompt_of(30), SamplingParams(max_tokens=300)))
        await steps(5)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(prompt_of(30), SamplingParams())
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(close())


def test_a_fingerprint_tells_parameters_apart():
    model = tiny_model()
    known = fingerprint(model)
    assert known == fingerprint(tiny_model())
    assert len(known) == 16
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[7, 7] = torch.nextafter(weight[7, 7], torch.tensor(9.0))  # the smallest change there is
        assert fingerprint(model) != known
        weight[7, 7] = torch.nextafter(weight[7, 7], torch.tensor(-9.0))
        assert fingerprint(model) == known
        weight[[0, 1]] = weight[[1, 0]]
        assert fingerprint(model) != known
    assert fingerprint(tiny_model(seed=1)) != known
    assert fingerprint(tiny_model().bfloat16()) != known
