"""Signals and an engine's processes, with small ones in place of vLLM's; `vllm/test_process.py` has the real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.inference.vllm.process import detached

ROOT = Path(__file__).parents[2]
CHILD = """
import time
from rlhf.inference.vllm.process import detach
detach()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys
from rlhf.inference.vllm.process import detached
with detached() as variables:
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], env=os.environ | variables, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_started_inside_gets_no_signal_until_it_has_left_the_group() -> None:
    sleeps = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
    with detached() as variables:
        child = subprocess.Popen(sleeps, env=os.environ | variables, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            child.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    finally:
        child.kill()
        child.wait()


def test_this_process_still_gets_signals_inside() -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    try:
        with detached():
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 5
            while not found and time.monotonic() < deadline:
                time.sleep(0.01)
            assert found == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_detached_process_has_its_own_group_and_ends_with_who_started_it(number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.getpgid(pid) == pid != parent.pid
    os.killpg(parent.pid, number)
    parent.wait(10)
    deadline = time.monotonic() + 10
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_there(pid)
