"""Text of tokens: pieces that are the whole, and the tokenizer that gives them."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from rlhf.evaluation.transcript import load_tokenizer, pieces
from tests.evaluation.synthetic import make_tokenizer

TOKENIZER = make_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=40))
def test_pieces_together_are_the_text(text: str) -> None:
    assert "".join(pieces(TOKENIZER, ids(text))) == text


def test_a_token_that_ends_inside_a_character_shows_its_name() -> None:
    shown = pieces(TOKENIZER, ids("a🙂b"))
    assert (shown[0], shown[-2:]) == ("a", ["🙂", "b"])
    assert len(shown) == 6 and all(shown)  # the emoji is four bytes, a token each


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 2), max_size=30))
def test_any_tokens_are_shown(token_ids: list[int]) -> None:
    shown = pieces(TOKENIZER, token_ids)
    assert len(shown) == len(token_ids) and all(shown)


def test_bytes_that_are_no_text_are_shown_where_the_vocabulary_has_bytes() -> None:
    names = [*(f"<0x{i:02X}>" for i in range(256)), "▁go", "▁north"]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    assert pieces(tokenizer, [256, 257, *"é".encode(), 257]) == ["go", " north", "<0xC3>", "é", " north"]
    shown = pieces(tokenizer, [256, 0xC3, 0x2F, 0xFF, 257, 257])  # begins a character that does not go on
    assert shown[0] == "go" and shown[-1] == " north" and len(shown) == 6 and all(shown)


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert pieces(None, [5, 7]) == ["[5]", "[7]"]
    assert pieces(TOKENIZER, [10_000_000]) == ["[10000000]"]


def test_the_newest_tokenizer_is_taken(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert load_tokenizer(tmp_path) is None
    make_tokenizer().save(str(tmp_path / "checkpoints" / "9" / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found is not None and found.decode(list(ids("take coin"))) == "take coin"


def test_checkpoints_that_come_and_go_are_no_fault(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    over, text = threading.Event(), (tmp_path / "tokenizer.json").read_text()

    def prune() -> None:
        while not over.is_set():
            for number in range(40):
                (tmp_path / "checkpoints" / str(number) / "policy").mkdir(parents=True)
                (tmp_path / "checkpoints" / str(number) / "policy" / "tokenizer.json").write_text(text)
            shutil.rmtree(tmp_path / "checkpoints")

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        assert all(load_tokenizer(tmp_path) is not None for _ in range(300))
    finally:
        over.set()
        thread.join()
