from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from rlhf.data import Finish, PolicyWeights, Prompt, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.fingerprint import fingerprint
from tests.rollout.tiny_models import gap, make_engine, plain_logprobs, prompt_of, steps, tiny_model


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
        return await engine.generate(prompt_of(50), SamplingParams(max_tokens=10), session="a")

    assert gap(tiny_model(), asyncio.run(cancel())) < 2e-5
    assert engine.stats.n_cached_tokens == 49


def test_release_ends_what_runs_and_what_waits():
    engine = make_engine(max_sessions=3)

    async def release():
        other = asyncio.create_task(engine.generate(prompt_of(20), SamplingParams(max_tokens=20), session="b"))
        calls = [
            asyncio.create_task(engine.generate(prompt_of(20), SamplingParams(max_tokens=200), session="a"))
            for _ in range(3)
        ]
        await steps(8)
        await engine.release("a")
        await engine.release("a")
        await engine.release("never heard of")
        return *(await asyncio.gather(*calls)), await other

    *calls, other = asyncio.run(release())
    assert [g.finish for g in (*calls, other)] == [Finish.ABORT] * 3 + [Finish.LENGTH]
    running, beside, waiting = calls
    assert 0 < len(running.token_ids) < 20 and 0 < len(beside.token_ids) < 20
    assert waiting.token_ids == ()
    assert max(gap(tiny_model(), g) for g in (running, beside, other)) < 2e-5


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
        assert engine.cache_bytes > 0
        await engine.load(PolicyWeights(1, fingerprint(model)))
        assert engine.cache_bytes == 0
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
        (PolicyWeights(4, "0123456789abcdef"), "the engine's parameters differ from the published ones"),
        (PolicyWeights(4, "", parameters=dict), "this engine shares the trainer's parameters and takes no delivery"),
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
