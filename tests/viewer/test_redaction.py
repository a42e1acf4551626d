"""Keys are blacked out wherever they are cut."""

from __future__ import annotations

import pytest

from rlhf.errors import UsageError
from rlhf.viewer.redaction import BLACK, Redaction, cut_whole

KEYS = (
    "sk-proj-abcDEF1234567890abcd",
    "hf_abcdefghijklmnopqrst",
    "ghp_abcdefghijklmnopqrst1234",
    "github_pat_11ABCDEFG0abcdefghijkl",
    "AKIAABCDEFGHIJKLMNOP",
    "AIzaSyA1234567890abcdefghijklmnopqrst",
    "xoxb-1234567890-abcdef",
    "gsk_abcdefghij1234567890AB",
    "nvapi-abcdefghij_1234567890",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    "Bearer abcdefghij1234567890",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
)


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_known_forms_are_blacked_out(key: str) -> None:
    assert Redaction().text(f"before {key} after") == f"before {BLACK} after"


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_blacked_out_however_it_is_cut_into_tokens(key: str) -> None:
    text = f"this is said before {key} and this after"
    for size in (1, 2, 3, 7):
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        shown, hidden = Redaction().pieces(cut)
        left = "".join(piece for i, piece in enumerate(shown) if i not in hidden)
        assert not any(key[i : i + size + 3] in left for i in range(len(key) - size - 3))
        assert left.startswith("this is said") and left.endswith(" after")
        assert all(piece == "█" for i, piece in enumerate(shown) if i in hidden)


def test_a_password_in_an_address_is_blacked_out_and_the_rest_stays() -> None:
    assert Redaction().text("see postgres://ann:s3cret@db:5432/runs") == f"see postgres://{BLACK}@db:5432/runs"


@pytest.mark.parametrize(
    "text",
    ["risk-taking is a long-established skill", "task-0001", "hf_short", "go to the key", "at http://host:80/a@b"],
)
def test_ordinary_texts_stay(text: str) -> None:
    assert Redaction().text(text) == text


def test_a_text_is_cut_where_no_key_is() -> None:
    said = "the server says: https://bot:hunter2secret@models.example refused"
    assert [cut_whole(said, n) for n in (30, 40, 100)] == ["the server says: …"] * 2 + [said]
    assert cut_whole(said, 10) == "the server…" and cut_whole("\u77e5" * 9, 5) == "\u77e5" * 5 + "…"
    assert cut_whole("x" * 30_000, 20_000) == "x" * 20_000 + "…"


def test_values_are_redacted_at_every_depth() -> None:
    found = Redaction(["secret [0-9]+"]).values({"secret 1": [{"x": ("a secret 22", 3, None)}]})
    assert found == {BLACK: [{"x": [f"a {BLACK}", 3, None]}]}


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--redact"):
        Redaction(["(open"])
