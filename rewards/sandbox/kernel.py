"""Calls to the Linux kernel that Python's standard library does not offer. Each raises OSError where it is refused."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # without importing typing: this is read anew for every program that is run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NEW_NS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000

NO_SUID, NO_DEV, BIND, REC, PRIVATE = 2, 4, 4096, 16384, 1 << 18
DETACH = 2

_SET_DUMPABLE, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 4, 36, 38
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY, _ATTR_NO_SUID, _ATTR_NO_DEV = 1, 2, 4


#: Kinds of System V objects, as /proc/sysvipc names them, and what stands between the id and the order to remove one.
_SYSTEM_V: dict[str, tuple[int, ...]] = {"shm": (), "sem": (0,), "msg": ()}
_REMOVE = 0

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones."""
    _call("unshare", flags)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`."""
    _call("mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())


def unmount(target: str) -> None:
    """Detach what is mounted at `target`, with everything below it."""
    _call("umount2", target.encode(), DETACH)


def make_read_only(target: str) -> None:
    """Forbid writing, set-uid programs and devices in the mount at `target` and in all below it."""
    wanted = _MountAttributes(set=_READ_ONLY | _ATTR_NO_SUID | _ATTR_NO_DEV)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(wanted), size)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root folder, and show the one before as `old`, a folder inside it."""
    _call("pivot_root", new.encode(), old.encode())


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)


def forbid_new_privileges() -> None:
    """Let no program that this process becomes gain rights, as by a set-uid bit."""
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def hide() -> None:
    """Let no other process of the same user look into this one."""
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def system_v(user: int, *, orphans: bool = False) -> set[tuple[str, int, int]]:
    """Kind, id and bytes of the System V memory, semaphores and queues left by `user`.

    With `orphans` only memory whose maker has ended: of semaphores and queues the kernel does not say who made them.
    """
    found = set()
    for kind in _SYSTEM_V:
        try:
            with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
                head, *rows = [line.split() for line in file]
        except (OSError, ValueError):
            continue  # this kernel has none
        for row in rows:
            values = dict(zip(head, map(int, row), strict=True))
            is_orphan = kind == "shm" and not os.path.exists(f"/proc/{values['cpid']}")
            if values["cuid"] == user and (is_orphan or not orphans):
                found.add((kind, int(row[1]), values.get("size", 0)))
    return found


def remove_system_v(made: set[tuple[str, int, int]]) -> None:
    """Remove these; one that is gone already, or that another user owns, is left."""
    for kind, number, _ in made:
        getattr(_libc, f"{kind}ctl")(number, *_SYSTEM_V[kind], _REMOVE, None)


def _call(name: str, *arguments: Any) -> None:
    function: Callable[..., int] = getattr(_libc, name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
