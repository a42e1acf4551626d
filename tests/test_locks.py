"""Locks of folders: one process writes, another hears who, and the dead are followed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlhf import lock_owner, locks
from rlhf.lock_owner import LOCK, STALE_S, Owner
from rlhf.locks import FolderInUse, held

#: Takes the lock of a folder, says so, and waits; `fork` leaves a child that outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from rlhf.locks import held
folder, how = Path(sys.argv[1]), sys.argv[2]
with held(folder, "a test"):
    if how == "fork" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


#: Of processes that import this checkout, wherever they are started.
ENV = {**os.environ, "PYTHONPATH": str(Path(locks.__file__).resolve().parents[1])}


@contextmanager
def holder(folder: Path, how: str = "wait") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `folder`, until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(folder), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)


def other(**changes: object) -> Owner:
    """An owner on another machine."""
    return replace(Owner.here("another test"), host="elsewhere", boot="b00t", pid=1, **changes)


def leave(folder: Path, owner: Owner, silent_s: float = 0.0) -> Path:
    """The lock of an owner that wrote to it so long ago, by the clock of the file system."""
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    at = time.time() - silent_s
    os.utime(path, (at, at))
    return path


def test_a_second_process_is_refused_with_whose_it_is(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(FolderInUse) as refused, held(tmp_path, "a test"):
            pass
        found = locks.owner_of(tmp_path)
    assert f"process {process.pid} on {os.uname().nodename} (a test), since 20" in refused.value.got
    assert f"kill {process.pid}" in refused.value.hint and refused.value.where == str(tmp_path)
    assert found is not None and found.pid == process.pid
    with held(tmp_path, "a test") as lock:  # it is over
        assert lock.notes == [] and (tmp_path / LOCK).is_file()
    assert list(tmp_path.iterdir()) == [] and locks.owner_of(tmp_path) is None


def test_one_process_may_take_it_twice_and_keeps_it_until_it_gave_it_back_twice(tmp_path: Path) -> None:
    with held(tmp_path, "a test") as outer:
        with held(tmp_path / ".." / tmp_path.name, "a test") as inner:
            assert inner is outer
        assert (tmp_path / LOCK).is_file()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("how", ["wait", "fork"])
def test_a_killed_process_is_followed_though_a_child_of_it_lives(tmp_path: Path, how: str) -> None:
    with holder(tmp_path, how) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with held(tmp_path, "a test") as lock:
            [note] = lock.notes
    assert f"taken over from process {process.pid}" in note and "that process is gone" in note


def test_a_stopped_process_is_not_taken_for_dead(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(FolderInUse), held(tmp_path, "a test"):
                pass
        finally:
            process.send_signal(signal.SIGCONT)


def test_a_copy_of_a_held_folder_is_held_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with holder(tmp_path / "run"):
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
        assert locks.owner_of(tmp_path / "run") is not None and locks.owner_of(copy) is None
        with held(copy, "a test"):
            pass


def test_a_number_of_a_process_that_came_again_is_another_process(tmp_path: Path) -> None:
    leave(tmp_path, replace(Owner.here("a test"), pid=os.getppid(), started=1))
    with held(tmp_path, "a test") as lock:
        assert "that process is gone" in lock.notes[0]


def test_an_owner_elsewhere_counts_as_dead_after_long_silence(tmp_path: Path) -> None:
    leave(tmp_path, other(), STALE_S - 20)
    with pytest.raises(FolderInUse) as refused, held(tmp_path, "a test"):
        pass
    assert "process 1 on elsewhere (another test)" in refused.value.got and "beyond 120 s it counts as dead" in str(
        refused.value
    )
    assert "kill" not in refused.value.hint, "its number says nothing here"
    leave(tmp_path, other(), STALE_S + 5)
    with held(tmp_path, "a test") as lock:
        assert "taken over from process 1 on elsewhere" in lock.notes[0] and "nothing was heard" in lock.notes[0]


def test_a_clock_that_is_off_is_said_and_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The owner's clock is an hour behind: by its own time it was silent for long, by that of the file system not.
    leave(tmp_path, other(beat_at=time.time() - 3600))
    with pytest.raises(FolderInUse, match="a clock is off by -36"), held(tmp_path, "a test"):
        pass
    # Our own is ten minutes ahead: the owner would seem dead.
    leave(tmp_path, other())
    now = time.time
    monkeypatch.setattr(lock_owner.time, "time", lambda: now() + 600)
    with pytest.raises(FolderInUse, match="a clock is off by 600 s"), held(tmp_path, "a test"):
        pass
    monkeypatch.undo()
    # What was written in the future says nothing at all.
    path = leave(tmp_path, other(), -300)
    with pytest.raises(FolderInUse, match=f"in the future: if it is gone, remove {path}"), held(tmp_path, "a test"):
        pass


def test_a_share_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "file_system", lambda folder: ("nfs4", True))
    with held(tmp_path, "a test") as lock:
        assert "other machines may write too" in lock.notes[0] and "nfs4" in lock.notes[0]


def test_where_the_kernel_has_no_locks_the_owner_alone_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_flock", lambda file: False)
    with held(tmp_path, "a test") as lock:
        assert len(lock.notes) == 1
    assert list(tmp_path.iterdir()) == []
    with holder(tmp_path) as process, pytest.raises(FolderInUse, match=f"process {process.pid}"):  # noqa: SIM117
        with held(tmp_path, "a test"):
            pass
    leave(tmp_path, other(), STALE_S + 5)
    with held(tmp_path, "a test") as lock:
        assert "taken over" in lock.notes[0]


def test_who_was_taken_for_dead_stops_at_its_next_check(tmp_path: Path) -> None:
    with held(tmp_path, "a test") as lock:
        lock.check()
        leave(tmp_path, other())
        with pytest.raises(FolderInUse, match="it has taken over"):
            locks.check(tmp_path)
    assert (tmp_path / LOCK).is_file(), "it is another's now"


def test_a_lock_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    with held(tmp_path, "a test"):
        (tmp_path / LOCK).unlink()
        locks.check(tmp_path)
        assert (tmp_path / LOCK).is_file()
        found = locks.owner_of(tmp_path)
        assert found is not None and found.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    with held(tmp_path, "a test"):
        first = locks.owner_of(tmp_path)
        deadline = time.monotonic() + 20
        while (now := locks.owner_of(tmp_path)) is None or first is None or now.beat_at == first.beat_at:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert now.since == first.since


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x"}', "\x00" * 40])
def test_a_lock_that_says_nothing_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with held(tmp_path, "a test") as lock:
        assert lock.notes == []


def test_many_processes_at_once_and_one_has_it(tmp_path: Path) -> None:
    leave(
        tmp_path, replace(Owner.here("a test"), pid=os.getppid(), started=1)
    )  # of a dead one, whom all want to follow
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "wait"]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENV}
    processes = [subprocess.Popen(command, **options) for _ in range(6)]  # type: ignore[call-overload]
    time.sleep(0.1)
    done = [p for p in processes if p.stdout.readline() == "held\n"]
    refused = [p for p in processes if p not in done]
    assert len(done) == 1 and all("FolderInUse" in p.communicate(timeout=60)[1] for p in refused)
    done[0].communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
