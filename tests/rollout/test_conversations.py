"""Prompts and generations as parts of one array: they say the same as tuples of their own would."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Finish, Generation, Prompt
from rlhf.data.generation import Conversations, calls_of, joined, piece_of
from rlhf.errors import DataError

ids = st.lists(st.integers(0, 3), max_size=4)


def generation(prompt, sampled, logprob=-0.5, **other) -> Generation:
    return Generation(Prompt(tuple(prompt), (9,)), tuple(sampled), (logprob,) * len(sampled), Finish.STOP, 0, **other)


@st.composite
def episodes(draw) -> list[tuple[list[int], list[int]]]:
    """Prompts that extend the last call, go back to an earlier one, or are new; small ids, so that some agree."""
    calls: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 6))):
        begun = draw(st.sampled_from([[1], *([*p, *s] for p, s in calls), *(p for p, _ in calls)]))
        calls.append(([*begun, *draw(ids)], draw(ids)))
    return calls


def through_views(kept: list[Generation]) -> list[Generation]:
    """Generations whose arrays are views of another's memory, as those of another process are."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(kept, protocol=5, buffer_callback=arrays.append)
    return pickle.loads(data, buffers=[memoryview(bytes(a.raw())) for a in arrays])


@given(episodes())
def test_what_is_kept_says_what_was_given(calls):
    conversations, given_ = Conversations(), [generation(*call) for call in calls]
    kept = [conversations.keep(g, role="plan", opponent="step 2") for g in given_]
    for g, k, (prompt, sampled) in zip(given_, kept, calls, strict=True):
        assert k == replace(g, role="plan", opponent="step 2") and hash(k) == hash(
            replace(g, role="plan", opponent="step 2")
        )
        assert k.prompt.token_ids == tuple(prompt) and k.token_ids == tuple(sampled)
        assert k.full_ids == tuple(k.all_ids) == (*prompt, *sampled) and k.length == len(k.full_ids)
        assert k.logprobs == tuple(k.logps) == g.logprobs
        assert k.continued().token_ids == k.full_ids
        for other in kept:
            assert k.prompt.extends(other) == (k.prompt.token_ids[: other.length] == other.full_ids)
            read = other.prompt.token_ids
            assert k.prompt.begins_like(other.prompt) == (k.prompt.token_ids[: len(read)] == read)
    assert pickle.loads(pickle.dumps(kept)) == copy.deepcopy(kept) == kept
    assert pickle.loads(pickle.dumps(kept, protocol=5)) == kept
    viewed = through_views(kept)
    assert viewed == kept == pickle.loads(pickle.dumps(viewed)) == through_views(viewed)
    for k, v in zip(kept, viewed, strict=True):
        assert v.continued() == k.continued() and v.all_ids.tolist() == k.all_ids.tolist() and hash(v) == hash(k)
        assert [v.prompt.extends(other) for other in viewed] == [k.prompt.extends(other) for other in kept]
        assert Conversations().keep(v, role="", opponent="") == Conversations().keep(k, role="", opponent="")


def test_a_conversation_of_many_turns_costs_what_each_turn_adds():
    conversations, context, kept = Conversations(), [1, 2, 3], []
    for turn in range(50):
        context += [turn] * 10
        kept.append(conversations.keep(generation(context, [turn] * 10), role="", opponent=""))
        context += [turn] * 10
    # 1,003 ids of four bytes; whole prompts would be 25,650.
    assert len({id(g._buffer) for g in kept} | {id(g.prompt._buffer) for g in kept}) == 1
    assert len(kept[0]._buffer) == 1003
    assert len(pickle.dumps(kept)) < 4 * 1003 + 50 * 200


def test_a_numpy_array_of_ids_stays_as_it_is_while_the_conversation_grows():
    conversations = Conversations()
    first = conversations.keep(generation([1, 2], [3]), role="", opponent="")
    seen = first.all_ids
    second = conversations.keep(generation([1, 2, 3, 4], [5]), role="", opponent="")
    assert seen.tolist() == [1, 2, 3] and second.all_ids.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 7


def test_pieces_of_a_kept_call_join_to_it():
    kept = Conversations().keep(generation([1, 2], [3, 4, 5], logprob=-0.25), role="", opponent="")
    pieces = [piece_of(kept, 0, 2), piece_of(kept, 2, 3)]
    assert pieces[1].prompt.token_ids == (1, 2, 3, 4) and pieces[1].token_ids == (5,)
    assert calls_of(pieces) == [tuple(pieces)] and joined(pieces) == kept


@pytest.mark.parametrize("ids", [(2**31 - 1,), (2**40, 1), (2**63,)])
def test_ids_of_any_size_come_back(ids):
    kept = Conversations().keep(generation([1], ids), role="", opponent="")
    assert kept.token_ids == ids and kept.ids.tolist() == list(ids) and Prompt(ids).token_ids == ids


@pytest.mark.parametrize("logprob", [-0.5, -0.1, -1e300, 0.0, 5e-5])
def test_log_probs_come_back_to_the_bit(logprob):
    made = generation([1], [2, 3], logprob=logprob)
    assert made.logprobs == (logprob, logprob) == tuple(made.logps.tolist())
    exact = float(np.float32(logprob)) == logprob
    assert made.logps.dtype == (np.float32 if exact else np.float64)


def test_fields_are_those_of_a_frozen_dataclass():
    made = generation([1], [2], role="plan")
    assert asdict(made)["prompt"] == {"token_ids": (1,), "stop_ids": (9,), "adapter": ""}
    assert replace(made, token_ids=(4,)).full_ids == (1, 4) and replace(made.prompt, adapter="a").token_ids == (1,)
    assert repr(made.prompt) == "Prompt(token_ids=(1,), stop_ids=(9,), adapter='')"
    with pytest.raises(FrozenInstanceError):
        made.role = ""
    with pytest.raises(FrozenInstanceError):
        made.prompt.token_ids = (3,)
    assert made != made.prompt and made.prompt != (1,)


def test_ids_that_are_no_whole_numbers_are_refused():
    with pytest.raises(DataError, match="whole numbers"):
        Prompt((1.5,))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="whole numbers"):
        generation([1], ["a"])
