"""Inside of a namespace sandbox: the program's view of the machine, and its start.

Nothing of the machine's own files is visible but the interpreter and the libraries, read-only. There is no /proc, no
network device, and no process but those of the sandbox. All of it vanishes with its first process.
"""

from __future__ import annotations

import json
import os

from rewards.sandbox import kernel
from rewards.sandbox.launch import launch

TYPE_CHECKING = False  # without importing typing: this is read anew for every program that is run
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

#: Who the tested program is, inside. Outside it is the ordinary user who started it, or a user that nobody else is.
INSIDE = 1000
#: The folder in which the program runs.
WORK = "/work"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: Folders in which a root user puts an interpreter that lies where other users cannot go; any that exists will do.
_WAYSIDE = ("/mnt", "/media", "/srv", "/opt")
_OLD = "/.old"
_ALL_NEW = (
    kernel.NEW_USER
    | kernel.NEW_NS
    | kernel.NEW_PID
    | kernel.NEW_NET
    | kernel.NEW_IPC
    | kernel.NEW_UTS
    | kernel.NEW_CGROUP
)


def fork(status: int, steps: Callable[[], NoReturn]) -> int:
    """Fork a process that runs `steps` and return its id; its errors go to `status`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        steps()
    except BaseException as error:
        os.write(status, b"error " + str(error).replace("\n", " ").encode() + b"\n")
    os._exit(1)


def become(user: int | None) -> None:
    """Give up the rights of root, for good, where this process has them.

    Where memory runs out, the kernel is to end this process first; what root says of that nobody else can undo.
    """
    if user is not None:
        if os.access("/proc/self/oom_score_adj", os.W_OK):
            _write("/proc/self/oom_score_adj", "1000")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def start_in_namespaces(order: Mapping[str, Any], user: int | None, status: int) -> int:
    """Start the program in its own namespaces; returns the process whose end ends all of it.

    Args:
        order: see `rewards.sandbox.run`.
        user: who it is to be outside; None where this process is an ordinary user.
        status: pipe that hears of the beginning and of the end.

    Raises:
        OSError: the kernel refuses a part of it.
    """
    ready, go = os.pipe(), os.pipe()

    def stage() -> NoReturn:
        kernel.unshare(_ALL_NEW)
        os.write(ready[1], b"+")
        os.close(go[1])
        if not os.read(go[0], 1):
            raise OSError("the user namespace has no id mapping")
        # The first process that is born after unshare is the init of the new namespace.
        os.waitpid(fork(status, lambda: _be_init(order, user, status)), 0)
        os._exit(0)

    pid = fork(status, stage)
    os.close(ready[1])
    if os.read(ready[0], 1):
        _map_users(pid, user)
        os.write(go[1], b"+")
    for end in (ready[0], *go):
        os.close(end)
    return pid


def start_in_bubblewrap(order: Mapping[str, Any], user: int | None, status: int) -> int:
    """Begin the program under bubblewrap; returns the process of that. Raises OSError."""
    bubblewrap = order["bubblewrap"]
    with open(os.path.join(os.path.dirname(__file__), "launch.py"), encoding="utf-8") as file:
        source = file.read()

    def steps() -> NoReturn:
        sources = _within_reach(order["visible"], order["python"]) if user is not None else {}
        become(user)
        order_file = os.memfd_create("order", 0)
        os.write(order_file, json.dumps(order).encode())
        os.set_inheritable(status, True)
        command = [bubblewrap, "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent"]
        command += ["--new-session", "--uid", str(INSIDE), "--gid", str(INSIDE), "--cap-drop", "ALL"]
        for path in order["visible"]:
            is_link = os.path.islink(path)
            command += ["--symlink" if is_link else "--ro-bind"]
            command += [os.readlink(path) if is_link else sources.get(path, path), path]
        for device in DEVICES:
            command += ["--dev-bind", device, device]
        command += ["--size", str(order["folder_bytes"]), "--tmpfs", WORK, "--symlink", WORK[1:], "/tmp"]
        command += ["--remount-ro", "/", "--chdir", WORK, order["python"], "-I", "-S", "-c", source]
        os.execv(bubblewrap, [*command, str(order_file), str(status), WORK])

    return fork(status, steps)


def _within_reach(visible: Sequence[str], python: str) -> dict[str, str]:
    """Show the interpreter's folder, in this process alone, at a place that any user can go to."""
    prefix = next((path for path in visible if python.startswith(path + "/")), None)
    if prefix is None or prefix.startswith("/usr"):
        return {}
    wayside = next(path for path in _WAYSIDE if os.path.isdir(path) and not prefix.startswith(path))
    kernel.unshare(kernel.NEW_NS)
    kernel.mount("none", "/", "", kernel.REC | kernel.PRIVATE)
    kernel.mount(prefix, wayside, "", kernel.BIND | kernel.REC)
    return {prefix: wayside}


def _map_users(pid: int, user: int | None) -> None:
    if user is None:
        _write(f"/proc/{pid}/setgroups", "deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        rows = f"{INSIDE} {own} 1\n" if user is None else f"0 0 1\n{INSIDE} {user} 1\n"
        _write(f"/proc/{pid}/{name}", rows)


def _be_init(order: Mapping[str, Any], user: int | None, status: int) -> NoReturn:
    kernel.hide()
    _enclose(order, user)

    def steps() -> NoReturn:
        become(None if user is None else INSIDE)
        kernel.forbid_new_privileges()
        os.chdir(WORK)
        launch(dict(order), status)

    program = fork(status, steps)
    while True:
        pid, code = os.waitpid(-1, 0)
        if pid == program:
            os.write(status, f"ended {code}\n".encode())
            os._exit(0)


def _enclose(order: Mapping[str, Any], user: int | None) -> None:
    """Leave every folder of the machine behind but those that are to be seen."""
    flags = kernel.NO_SUID | kernel.NO_DEV
    kernel.mount("none", "/", "", kernel.REC | kernel.PRIVATE)
    # A namespace within this one would have mounts, and so memory, that nothing here counts.
    _write("/proc/sys/user/max_user_namespaces", "0")
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, "size=1m,mode=755")
    os.mkdir(f"/tmp{_OLD}")
    kernel.pivot_root("/tmp", f"/tmp{_OLD}")
    os.chdir("/")
    for path in order["visible"]:
        _show(path)
    os.makedirs("/dev", exist_ok=True)
    for device in DEVICES:
        _write(device, "")
        kernel.mount(_OLD + device, device, "", kernel.BIND)
    os.mkdir(WORK)
    kernel.mount("tmpfs", WORK, "tmpfs", flags, f"size={order['folder_bytes']},nr_inodes={order['max_files']},mode=755")
    if user is not None:
        os.chown(WORK, INSIDE, INSIDE)
    os.symlink(WORK[1:], "/tmp")
    kernel.unmount(_OLD)
    os.rmdir(_OLD)


def _show(path: str) -> None:
    old = _OLD + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        _write(path, "")
    kernel.mount(old, path, "", kernel.BIND | kernel.REC)
    kernel.make_read_only(path)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
