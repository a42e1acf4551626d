"""Supervisor of a tested program: starts it, ends it with all descendants, and reports.

It is started by `rewards.sandbox.run` in an interpreter of its own, with nothing but the standard library:

    python -I -S -c "..." ORDER CONTROL REPORT

where the three are descriptors: the order to read, a pipe whose end means that nobody waits any more, and a pipe for
the one line of JSON that says what became of the program.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import time

from rewards.sandbox import kernel
from rewards.sandbox.enclosure import become, fork, start_in_bubblewrap, start_in_namespaces
from rewards.sandbox.launch import launch

TYPE_CHECKING = False  # without importing typing: this is read anew for every program that is run
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, NoReturn

#: Between two looks at the program.
_LONGEST_PAUSE_S = 0.02
#: Descendants that do not die within this time never will.
_END_S = 10.0
#: Processes of the sandbox itself that the kernel counts with those of the program, at most.
_OWN_PROCESSES = 4
#: Memory that the sandbox itself is seen to have, at most.
_OWN_MEMORY = 48 << 20
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Do what the order says, once."""
    order_file, control, report = (int(text) for text in sys.argv[1:4])
    os.umask(0o022)
    for own in (order_file, control, report):
        os.set_inheritable(own, False)
    with open(order_file, encoding="utf-8", closefd=False) as file:
        order = json.load(file)
    found: dict[str, Any]
    try:
        kernel.adopt_orphans()
        found = _carry_out(order, control)
    except OSError as error:
        found = {"error": str(error)}
    try:
        os.write(report, json.dumps(found).encode())
    except BrokenPipeError:
        return  # nobody waits any more


def _carry_out(order: dict[str, Any], control: int) -> dict[str, Any]:
    user = _stranger(order["level"]) if os.geteuid() == 0 else None
    order["user_processes"] = order["max_processes"] + _OWN_PROCESSES + _counted_already(order["level"], user)
    heard, said = os.pipe()
    before = _own_system_v(order["level"], user)
    begun = time.monotonic()
    try:
        if order["level"] == "rlimits":
            child = _start_limited(order, user, said)
            kernel.hide()  # the program may run as the same user
        elif order["level"] == "namespaces":
            child = start_in_namespaces(order, user, said)
        else:
            child = start_in_bubblewrap(order, user, said)
        os.close(said)
        found = _watch(child, order, control, begun, user)
    finally:
        _end_all()
        if before is not None:
            kernel.remove_system_v(_left_of_system_v(user) - before)
    if found.get("ending") == "cancelled" and order["folder"]:  # who would remove it may have ended
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            os.spawnvp(os.P_WAIT, command[0], [*command, order["folder"]])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["wall_s"], found["cpu_s"] = time.monotonic() - begun, used.ru_utime + used.ru_stime
    found["memory_bytes"] = max(found["memory_bytes"], used.ru_maxrss * 1024)
    return found | _ending(found, _heard(heard), order)


def _start_limited(order: dict[str, Any], user: int | None, status: int) -> int:
    if user is not None:
        os.chown(order["folder"], user, user)

    def steps() -> NoReturn:
        become(user)
        kernel.forbid_new_privileges()
        os.chdir(order["folder"])
        launch(order, status)

    return fork(status, steps)


def _own_system_v(level: str, user: int | None) -> set[tuple[str, int, int]] | None:
    """System V objects present before the program, to remove later ones; None where none can outlive it.

    From `namespaces` on the program has such objects to itself. At `rlimits` root gives it and this process a namespace
    of them. Where that is refused, what the program's user made, whom nobody else is, is removed at the end. A common
    user has other programs too: what a process made in the meantime that has ended is taken for this program's.
    """
    if level != "rlimits":
        return None
    try:
        kernel.unshare(kernel.NEW_IPC)
    except OSError:
        return _left_of_system_v(user) if user is None else set()
    return None


def _left_of_system_v(user: int | None) -> set[tuple[str, int, int]]:
    return kernel.system_v(os.getuid(), orphans=True) if user is None else kernel.system_v(user)


