"""Tensors through a piece of memory: they arrive to the bit, whatever their number format, shape and number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer import (
    RemoteReceiver,
    SharedMemoryReceiver,
    SharedMemorySender,
    Slice,
    memory_folder,
    token_digest,
    write_token,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]

Named = list[tuple[str, torch.Tensor]]


@pytest.fixture
def folder() -> Iterator[Path]:
    found = memory_folder()
    yield found
    for path in found.iterdir():
        path.unlink()
    found.rmdir()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def send(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int, **how: object) -> tuple[Named, int]:
    """What arrives, and in how many buffers; sender and receiver must agree on the digest."""
    sender, receiver = SharedMemorySender(folder / "weights", max_bytes), SharedMemoryReceiver(folder / "weights")
    sent, received, found, n_buffers = Digest(), Digest(), [], 0
    for slices in sender.fill(tensors, sent, **how):  # type: ignore[arg-type]
        n_buffers += 1
        for name, tensor in receiver.read(slices):
            received.add(name, tensor)
            found.append((name, tensor))
    assert sent.hexdigest() == received.hexdigest()
    receiver.close()
    sender.close()
    return found, n_buffers


def tensor_of(dtype: torch.dtype, shape: Iterable[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    n_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    # Any bits at all, NaN and infinity among them.
    return torch.randint(0, 256, (n_bytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), max_size=12),
    max_bytes=st.integers(1, 2000),
)
@settings(max_examples=60)
def test_whatever_is_sent_arrives_in_order_and_to_the_bit(kinds, max_bytes):
    tensors = [(f"layer.{i}", tensor_of(dtype, shape, i)) for i, (dtype, shape) in enumerate(kinds)]
    folder = memory_folder()
    try:
        found, n_buffers = send(folder, tensors, max_bytes)
    finally:
        folder.rmdir()  # closing has removed the file
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(a.dtype == b.dtype and a.shape == b.shape for (_, a), (_, b) in zip(found, tensors, strict=True))
    assert [bits(a) for _, a in found] == [bits(b) for _, b in tensors]
    assert n_buffers <= max(1, len(tensors)) and (n_buffers > 0) == bool(tensors)


def test_a_buffer_holds_what_fits_and_a_larger_tensor_gets_one_of_its_own(folder):
    # 40 floats are 160 bytes and begin at multiples of 64: places 0, 192, 384 end at 544; the fourth would at 736.
    small = [(f"s{i}", torch.full((40,), float(i))) for i in range(4)]
    large = ("large", torch.arange(1000.0))
    found, n_buffers = send(folder, [*small, large, ("last", torch.ones(1))], max_bytes=600)
    assert n_buffers == 4  # three small ones; the fourth; the large one; the last
    assert torch.equal(dict(found)["large"], torch.arange(1000.0)) and torch.equal(dict(found)["s3"], small[3][1])


def test_the_buffer_grows_as_far_as_it_must(folder):
    sender, receiver = SharedMemorySender(folder / "weights", 10**6), SharedMemoryReceiver(folder / "weights")
    for n in (10, 10_000, 100, 200_000, 1):  # floats; the last two but one lie beyond what was mapped before
        value = torch.arange(float(n))
        (slices,) = sender.fill([("x", value)], Digest())
        ((_, found),) = receiver.read(slices)
        assert torch.equal(found, value)
    assert (folder / "weights").stat().st_size <= 10**6
    assert (folder / "weights").stat().st_mode & 0o777 == 0o600
    receiver.close()
    sender.close()
    assert not (folder / "weights").exists()


def test_floats_are_sent_in_the_engines_number_format_and_the_digest_is_of_that(folder):
    tensors = [("w", torch.randn(5, 7)), ("n", torch.arange(4))]
    found, _ = send(folder, tensors, 1000, dtype=torch.bfloat16)
    assert torch.equal(found[0][1], tensors[0][1].bfloat16()) and torch.equal(found[1][1], tensors[1][1])


def test_views_that_do_not_lie_in_one_piece_arrive_as_they_look(folder):
    square = torch.arange(36.0).view(6, 6)
    views = {"t": square.t(), "strided": square[::2, 1::2], "row": square[3], "grad": square.clone().requires_grad_()}
    found, _ = send(folder, views.items(), 10_000)
    assert all(torch.equal(value, views[name]) for name, value in found)


def test_a_value_may_change_once_the_next_is_drawn(folder):
    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(8)  # as a gathered parameter whose memory is used again
        for i in range(5):
            yield f"p{i}", buffer.fill_(i)

    found, _ = send(folder, walk(), 10_000)
    assert [value.tolist() for _, value in found] == [[float(i)] * 8 for i in range(5)]


def test_what_was_read_outlives_the_buffer(folder):
    sender, receiver = SharedMemorySender(folder / "weights", 1000), SharedMemoryReceiver(folder / "weights")
    (slices,) = sender.fill([("x", torch.ones(8))], Digest())
    ((_, found),) = receiver.read(slices)
    list(sender.fill([("x", torch.zeros(8))], Digest()))
    receiver.close()
    sender.close()
    assert found.tolist() == [1.0] * 8


def test_a_changed_bit_changes_the_digest(folder):
    sender, receiver = SharedMemorySender(folder / "weights", 1000), SharedMemoryReceiver(folder / "weights")
    sent = Digest()
    (slices,) = sender.fill([("x", torch.randn(50))], sent)
    with (folder / "weights").open("r+b") as file:
        file.seek(slices[0].offset + 101)
        byte = file.read(1)[0]
        file.seek(slices[0].offset + 101)
        file.write(bytes([byte ^ 16]))
    received = Digest()
    for name, tensor in receiver.read(slices):
        received.add(name, tensor)
    assert received.hexdigest() != sent.hexdigest()
    receiver.close()
    sender.close()


def test_another_process_reads_it(folder):
    sender = SharedMemorySender(folder / "weights", 1000)
    (slices,) = sender.fill([("x", torch.arange(6.0).bfloat16().view(2, 3))], Digest())
    program = (
        "from pathlib import Path\nfrom rlhf.inference.transfer import SharedMemoryReceiver, Slice\nimport sys\n"
        f"print(list(SharedMemoryReceiver(Path(sys.argv[1])).read([{slices[0]!r}]))[0][1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder / "weights")], capture_output=True, text=True)
    assert done.stdout.strip() == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]", done.stderr
    sender.close()


# --- to a receiver that does not see the file -----------------------------------------------------------------------


@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), max_size=12),
    max_bytes=st.integers(1, 2000),
    piece=st.integers(1, 700),
)
@settings(max_examples=60)
def test_what_is_sent_in_pieces_arrives_in_order_and_to_the_bit(kinds, max_bytes, piece):
    tensors = [(f"layer.{i}", tensor_of(dtype, shape, i)) for i, (dtype, shape) in enumerate(kinds)]
    folder = memory_folder()
    sender, copy, sent, received, found = (
        SharedMemorySender(folder / "weights", max_bytes),
        RemoteReceiver(),
        Digest(),
        Digest(),
        [],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.inference.transfer.PIECE_BYTES", piece)
        for slices in sender.fill(tensors, sent):
            for place, data in sender.pieces(slices):
                assert 0 < len(data) <= piece  # no message is larger, however large a tensor is
                copy.write(place, data)
            for name, tensor in copy.read(slices):
                received.add(name, tensor)
                found.append((name, tensor))
    sender.close()
    copy.close()
    folder.rmdir()
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert [bits(a) for _, a in found] == [bits(b) for _, b in tensors]
    assert sent.hexdigest() == received.hexdigest()


def test_a_copy_is_no_larger_than_the_buffer_and_what_was_read_outlives_it(folder):
    sender, copy, kept = SharedMemorySender(folder / "weights", 400), RemoteReceiver(), []
    sizes = []
    for slices in sender.fill([(f"p{i}", torch.full((50,), float(i))) for i in range(9)], Digest()):
        for place, data in sender.pieces(slices):
            copy.write(place, data)
        kept += [value for _, value in copy.read(slices)]
        sizes.append(len(copy._memory))
    assert max(sizes) <= 400 and len(sizes) == 9  # 200 bytes each, and the second would begin at 256
    copy.close()
    assert [value.tolist() for value in kept] == [[float(i)] * 50 for i in range(9)]
    sender.close()


def test_a_piece_that_is_missing_is_an_error(folder):
    sender, copy = SharedMemorySender(folder / "weights", 1000), RemoteReceiver()
    (slices,) = sender.fill([("x", torch.ones(50))], Digest())
    with pytest.raises(ValueError, match="x has not arrived"):
        list(copy.read(slices))
    with pytest.raises(ValueError, match="bytes 0 to 100 of the buffer have not arrived"):
        copy.write(100, b"late")
    copy.write(0, bytes(199))
    with pytest.raises(ValueError, match="x has not arrived"):
        list(copy.read(slices))
    sender.close()


def test_a_token_is_known_to_whoever_sees_the_file_and_to_nobody_else(folder):
    mine, other = write_token(folder / "token"), write_token(folder / "other")
    assert token_digest(folder / "token") == mine != other
    assert token_digest(folder / "none") == token_digest(folder) == ""
    (folder / "token").write_text("0" * 32)
    assert token_digest(folder / "token") not in ("", mine)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_no_fatal_signal(folder):
    # A limit on the size of files stands for a disk without room: both refuse what the buffer asks for.
    program = (
        "import resource, signal, sys, torch\nfrom pathlib import Path\n"
        "from rlhf.inference.fingerprint import Digest\nfrom rlhf.inference.transfer import SharedMemorySender\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sender = SharedMemorySender(Path(sys.argv[1]), 10**6)\n"
        "list(sender.fill([('small', torch.ones(100))], Digest()))\n"
        "try:\n    list(sender.fill([('large', torch.ones(100_000))], Digest()))\n"
        "except OSError as error:\n    print('OSError', error.errno)\n"
        "(slices,) = sender.fill([('small', torch.ones(3))], Digest())\nprint(slices[0].n_bytes)\nsender.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder / "weights")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "OSError" and done.stdout.split()[-1] == "12"


def test_a_file_that_exists_is_not_written_over(folder):
    (folder / "weights").write_text("mine")
    with pytest.raises(FileExistsError):
        SharedMemorySender(folder / "weights", 1000)
    assert (folder / "weights").read_text() == "mine"


def test_a_sender_that_is_gone_is_an_error(folder):
    with pytest.raises(OSError, match="weights"):
        list(SharedMemoryReceiver(folder / "weights").read([Slice("x", "float32", (1,), 0, 4)]))


def test_memory_folders_are_new_and_private():
    first, second = memory_folder(), memory_folder()
    assert first != second and first.stat().st_mode & 0o777 == 0o700
    assert os.access("/dev/shm", os.W_OK) is (first.parent == Path("/dev/shm"))
    first.rmdir()
    second.rmdir()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs shared memory")
def test_a_memory_folder_of_a_killed_process_is_removed_and_of_others_stays():
    make = "import os, sys, time; from rlhf.inference.transfer import memory_folder; print(memory_folder(), flush=True)"
    killed, living = (
        subprocess.Popen([sys.executable, "-c", f"{make}; time.sleep(600)"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    folders = [Path(process.stdout.readline().strip()) for process in (killed, living)]
    killed.kill()
    killed.wait()
    own = memory_folder()
    assert [folder.is_dir() for folder in (*folders, own)] == [False, True, True]
    own.rmdir()
    living.kill()
    living.wait()
    memory_folder().rmdir()
    assert not folders[1].exists()
