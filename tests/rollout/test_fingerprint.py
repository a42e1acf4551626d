"""A digest of parameters: the same for the same bits on any path, another for anything that can go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.inference import fingerprint as subject
from rlhf.inference.fingerprint import Digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64, torch.bool]

#: More than a row of words, more than a row of sums of rows, and what is not a multiple of anything.
SIZES = [0, 1, 2, 3, 5, 8191, 8192, 8193, 16385, 100_003]


def digest_of(*tensors: torch.Tensor) -> str:
    found = Digest()
    for number, tensor in enumerate(tensors):
        found.add(f"p{number}", tensor)
    return found.hexdigest()


def drawn(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * 50).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as bytes."""
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_that_of_the_values_wherever_they_lie(size: int, dtype: torch.dtype) -> None:
    tensor = drawn(size, dtype)
    shifted = torch.cat([tensor[:1], tensor])[1:] if size else tensor  # begins in the middle of a word
    spread = torch.stack([tensor, tensor], 1)[:, 0]  # every other element of its memory
    assert digest_of(tensor) == digest_of(shifted) == digest_of(spread) == digest_of(tensor.clone())
    assert len(digest_of(tensor)) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 8193, 100_003])
def test_the_way_of_a_gpu_gives_what_the_way_of_a_cpu_gives(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = drawn(size, dtype)
    words = subject._words(tensor)
    monkeypatch.setattr(subject, "_ROWS_AT_ONCE", 2)

    class Elsewhere(torch.Tensor):
        """A tensor whose device is not called a CPU."""

        @property
        def device(self) -> Any:  # type: ignore[override]
            return torch.device("cuda")

    monkeypatch.setitem(subject._ON_DEVICES, torch.device("cuda"), torch.from_numpy(subject._factors()))
    for level in range(2):
        there = subject._row_sums(words.as_subclass(Elsewhere), level)
        assert torch.equal(there.as_subclass(torch.Tensor), subject._row_sums(words, level))


@settings(max_examples=200)
@given(st.sampled_from(DTYPES[:5]), st.sampled_from([7, 64, 9000, 40_001]), st.integers(0, 2**31), st.data())
def test_one_changed_bit_shows(dtype: torch.dtype, size: int, seed: int, data: st.DataObject) -> None:
    tensor = drawn(size, dtype, seed)
    before = digest_of(tensor)
    changed = tensor.clone()
    place = data.draw(st.integers(0, changed.nbytes - 1))
    bits(changed)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of(changed) != before


@settings(max_examples=200)
@given(st.sampled_from(DTYPES[:3]), st.sampled_from([64, 9000, 40_001]), st.integers(0, 2**31), st.data())
def test_two_swapped_values_show_wherever_they_are(
    dtype: torch.dtype, size: int, seed: int, data: st.DataObject
) -> None:
    tensor = drawn(size, dtype, seed)
    a, b = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[a], swapped[b] = tensor[b].clone(), tensor[a].clone()
    assert (digest_of(swapped) == digest_of(tensor)) is torch.equal(swapped, tensor)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_values_that_differ_in_their_sign_only_are_told_apart_when_swapped(dtype: torch.dtype) -> None:
    tensor = torch.ones(20_000, dtype=dtype)
    tensor[::2] = -1
    assert digest_of(tensor) != digest_of(-tensor) != digest_of(tensor.sort().values)
    for a, b in ((0, 1), (0, 3), (0, 9001), (2, 19_999)):
        swapped = tensor.clone()
        swapped[a], swapped[b] = tensor[b].clone(), tensor[a].clone()
        assert digest_of(swapped) != digest_of(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_rows_in_another_order_show(dtype: torch.dtype) -> None:
    table = drawn(600 * 40, dtype).view(600, 40)
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(600, generator=generator) for _ in range(50)]
    assert len({digest_of(table), *(digest_of(table[order]) for order in orders)}) == 51
    neighbours = torch.arange(600)
    neighbours[[300, 301]] = neighbours[[301, 300]]
    assert digest_of(table[neighbours]) != digest_of(table) != digest_of(table.flip(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_changes_that_leave_the_sum_as_it_is_show(dtype: torch.dtype) -> None:
    tensor = drawn(30_000, dtype)
    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    for a, b, by in ((0, 1, 1), (5, 29_999, 64), (8191, 8192, 2**7), (3, 16_384 + 3, 1)):
        changed = tensor.clone()
        changed.view(as_integers)[a] += by
        changed.view(as_integers)[b] -= by
        assert int(changed.view(as_integers).sum()) == int(tensor.view(as_integers).sum())
        assert digest_of(changed) != digest_of(tensor)


def test_names_shapes_and_tensors_belong_to_it() -> None:
    a, b = drawn(64, torch.float32, 1), drawn(64, torch.float32, 2)
    found = {
        digest_of(a, b), digest_of(b, a), digest_of(a), digest_of(a.view(8, 8), b), digest_of(a.view(torch.int32), b),
        digest_of(torch.zeros(5)), digest_of(torch.zeros(6)), digest_of(), digest_of(torch.zeros(0)),
    }  # fmt: skip
    assert len(found) == 9
