"""One program after another: how it ends is told apart, and nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rewards.code.sandboxed_reward import sandbox_record
from rewards.code.unit_tests import UnitTests
from rewards.sandbox.level import Isolation, Level
from rewards.sandbox.probe import ProbeResult, probe_isolation
from rewards.sandbox.run import Bounds, ExitReason, Finished, SandboxError, run, run_blocking
from rlhf.errors import RecipeError, RewardError
from tests.sandbox.attacks import in_command_lines, system_python

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = Bounds(cpu_s=2.0, wall_s=10.0, memory_mb=128, max_processes=8, file_mb=2, output_kb=16)


@pytest.fixture(params=probe_isolation().isolations, ids=lambda isolation: str(isolation.level))
def isolation(request: pytest.FixtureRequest) -> Isolation:
    found: Isolation = request.param
    return found


def do(
    code: str, isolation: Isolation | None = None, bounds: Bounds = SMALL, stdin: bytes = b"", **files: bytes
) -> Finished:
    return run_blocking(("python", "main.py"), stdin, {"main.py": code.encode(), **files}, bounds, isolation)


def test_a_program_reads_writes_and_has_its_files(isolation: Isolation) -> None:
    code = "import sys\nprint(sys.stdin.read() + open('deep/data.txt').read())\nprint('so', file=sys.stderr)\n"
    finished = do(code, isolation, stdin="ä\n".encode(), **{"deep/data.txt": "\x00ß".encode()})
    assert (finished.ending, finished.code, finished.level) == (ExitReason.OK, 0, isolation.level)
    assert finished.stdout.decode() == "ä\n\x00ß\n" and finished.stderr == b"so\n"
    assert finished.cpu_s > 0 and 0 < finished.wall_s < 10 and finished.memory_bytes > 1 << 20


@pytest.mark.parametrize(
    ("code", "ending", "exit_code"),
    [
        ("raise SystemExit(7)", ExitReason.WRONG_EXIT, 7),
        ("1 / 0", ExitReason.WRONG_EXIT, 1),
        ("import os; os._exit(0)", ExitReason.OK, 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ExitReason.KILLED, -11),
        ("import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nopen('x', 'wb').write(bytes(3 << 20))",
         ExitReason.FILE_LIMIT, None),
        ("def f(): f()\nf()", ExitReason.WRONG_EXIT, 1),
        ("import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, args=(0.3,)).start()",
         ExitReason.PROCESS_LIMIT, None),
        ("x = bytearray(1 << 30)", ExitReason.MEMORY_LIMIT, None),
    ],
)  # fmt: skip
def test_an_end_is_told_from_another(code: str, ending: ExitReason, exit_code: int | None) -> None:
    finished = do(code)
    assert (finished.ending, finished.code) == (ending, exit_code), finished


def test_a_program_that_multiplies_is_ended_or_refused(isolation: Isolation) -> None:
    # Whichever comes first: who watches sees too many, or the kernel refuses one more and the program fails by itself.
    finished = do("import os\nwhile True: os.fork()", isolation)
    assert finished.ending is ExitReason.PROCESS_LIMIT or (finished.ending, finished.code) == (
        ExitReason.WRONG_EXIT,
        1,
    ), finished


def test_each_run_has_a_fresh_folder(isolation: Isolation) -> None:
    code = "import os\nprint(sorted(os.listdir('.')))\nopen('left', 'w').write('left')\n"
    assert [do(code, isolation).stdout for _ in range(2)] == [b"['main.py']\n"] * 2


def test_a_program_gets_one_verdict_whatever_the_hash_seed(isolation: Isolation) -> None:
    code = "print(set('abcdefghijkl'))"
    assert len({do(code, isolation).stdout for _ in range(3)}) == 1


def test_what_the_environment_holds_is_ours(isolation: Isolation) -> None:
    finished = do("import os\nprint(sorted(os.environ))", isolation)
    assert finished.stdout.split() == str(sorted(["HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
                                                  "TMPDIR"])).encode().split()  # fmt: skip


def test_a_program_inherits_its_three_streams_and_no_more(isolation: Isolation) -> None:
    code = """