def _watch(child: int, order: Mapping[str, Any], control: int, begun: float, user: int | None = None) -> dict[str, Any]:
    """Wait for the end of `child`, or for the first limit that is exceeded."""
    found: dict[str, Any] = {"memory_bytes": 0}
    pause, waiting = 0.001, select.poll()  # select.select refuses descriptors from 1024 on
    waiting.register(control, select.POLLIN)
    while True:
        for pid, code in _ended():
            if pid == child:
                return found | {"code": code}
        if waiting.poll(math.ceil(1000 * pause)):
            return found | {"ending": "cancelled"}
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        n, memory_bytes, cpu_s = _measure()
        if user is not None and order["level"] == "rlimits":  # which counts for no process that is not attached to it
            memory_bytes += sum(size for _, _, size in kernel.system_v(user))
        found["memory_bytes"] = max(found["memory_bytes"], memory_bytes)
        for limit, value, most in (
            ("wall_limit", time.monotonic() - begun, order["wall_s"]),
            ("cpu_limit", cpu_s, order["cpu_s"] + 0.1),
            ("memory_limit", memory_bytes, order["memory_bytes"] + _OWN_MEMORY),
            ("process_limit", n, order["max_processes"] + 2 * _OWN_PROCESSES),
        ):
            if value > most:
                return found | {"ending": limit}


def _ending(found: Mapping[str, Any], heard: Mapping[str, str], order: Mapping[str, Any]) -> dict[str, Any]:
    """Ending of the program: a limit or its own, with exit code or signal."""
    if "error" in heard:
        return {"error": heard["error"]}
    if "started" not in heard and "ending" not in found:
        return {"error": "it ended before the program began"}
    if "ending" in found:
        return {"ending": found["ending"]}
    code = int(heard.get("ended", found["code"]))
    number = os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0
    if order["level"] == "bubblewrap" and os.waitstatus_to_exitcode(code) > 128:
        number = os.waitstatus_to_exitcode(code) - 128
    if not number:
        value = os.waitstatus_to_exitcode(code)
        return {"ending": "wrong_exit" if value else "ok", "code": value}
    out_of_time = number == signal.SIGXCPU or (number == signal.SIGKILL and found["cpu_s"] >= order["cpu_s"])
    kind = "cpu_limit" if out_of_time else "file_limit" if number == signal.SIGXFSZ else "killed"
    return {"ending": kind, "code": -number}


def _heard(pipe: int) -> dict[str, str]:
    """Return what was written on the way: `started`, `ended CODE`, `error WHY`. All who could write have ended."""
    with open(pipe, encoding="utf-8", errors="replace") as file:
        rows = [line.rstrip("\n").partition(" ") for line in file]
    return {word: rest for word, _, rest in rows}


def _end_all() -> None:
    """Kill every descendant and wait for it."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while new := set(_descendants()) - stopped:  # who is stopped begets no more
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        for _ in _ended():
            pass
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        time.sleep(0.001)


def _ended() -> Iterator[tuple[int, int]]:
    """Reap children that have ended, and those that were left to us."""
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, code


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has ended, or is nobody whom we may end


def _measure() -> tuple[int, int, float]:
    """Return of all descendants: how many threads, bytes of memory, processor seconds, those of the dead included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    n, pages, ticks = 0, 0, 0
    for pid in _descendants():
        fields = _stat(pid)
        if fields:
            ticks += sum(map(int, fields[11:15]))
            n, pages = n + int(fields[17]), pages + int(fields[21])
    return n, pages * _PAGE, used.ru_utime + used.ru_stime + ticks / _TICKS


def _descendants() -> list[int]:
    """All processes below this one."""
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        for task in _listed(f"/proc/{pid}/task"):
            children = [int(text) for text in _text(f"/proc/{pid}/task/{task}/children").split()]
            found += children
            todo += children
    return found


def _stat(pid: int | str) -> list[str]:
    """Return what /proc/PID/stat says from the third field on; nothing of a process that has ended."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _text(path: str) -> str:
    """Return a file of /proc, empty where its process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _stranger(level: str) -> int | None:
    """Unused user id for a program that must not be root.

    None where there is no user but root: then it is an ordinary user of the machine who is called root in a container,
    and need not become another one in namespaces of his own.
    """
    candidates = (1_900_000_000 + os.getpid(), 61_184 + os.getpid() % 4000)
    rows = [[int(text) for text in line.split()] for line in _text("/proc/self/uid_map").splitlines()]
    for user in candidates:
        if any(first <= user < first + count for first, _, count in rows):
            return user
    if level == "rlimits":
        raise OSError("no user other than root is available")
    return None


def _counted_already(level: str, user: int | None) -> int:
    """Processes already counted towards the limit of the program's user."""
    release = tuple(int("".join(filter(str.isdecimal, text)) or 0) for text in os.uname().release.split(".")[:2])
    if user is not None or (level != "rlimits" and release >= (5, 14)):  # from 5.14 on, each user namespace has its own
        return 0
    n = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        whose = _text(f"/proc/{pid}/status").partition("\nUid:")[2].split()[:1]
        fields = _stat(pid) if whose == [str(os.getuid())] else []
        n += int(fields[17]) if fields else 0
    return n
