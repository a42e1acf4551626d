"""Texts that end a generation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.build.engine import start_engine
from rlhf.data import Finish, Generation, Prompt, SamplingParams
from rlhf.errors import DataError, EngineError
from rlhf.recipe import load
from rlhf.rollout.limits import Limits
from tests import recipe_parts
from tests.rollout.tiny_models import make_engine, prompt_of
from tests.training import tiny

PARAMS = SamplingParams(max_tokens=60, seed=5)


def letters(ids: list[int]) -> str:
    """One or two letters a token: some strings end within a token, some span several."""
    return "".join(chr(97 + i % 7) * (1 + i % 2) for i in ids)


def run(params: SamplingParams, n: int = 1, stop_ids: tuple[int, ...] = ()) -> list[Generation]:
    async def go() -> list[Generation]:
        engine = make_engine(decode=letters)
        prompts = [prompt_of(12, seed, stop_ids) for seed in range(n)]
        try:
            return list(await asyncio.gather(*(engine.generate(p, params) for p in prompts)))
        finally:
            await engine.close()

    return asyncio.run(go())


@pytest.mark.parametrize("strings", [("c",), ("ab",), ("dda", "ee"), ("bbcc", "zzz")])
def test_it_ends_after_the_token_that_completes_a_string(strings: tuple[str, ...]) -> None:
    whole = run(PARAMS, n=8)
    cut = run(replace(PARAMS, stop_strings=strings), n=8)
    n_stopped = 0
    for a, b in zip(whole, cut, strict=True):
        assert b.token_ids == a.token_ids[: len(b.token_ids)], "what is sampled before does not change"
        assert b.logprobs == pytest.approx(a.logprobs[: len(b.token_ids)], abs=1e-6)
        ends = [n for n in range(1, 61) if any(s in letters(list(a.token_ids[:n])) for s in strings)]
        assert len(b.token_ids) == (ends[0] if ends else 60)
        assert b.finish is (Finish.STOP if ends else Finish.LENGTH)
        n_stopped += bool(ends)
    assert n_stopped >= 2 or strings == ("bbcc", "zzz")


def test_a_string_that_ends_with_the_last_token_is_a_stop() -> None:
    [whole] = run(PARAMS)
    n = len(whole.token_ids)
    last = letters(list(whole.token_ids))[-6:]
    [cut] = run(replace(PARAMS, max_tokens=n, stop_strings=(last,)))
    assert cut.finish is Finish.STOP and len(cut.token_ids) <= n


def test_what_the_prompt_says_ends_nothing() -> None:
    assert "a" in letters(list(prompt_of(12, 0).token_ids))
    [found] = run(replace(PARAMS, stop_strings=("a",)))
    assert found.token_ids and "a" in letters(list(found.token_ids[-1:]))


def test_a_control_token_may_be_a_stop_string(tmp_path: Path) -> None:
    policy = tiny.policy()
    eos, recipe = str(policy.tokenizer.eos_token), load(recipe_parts.write(tmp_path))

    async def both() -> list[Generation]:
        engine = await start_engine(recipe, policy)
        params = [replace(PARAMS, max_tokens=200, seed=seed) for seed in range(4)]
        params += [replace(each, stop_strings=(eos,)) for each in params]
        return list(await asyncio.gather(*(engine.generate(Prompt((3, 4, 5)), each) for each in params)))

    found, ends = asyncio.run(both()), policy.tokenizer.eos_token_id
    assert any(ends in whole.token_ids[:-1] for whole in found[:4])
    for whole, cut in zip(found[:4], found[4:], strict=True):
        at = whole.token_ids.index(ends) + 1 if ends in whole.token_ids else whole.n_tokens
        assert cut.token_ids == whole.token_ids[:at]


def test_without_a_tokenizer_strings_are_refused() -> None:
    with pytest.raises(EngineError, match="need a tokenizer"):
        asyncio.run(make_engine().generate(prompt_of(3), replace(PARAMS, stop_strings=("x",))))


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(DataError, match="no empty stop string"):
        SamplingParams(stop_strings=("",))
    with pytest.raises(ValueError, match="at least 1 character"):
        Limits(stop_strings=("",))


def test_limits_pass_them_on() -> None:
    assert Limits(max_tokens=9, stop_strings=("\n",)).sampling(0.5) == SamplingParams(9, 0.5, stop_strings=("\n",))