import os
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print([fd for fd in range(1024) if is_open(fd)])
"""
    assert do(code, isolation).stdout == b"[0, 1, 2]\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_a_file_that_leads_out_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(RewardError, match="a file of a program must be inside its folder"):
        run_blocking(("python", "main.py"), b"", {path: b""}, SMALL)


def test_a_program_that_is_not_there_is_no_verdict(isolation: Isolation) -> None:
    with pytest.raises(SandboxError, match="could not be run"):
        run_blocking(("/no/such/program",), b"", {}, SMALL, isolation)


def test_an_interpreter_that_is_not_there_is_no_verdict(isolation: Isolation) -> None:
    with pytest.raises(SandboxError, match="could not be started"):
        do("print()", replace(isolation, python="/no/such/python"))


def left_over() -> tuple[set[int], int, set[str]]:
    here = psutil.Process()
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rlhf-sandbox-")}
    return {child.pid for child in here.children(recursive=True)}, here.num_fds(), folders


@pytest.mark.parametrize(
    "code",
    ["print(1)", "import os\nfor _ in range(3): os.fork()", "import time\ntime.sleep(9)", "print('x' * 10**6)"],
)
def test_nothing_is_left_over(isolation: Isolation, code: str) -> None:
    bounds = replace(SMALL, wall_s=0.5)
    do("print()", isolation, bounds)  # what is loaded once is loaded now
    before = left_over()
    do(code, isolation, bounds)
    assert left_over() == before


def test_many_run_at_a_time_and_no_more_than_there_are_cores() -> None:
    others = set(psutil.Process().children())

    async def all_of_them() -> list[Finished]:
        files = {"main.py": b"import time\nprint(int(input()) ** 2)\ntime.sleep(0.2)\n"}
        runs = [run(("python", "main.py"), stdin=f"{i}\n".encode(), files=files, bounds=SMALL) for i in range(8)]
        task = asyncio.gather(*runs)
        most = 0
        while not task.done():
            await asyncio.sleep(0.02)
            most = max(most, len(set(psutil.Process().children()) - others))
        assert 0 < most <= len(os.sched_getaffinity(0))
        return await task

    assert [finished.stdout for finished in asyncio.run(all_of_them())] == [b"%d\n" % i**2 for i in range(8)]


def test_who_no_longer_waits_ends_the_program() -> None:
    token = uuid.uuid4().hex

    async def give_up() -> None:
        files = {"main.py": b"import time\ntime.sleep(60)\n"}
        task = asyncio.create_task(run(("python", "main.py", token), files=files, bounds=replace(SMALL, wall_s=60.0)))
        while not in_command_lines(token):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    until_gone(token)


def test_who_ends_the_process_that_watches_has_ended_the_program() -> None:
    """An ordinary user's program at `rlimits` is the same user as that process; its end is no failure of a reward."""
    token, found = uuid.uuid4().hex, list[Finished]()
    thread = threading.Thread(target=lambda: found.append(do(f"import time\ntime.sleep(3)  # {token}")))
    others = set(psutil.Process().children())
    thread.start()
    while not (wardens := set(psutil.Process().children()) - others) or not next(iter(wardens)).children():
        time.sleep(0.02)
    next(iter(wardens)).kill()
    thread.join()
    assert [(one.ending, one.ok) for one in found] == [(ExitReason.KILLED, False)]


