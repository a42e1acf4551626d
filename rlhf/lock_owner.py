"""Owner of a folder's lock: identity, heartbeat, and whether that process still lives.

On one machine the number of a process and when it began say so. Of another machine the only sign is the time of the
file that it writes to again and again, by the clock of the file system; what differs from that clock is said.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

#: Name of the file; those that begin with it belong to it.
LOCK = ".lock"
#: Seconds of silence after which an owner on another machine counts as dead.
STALE_S = 120.0
#: Seconds by which two clocks may differ before it is said.
_CLOCK_S = 5.0
#: File systems that other machines may have mounted too; FUSE may be anything.
_SHARED = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "afs", "fuse")


@dataclass(frozen=True)
class Owner:
    """Process that holds a lock.

    Attributes:
        host: name of the machine.
        boot: which of its starts; empty where the system does not tell.
        namespace: of process numbers, as containers have their own.
        pid: the process.
        started: when that began, in ticks since the boot, as numbers of processes come again.
        token: of this lock alone.
        since: when the lock was taken, in seconds since 1970 by the owner's clock.
        beat_at: when it last wrote, by the same.
        doing: what it does, for the reader.
        inode: number of the lock's file, which a copy of the folder does not share; 0 where it is not known.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: int
    token: str
    since: float
    beat_at: float
    doing: str
    inode: int = 0

    @classmethod
    def here(cls, doing: str) -> Owner:
        """Describe this process."""
        now, pid = time.time(), os.getpid()
        return cls(*_machine(), pid, started_at(pid) or 0, secrets.token_hex(8), now, now, doing)

    @property
    def is_of_here(self) -> bool:
        """True if its process number is of this machine."""
        return (self.host, self.boot, self.namespace) == _machine()

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        host, doing = ("".join(c if c.isprintable() else "?" for c in t)[:80] for t in (self.host, self.doing))
        return f"process {self.pid} on {host} ({doing}), since {since}"


def write(file: int, owner: Owner) -> None:
    """Write who holds a lock into it; the time of the file is the sign of life."""
    content = json.dumps(asdict(replace(owner, inode=os.fstat(file).st_ino))).encode()
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))


def read(file: int) -> Owner | None:
    """Owner written into a lock; None where there is none, or not yet a whole one."""
    try:
        found = Owner(**json.loads(os.pread(file, 1 << 16, 0)))
        str(found)  # nonsense in it is nobody
        return found if isinstance(found.beat_at, float) else None
    except (OSError, ValueError, TypeError, OverflowError):
        return None


def read_path(path: Path) -> Owner | None:
    """`read` by the name of the file; None where there is none."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return read(file)
    finally:
        os.close(file)


def life(owner: Owner, path: Path, *, by_kernel: bool) -> tuple[bool, str]:
    """True if an owner lives, and the reason for that belief.

    Args:
        owner: that a lock names.
        path: of the lock.
        by_kernel: whether this process has the kernel's lock, so that no process of this machine has it.
    """
    if owner.is_of_here:
        if owner.inode and path.exists() and path.stat().st_ino != owner.inode:
            return False, "this folder is a copy; the process holds the original"
        # A lock of this very process that the kernel does not know of was not removed when it was given back.
        is_there = started_at(owner.pid) == owner.started and not (by_kernel and owner.pid == os.getpid())
        return is_there, "" if is_there else "that process is gone"
    if by_kernel and owner.boot and owner.boot == _machine()[1]:
        return False, "it was another container of this machine, and is gone"
    now = time_of(path.parent)
    try:
        beat = path.stat().st_mtime
    except FileNotFoundError:
        return False, "its lock is gone"
    age, off = now - beat, max(time.time() - now, owner.beat_at - beat, key=abs)
    clocks = f"; a clock is off by {off:.0f} s, and ages are those of the file system" if abs(off) > _CLOCK_S else ""
    if age < -_CLOCK_S:
        return True, f"its last sign of life is {-age:.0f} s in the future: if it is gone, remove {path}"
    silent = f"nothing was heard of it for {max(age, 0):.0f} s{clocks}"
    return age <= STALE_S, f"{silent}; beyond {STALE_S:.0f} s it counts as dead" if age <= STALE_S else silent


def _machine() -> tuple[str, str, int]:
    boot, namespace = "", 0
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return os.uname().nodename, boot, namespace


def started_at(pid: int) -> int | None:
    """Start of a process, in ticks since the boot; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if sys.platform.startswith("linux"):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    return None if fields[0] in "ZX" else int(fields[19])


def time_of(folder: Path) -> float:
    """The time by the clock of the file system."""
    probe = folder / f"{LOCK}.{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL, 0o644))
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def file_system(folder: Path) -> tuple[str, bool]:
    """File system type of a folder, by the kernel's name, and whether other machines may mount it."""
    kind, longest = "unknown", -1
    with suppress(OSError):
        place = os.path.realpath(folder)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mount = before.split()[4].replace("\\040", " ")
            is_above = place == mount or place.startswith(mount.rstrip("/") + "/")
            if is_above and len(mount) >= longest:
                kind, longest = after.split()[0], len(mount)
    return kind, kind.startswith(_SHARED)
