from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Finish, PolicyWeights, Prompt, SamplingParams
from rlhf.errors import ContextFull, DeliveryError, EngineError
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.scripted import ScriptedEngine, ScriptedReply
from rlhf.inference.seeds import stable_seed
from rlhf.rollout.renderer import Renderer
from tests.rollout.small_world import tokenizer, user

PROMPT = Prompt((1, 2, 3), stop_ids=(9, 8))


def sample(engine, prompt=PROMPT, session="", **params):
    return asyncio.run(engine.generate(prompt, SamplingParams(**params), session))


def test_it_is_an_engine():
    assert isinstance(ScriptedEngine(lambda ids: ids), RolloutEngine)


@pytest.mark.parametrize(
    ("said", "max_tokens", "ids", "finish"),
    [
        ((4, 5), 8, (4, 5, 9), Finish.STOP),  # a stop id is supplied
        ((4, 8, 5), 8, (4, 8), Finish.STOP),  # nothing comes after one
        ((4, 5), 2, (4, 5), Finish.LENGTH),  # no room for it
        ((4, 5, 6), 1, (4,), Finish.LENGTH),
        ((), 8, (9,), Finish.STOP),
    ],
)
def test_stop_ids_and_limits(said, max_tokens, ids, finish):
    got = sample(ScriptedEngine(lambda prompt: said), max_tokens=max_tokens)
    assert (got.token_ids, got.finish, got.prompt) == (ids, finish, PROMPT)
    assert got.logprobs == (0.0,) * len(ids)


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 8), st.integers(4, 12))
def test_whatever_is_said_the_contract_holds(said, max_tokens, max_context):
    got = sample(ScriptedEngine(lambda ids: said, max_context=max_context), max_tokens=max_tokens)
    assert len(got.token_ids) <= min(max_tokens, max_context - 3)
    assert (got.finish is Finish.STOP) == bool(got.token_ids and got.token_ids[-1] in PROMPT.stop_ids)
    assert not any(i in PROMPT.stop_ids for i in got.token_ids[:-1])


def test_text_in_text_out():
    renderer = Renderer(tokenizer())
    seen = []
    engine = ScriptedEngine(lambda text: seen.append(text) or "go north", tokenizer=tokenizer())
    got = sample(engine, renderer.prompt([user("Room 0.")]))
    assert seen == ["<|im_start|>user\nRoom 0.<|im_end|>\n<|im_start|>assistant\n"]
    assert renderer.decode(got.token_ids) == "go north"
    assert got.token_ids[-1] == renderer.stop_ids[0]


def test_logprobs_are_those_given():
    got = sample(ScriptedEngine(lambda ids: ScriptedReply((4, 5, 6), (-0.5, -1.0))))
    assert got.logprobs == (-0.5, -1.0, 0.0, 0.0)


def test_one_seed_gives_one_generation_whatever_runs_beside_it():
    engine = ScriptedEngine(lambda ids, rng: [rng.randrange(100, 200) for _ in range(6)], seeded=True)

    async def both():
        calls = (engine.generate(PROMPT, SamplingParams(seed=seed)) for seed in (1, 2, 1))
        return [g.token_ids for g in await asyncio.gather(*calls)]

    one, two, again = asyncio.run(both())
    assert one == again == sample(engine, seed=1).token_ids
    assert one != two


def test_failures_are_engine_errors():
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        sample(ScriptedEngine(lambda ids: 1 // 0))
    with pytest.raises(EngineError, match="no tokenizer"):
        sample(ScriptedEngine(lambda ids: "text"))
    with pytest.raises(ContextFull, match="no room"):
        sample(ScriptedEngine(lambda ids: (4,), max_context=3))
    engine = ScriptedEngine(lambda ids: (4,), fails_on={1})
    sample(engine)
    with pytest.raises(EngineError, match="scripted to fail"):
        sample(engine)
    assert sample(engine).token_ids == (4, 9)
    assert engine.n_calls == 3


def test_versions_go_forward_only():
    engine = ScriptedEngine(lambda ids: (4,))
    assert (engine.policy_version, sample(engine).policy_version) == (0, 0)
    asyncio.run(engine.load(PolicyWeights(3, "abc")))
    assert (engine.policy_version, sample(engine).policy_version) == (3, 3)
    with pytest.raises(DeliveryError, match="older"):
        asyncio.run(engine.load(PolicyWeights(2, "abb")))
    assert [w.version for w in engine.loaded] == [3]


def test_release_ends_what_a_session_still_waits_for():
    engine = ScriptedEngine(lambda ids: (4,), latency_s=60)

    async def run():
        call = asyncio.create_task(engine.generate(PROMPT, SamplingParams(), "a"))
        await asyncio.sleep(0.01)
        assert set(engine.sessions) == {"a"}
        await engine.release("a")
        await engine.release("unknown")
        return await call

    begun = time.monotonic()
    assert asyncio.run(run()).finish is Finish.ABORT
    assert time.monotonic() - begun < 30
    assert not engine.sessions


def test_a_closed_engine_says_so():
    engine = ScriptedEngine(lambda ids: (4,))
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        sample(engine)


def test_seeds_are_stable_and_tell_their_parts_apart():
    # blake2b-8 of the parts, each as its length in 8 bytes and its kind letter with its text, without the last bit:
    # int.from_bytes(blake2b(b"\0\0\0\0\0\0\0\2i1" + b"\0\0\0\0\0\0\0\2sa", digest_size=8).digest(), "big") >> 1
    assert stable_seed(1, "a") == 422288155969401730
    parts = [("ab", "c"), ("a", "bc"), (1,), ("1",), (1, 2), (2, 1), (), ("",), (12,), (-1,)]
    assert len({stable_seed(*p) for p in parts}) == len(parts)
    assert all(0 <= stable_seed(*p) < 2**63 for p in parts)