def test_a_program_does_not_outlive_who_began_it(isolation: Isolation) -> None:
    token = uuid.uuid4().hex
    code = f"""
from rewards.sandbox.level import Level, Isolation
from rewards.sandbox.run import Bounds, run_blocking
level = Level({isolation.level.value})
isolation = Isolation(level, {isolation.python!r}, {isolation.visible!r}, {isolation.bubblewrap!r})
files = {{"main.py": b"import time; time.sleep(60)"}}
run_blocking(("python", "main.py", {token!r}), b"", files, Bounds(wall_s=60.0), isolation)
"""
    before = left_over()[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        deadline = time.monotonic() + 20
        while not (is_there := in_command_lines(f"main.py\0{token}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
    assert is_there
    until_gone(token)
    deadline = time.monotonic() + 10
    while left_over()[2] - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left_over()[2] - before


def until_gone(token: str) -> None:
    deadline = time.monotonic() + 10
    while in_command_lines(token) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not in_command_lines(token)


# --- levels ----------------------------------------------------------------------------------------------------------


def test_levels_are_in_order_and_one_is_reached() -> None:
    assert Level.RLIMITS < Level.NAMESPACES < Level.BUBBLEWRAP
    found = probe_isolation()
    levels = [isolation.level for isolation in found.isolations]
    assert levels and levels == sorted(levels, reverse=True) and found.isolation.level is levels[0]
    assert set(levels) | set(found.why_not) == set(Level) and not set(levels) & set(found.why_not)
    assert all(found.why_not.values())
    assert probe_isolation() is found  # tried once


def test_the_record_names_level_and_interpreter() -> None:
    assert sandbox_record({"length": object()}) is None
    record = sandbox_record({"tests": UnitTests(), "length": object()})
    assert record is not None and record["level"] == str(probe_isolation().isolation.level)
    assert json.loads(json.dumps(record)) == record and Path(str(record["python"])).exists()


def test_a_level_out_of_reach_is_refused_with_its_reason() -> None:
    low = ProbeResult(
        (Isolation(Level.RLIMITS, "/usr/bin/python3"),), {Level.NAMESPACES: "forbidden", Level.BUBBLEWRAP: "absent"}
    )
    assert low.at_least(Level.RLIMITS, "here") == low.isolation
    with pytest.raises(RecipeError) as caught:
        low.at_least(Level.NAMESPACES, "rewards.tests.min_level")
    error = caught.value
    assert (error.where, error.expected) == ("rewards.tests.min_level", "namespaces")
    assert error.got == "rlimits (namespaces: forbidden; bubblewrap: absent)"


#: Begins the command in a user namespace of its own, as user 1234, in which no further ones may be made.
WITHOUT_NAMESPACES = """
import ctypes, os, sys
(heard, said), (waited, go) = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(said, b"+")
    os.read(waited, 1)
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
    os.setgroups([])
    os.setresgid(1234, 1234, 1234)
    os.setresuid(1234, 1234, 1234)
    os.execv(sys.executable, [sys.executable, "-S", "-c", sys.argv[1]])
os.read(heard, 1)
for name in ("uid_map", "gid_map"):
    open(f"/proc/{pid}/{name}", "w").write("0 0 65536\\n")
os.write(go, b"+")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
PROBE = """
from rewards.sandbox.level import Level
from rewards.sandbox.probe import probe_isolation
from rlhf.errors import RecipeError
found = probe_isolation()
levels = [str(isolation.level) for isolation in found.isolations]
print(levels, sorted(map(str, found.why_not)), all(found.why_not.values()))
try:
    found.at_least(Level.NAMESPACES, "rewards.tests.min_level")
except RecipeError as error:
    print(error)
"""


def test_a_machine_without_namespaces_is_left_with_limits_and_says_why() -> None:
    python = system_python()
    if os.geteuid() != 0 or python is None or probe_isolation().at(Level.NAMESPACES) is None:
        pytest.skip("to make such a machine takes root, user namespaces and a Python of the system")
    command = [python, "-S", "-c", WITHOUT_NAMESPACES, PROBE]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("['rlimits'] ['bubblewrap', 'namespaces'] True\n"), done.stdout + done.stderr
    assert "rewards.tests.min_level: this machine cannot isolate programs" in done.stdout


@pytest.mark.parametrize("level", Level, ids=str)
def test_a_reward_demands_its_level_of_this_machine(level: Level) -> None:
    reward = UnitTests(min_level=str(level))
    if probe_isolation().isolation.level >= level:
        assert reward.isolation("here") == probe_isolation().isolation
        return
    with pytest.raises(RecipeError, match="this machine cannot"):
        sandbox_record({"tests": reward})
