"""Processes that train together: their shares, what they tell each other, and how long they wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.build.processes import stopped_by_term
from rlhf.data import Finish, Generation, Prompt
from rlhf.errors import RecipeError, TrainingError
from rlhf.mapped_gather import gather_mapped
from rlhf.processes import ProcessError, ProcessGroup, current, in_turn, n_wanted, reasons_in, take_one_gpu
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints.snapshot import Snapshot
from rlhf.training.checkpoints.store import State
from rlhf.training.run import Run
from tests.training.tiny import policy
from tests.training.together import together

COUNTS = st.integers(0, 40)


@given(n=COUNTS, processes=st.integers(1, 9))
def test_shares_are_neighbours_and_differ_by_one_at_most(n: int, processes: int) -> None:
    shares = [range(n)[ProcessGroup(rank, processes).share(n)] for rank in range(processes)]
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_sigterm_is_heard_where_a_timeout_is_just_over() -> None:
    async def stopped() -> None:
        loop = asyncio.get_running_loop()
        with stopped_by_term():
            begun = loop.time()
            while loop.time() < begun + 5:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        # Due in the same round of the loop as the timeout, and after it.
                        loop.call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
                        time.sleep(0.02)
                        await asyncio.sleep(60)
                break
            await asyncio.sleep(1.0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())


@pytest.mark.parametrize(
    ("visible", "local", "n", "left"),
    [("3", "1", "4", ("3", "0")), ("0,1,5", "2", "3", ("5", "0")), ("0,1", "0", "1", ("0,1", "0"))],
)
def test_a_process_takes_one_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str, local: str, n: str, left: tuple[str, str]
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", n)):
        monkeypatch.setenv(name, value)
    for _ in range(2):
        take_one_gpu()
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]) == left


def test_a_lone_process_is_not_told_that_it_has_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    take_one_gpu()
    assert "LOCAL_RANK" not in os.environ, "accelerate would wait for others"


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", "0,1"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="more processes than GPUs"):
        take_one_gpu()


def test_five_things_for_two_processes() -> None:
    assert [ProcessGroup(rank, 2).share(5) for rank in (0, 1)] == [slice(0, 3), slice(3, 5)]


@given(n=COUNTS, processes=st.integers(1, 9))
def test_what_is_dealt_in_turn_comes_back_in_order(n: int, processes: int) -> None:
    # Each process fills up to as many as the first one has, with things that do not count.
    parts = [[*range(rank, n, processes), *[-1] * (-(-n // processes))] for rank in range(processes)]
    assert in_turn(range(n), parts) == list(range(n))


def test_one_process_waits_for_nobody() -> None:
    alone = ProcessGroup()
    assert alone.is_main and alone.gather(3, "numbers") == [3] and alone.from_main(4, "a number") == 4
    assert not alone.agree_to_stop()


def test_only_a_silence_is_another_process(tmp_path: Path) -> None:
    here = ProcessGroup(0, 2, folder=tmp_path)
    with pytest.raises(RuntimeError, match="a shape"), here.comm_errors("an update"):
        raise RuntimeError("a shape does not fit")
    with pytest.raises(TrainingError, match="of its own"), here.comm_errors("an update"):
        raise TrainingError("an error of its own")


def test_a_reason_that_was_left_is_found(tmp_path: Path) -> None:
    ProcessGroup(1, 2, folder=tmp_path).record_failure(TrainingError("no disk", got="nothing"))
    ProcessGroup(0, 2, folder=tmp_path).record_failure(ProcessError("the other one is silent"))
    assert list(reasons_in(tmp_path)) == [1]
    heard = ProcessGroup(0, 2, folder=tmp_path).comm_errors("the rollouts")
    with pytest.raises(ProcessError, match="process 1 has failed: no disk"), heard:
        raise RuntimeError("[gloo] Connection closed by peer")


def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RecipeError, match="WORLD_SIZE"):
        n_wanted()


def shared_tokens(rank: int, folder: Path) -> dict[str, Any]:
    """What comes of a generation of 10,000 tokens that each process gives."""
    ids = range(rank, rank + 10_000)
    own = Generation(Prompt((1,)), ids, array("f", [-1.0]) * 10_000, Finish.STOP, 0)
    sent: list[int] = []
    whole = current().gather(own, "whole")
    gather = ProcessGroup.gather
    ProcessGroup.gather = lambda here, value, what: gather(here, sent.append(len(pickle.dumps(value))) or value, what)  # type: ignore
    try:
        found = gather_mapped(own, "tokens")
    finally:
        ProcessGroup.gather = gather  # type: ignore[method-assign]
    assert found == whole
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder / "absent") if rank else None
    without = gather_mapped(own, "tokens without a file")
    tempfile.tempdir = temporary
    return {
        "ids": [g.ids.tolist() for g in found],
        "is_view": [isinstance(g._buffer.ids, memoryview) for g in found],
        "n_sent": sum(sent),
        "n_sent_whole": len(pickle.dumps(own)),
        "without_file": [g.ids.tolist() for g in without],
    }


def exchange(rank: int, folder: Path) -> Any:
    """What two real processes tell each other; then the second one is late."""
    here = current()
    found: dict[str, Any] = {"ranks": here.gather(rank, "ranks"), "main": here.from_main(rank * 10 + 7, "a number")}
    found |= shared_tokens(rank, folder)
    here.stops = rank == 1
    found["stop"] = here.agree_to_stop()
    begun = time.monotonic()
    if rank == 1:
        while not (folder / "given up").exists():  # else this process would end, and the other hear of that
            time.sleep(0.05)
        return found
    try:
        here.gather(None, "the late one")
    except ProcessError as error:
        found["late"] = (str(error), time.monotonic() - begun)
    (folder / "given up").touch()
    return found


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    yield together(exchange, tmp_path_factory.mktemp("processes"), timeout_s=3.0)


def test_all_get_what_each_gave(heard: list[dict[str, Any]]) -> None:
    for found in heard:
        assert found["ranks"] == [0, 1] and found["main"] == 7 and found["stop"]


def test_token_arrays_are_mapped_and_not_sent(heard: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(heard):
        assert found["ids"] == [list(range(10_000)), list(range(1, 10_001))]
        assert found["is_view"] == [rank != 0, rank != 1]
        assert found["n_sent_whole"] > 80_000 and found["n_sent"] < 2_000


def test_arrays_travel_with_the_objects_where_no_file_can_be_written(heard: list[dict[str, Any]]) -> None:
    for found in heard:
        assert found["without_file"] == [list(range(10_000)), list(range(1, 10_001))]


def test_a_wait_has_an_end(heard: list[dict[str, Any]]) -> None:
    said, seconds = heard[0]["late"]
    assert seconds > 2.5
    assert "did not arrive in time" in said and "trainer.timeout_s" in said and "the late one" in said


def save_twice(rank: int, folder: Path) -> list[Any]:
    """Save a state twice, of which the first is written in the background until the second is asked for."""
    asked, write = folder / "asked", Snapshot.write

    def wait_and_write(*given: Any) -> None:
        while not asked.exists():
            time.sleep(0.01)
        write(*given)

    Snapshot.write = wait_and_write  # type: ignore[method-assign]
    made = policy(n_layers=1)
    lone: Any = SimpleNamespace(marks=dict)
    state = State(0, "policy_gradient", 20, False, 3)
    run = Run(folder, 0, made, lone, lone, lone, lone, lone, lone, lone, state)
    stage = SimpleNamespace(keep_checkpoints=2, checkpoint_in_background=True)
    trainer = SimpleNamespace(optimizer=AdamW().build(made.model.parameters()))
    parts: Any = SimpleNamespace(kept={}, stage=stage, trainer=trainer)
    run.save(parts, in_background=True)
    if rank == 1:
        asked.touch()
    saved = run.save(parts, in_background=True)
    return [(saved / "state.json").is_file(), current().gather((rank, "next"), "what comes next")]


def test_all_agree_whether_a_state_is_saved(tmp_path: Path) -> None:
    assert together(save_twice, tmp_path, timeout_s=20.0) == [[True, [(0, "next"), (1, "next")]]] * 2


def dropped(rank: int, folder: Path) -> torch.Tensor:
    """Places `[64]` that an adapter's dropout drops in a step."""
    lone: Any = SimpleNamespace(marks=dict)
    state = State(0, "policy_gradient", 20, False, 3)
    Run(folder, 0, lone, lone, lone, lone, lone, lone, lone, lone, state).reseed(20)
    return torch.nn.functional.dropout(torch.ones(64), 0.5) == 0


def test_each_process_drops_other_places(tmp_path: Path) -> None:
    first, second = together(dropped, tmp_path)
    assert torch.equal(first, dropped(0, tmp_path)), "the first one those of a lone process"
    assert not torch.equal(first, second)


def test_a_result_that_comes_after_the_stop_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def late() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        asyncio.get_running_loop().call_soon(future.set_result, 1)

    async def stopped(by_signal: bool) -> None:
        with stopped_by_term():
            if by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            late()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)

    asyncio.run(stopped(by_signal=False))
    assert "InvalidStateError" in caplog.text, "without a stop it is one"
    caplog.clear()
    asyncio.run(stopped(by_signal=True))
    assert not caplog.records
