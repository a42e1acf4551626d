"""What a manager says: read, refused and carried out, and the same in a bank as in a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.stores.contrib.operations import BadOperation, Bank, Operation, parsed, written

REX = Bank(((1, "has a dog, Rex"),), 1)


def read(text: str) -> list[Operation]:
    return parsed(text, max_operations=3, max_chars=30)


def test_a_second_dog_is_an_update_and_not_a_contradiction() -> None:
    # The paper's example: the new fact joins the old one under its id, instead of taking its place.
    said = '{"op": "UPDATE", "id": 1, "text": "has two dogs, Rex and Bo"}'
    assert REX.after(read(said)) == Bank(((1, "has two dogs, Rex and Bo"),), 1)


def test_operations_are_carried_out_in_order_and_no_id_is_given_twice() -> None:
    said = '[{"op": "DELETE", "id": 1}, {"op": "ADD", "text": "a"}, {"op": "NOOP"}]'
    assert REX.after(read(said)) == Bank(((2, "a"),), 2)
    assert REX.after(read('{"op": "noop"}')) == REX.after([]) == REX
    assert Bank().after(read('[{"op": "ADD", "text": "a"}, {"op": "UPDATE", "id": "1", "text": "b"}]')).entries == (
        (1, "b"),
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("remember the dog", "not JSON"),
        ("", "not JSON"),
        ('{"op": "ADD", "text": "cut o', "not JSON"),
        ("[" * 19_000, "not JSON"),
        ("[" * 30_000, "30000 characters; at most 20000"),
        ('"ADD"', 'an object with an "op"'),
        ('{"text": "a"}', 'an object with an "op"'),
        ('{"op": "UPDAT", "id": 1, "text": "a"}', "no operation UPDAT; did you mean 'UPDATE'"),
        ('{"op": "XXXXXX"}', "there are ADD, UPDATE, DELETE, NOOP"),
        ('{"op": "UPDATE", "text": "a"}', 'UPDATE lacks "id"'),
        ('{"op": "ADD"}', 'ADD lacks "text"'),
        ('{"op": "ADD", "text": " "}', "1 to 30 characters"),
        ('{"op": "ADD", "text": 7}', "1 to 30 characters"),
        ('{"op": "ADD", "text": "' + "a" * 31 + '"}', "1 to 30 characters"),
        ('{"op": "DELETE", "id": "one"}', "the id is a whole number"),
        ('{"op": "DELETE", "id": true}', "the id is a whole number"),
        ('[{"op": "NOOP"}, {"op": "NOOP"}, {"op": "NOOP"}, {"op": "NOOP"}]', "4 operations in one reply; at most 3"),
    ],
)
def test_what_is_no_operation_is_told_in_words(said: str, told: str) -> None:
    with pytest.raises(BadOperation) as caught:
        read(said)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"op": "DELETE", "id": 7}', "DELETE: there is no id 7; ids: 1"),
        ('[{"op": "DELETE", "id": 1}, {"op": "UPDATE", "id": 1, "text": "a"}]', "no id 1; ids: none"),
    ],
)
def test_an_id_that_is_not_there_is_refused(said: str, told: str) -> None:
    with pytest.raises(BadOperation) as caught:
        REX.after(read(said))
    assert told in str(caught.value)


OPERATIONS = st.lists(
    st.one_of(
        st.builds(Operation, st.just("ADD"), text=st.sampled_from("abc")),
        st.builds(Operation, st.just("UPDATE"), st.integers(1, 4), st.sampled_from("abc")),
        st.builds(Operation, st.just("DELETE"), st.integers(1, 4)),
        st.just(Operation("NOOP")),
    ),
    min_size=1,
    max_size=3,
)


@given(OPERATIONS, st.booleans())
def test_what_is_written_is_read_back(operations: list[Operation], is_fenced: bool) -> None:
    text = written(operations)
    assert read(f"```json\n{text}\n```" if is_fenced else text) == operations


@given(st.text(max_size=200))
def test_whatever_is_said_it_is_read_or_refused(text: str) -> None:
    try:
        assert all(isinstance(o, Operation) for o in read(text))
    except BadOperation as error:
        assert str(error)


@given(st.lists(OPERATIONS, max_size=6))
def test_a_bank_never_has_an_id_twice_and_a_refused_reply_changes_nothing(replies: list[list[Operation]]) -> None:
    bank = Bank()
    for operations in replies:
        before = bank
        try:
            bank = bank.after(operations)
        except BadOperation:
            assert bank is before
        ids = [number for number, _ in bank.entries]
        assert ids == sorted(set(ids)) and bank.n_given >= max(ids, default=0)
        assert bank.n_given == before.n_given + sum(o.op == "ADD" for o in operations) or bank is before


def test_half_a_character_is_left_out() -> None:
    [operation] = read('{"op": "ADD", "text": "a \\ud83d"}')
    assert operation.text == "a"
