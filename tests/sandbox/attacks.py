"""What a program may try against the machine it is judged on, and whether it came through.

    python -m tests.sandbox.attacks [LEVEL]...

tries all of them at the levels named, or every level that the present user reaches, and prints one line of JSON.
Standard library only, so that any user's interpreter can run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewards.sandbox.level import Isolation, Level
from rewards.sandbox.probe import probe_isolation
from rewards.sandbox.run import Bounds, ExitReason, Finished, SandboxError, run_blocking

SMALL = Bounds(cpu_s=1.0, wall_s=4.0, memory_mb=128, max_processes=8, file_mb=4, output_kb=64)
BRIEF = replace(SMALL, wall_s=1.0)


@dataclass
class Scene:
    """A machine with something to attack: a secret in a file and in a process, that process, and a server."""

    isolation: Isolation
    folder: Path
    secret: str = field(default_factory=lambda: uuid.uuid4().hex)
    n_connections: int = 0

    def run(self, code: str, *arguments: object, bounds: Bounds = SMALL) -> Finished:
        command = ("python", "main.py", *map(str, arguments))
        return run_blocking(command, b"", {"main.py": code.encode()}, bounds, self.isolation)

    @property
    def file(self) -> Path:
        path = self.folder / "secret.txt"
        if not path.exists():
            path.write_text(self.secret)
            path.chmod(0o600)
        return path

    @contextlib.contextmanager
    def bystander(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sleep", "60"], env={"SECRET": self.secret}) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextlib.contextmanager
    def server(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.05)
            over = threading.Event()

            def accept() -> None:
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        server.accept()[0].close()
                        self.n_connections += 1

            thread = threading.Thread(target=accept)
            thread.start()
            try:
                yield server.getsockname()[1]
            finally:
                time.sleep(0.1)
                over.set()
                thread.join()


def system_python() -> str | None:
    """A Python that any user of this machine can run on this repository, if there is one."""
    root = Path(__file__).resolve().parent.parent.parent
    can_read = all(path.stat().st_mode & 0o005 == 0o005 for path in [root, *root.parents])
    return shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") if can_read else None


def in_command_lines(token: str) -> list[str]:
    """Processes of this machine whose command names `token`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if token.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def fork_bomb(scene: Scene) -> bool:
    code = "import os, sys\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    token = uuid.uuid4().hex
    finished = scene.run(code, token, bounds=BRIEF)
    stopped = finished.ending in (ExitReason.PROCESS_LIMIT, ExitReason.CPU_LIMIT, ExitReason.WALL_LIMIT)
    return stopped and not in_command_lines(token)


def memory_bomb(scene: Scene) -> bool:
    finished = scene.run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n")
    return finished.ending is ExitReason.MEMORY_LIMIT


def memory_bomb_of_many(scene: Scene) -> bool:
    """Each process stays below the limit."""
    code = "import os, time\nfor _ in range(3):\n    os.fork()\nx = bytearray(b'x' * (40 << 20))\ntime.sleep(60)\n"
    return scene.run(code).ending is ExitReason.MEMORY_LIMIT


def infinite_loop(scene: Scene) -> bool:
    bounds = replace(SMALL, cpu_s=0.3, wall_s=20.0)
    return scene.run("while True:\n    pass\n", bounds=bounds).ending is ExitReason.CPU_LIMIT


def endless_sleep(scene: Scene) -> bool:
    return scene.run("import time\ntime.sleep(1000)\n", bounds=BRIEF).ending is ExitReason.WALL_LIMIT


def ten_gigabytes(scene: Scene) -> bool:
    code = "with open('big', 'wb') as file:\n    for _ in range(10240):\n        file.write(bytes(1 << 20))\n"
    return scene.run(code).ending is ExitReason.FILE_LIMIT


def endless_output(scene: Scene) -> bool:
    finished = scene.run("while True:\n    print('x' * 1000)\n")
    return finished.ending is ExitReason.OUTPUT_LIMIT and len(finished.stdout) <= SMALL.output_kb * 1024


def reading_environments(scene: Scene) -> bool:
    code = """
import glob, os
print(os.environ)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
    with scene.bystander():
        return scene.secret.encode() not in scene.run(code).stdout


def reading_files(scene: Scene) -> bool:
    return scene.secret.encode() not in scene.run("import sys\nprint(open(sys.argv[1]).read())\n", scene.file).stdout


def network(scene: Scene) -> bool:
    code = "import socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])), 1)\n"
    with scene.server() as port:
        scene.run(code, port)
    return scene.n_connections == 0


def killing_the_parent(scene: Scene) -> bool:
    code = """
import os, signal, sys, time
for pid in (int(sys.argv[1]), os.getppid()):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
time.sleep(5)
"""
    with scene.bystander() as bystander:
        finished = scene.run(code, bystander.pid, bounds=BRIEF)
        return bystander.poll() is None and finished.ending is ExitReason.WALL_LIMIT


def escaping_by_symlink(scene: Scene) -> bool:
    code = """
import os, sys
os.symlink(os.path.dirname(sys.argv[1]), "way_out")
try:
    print(open("way_out/secret.txt").read())
except OSError:
    pass
try:
    open("way_out/secret.txt", "w").write("mine")
except OSError:
    pass
"""
    file = scene.file
    finished = scene.run(code, file)
    return scene.secret.encode() not in finished.stdout and file.exists() and file.read_text() == scene.secret


def leaving_children_behind(scene: Scene) -> bool:
    code = """
import os, sys
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                try:
                    os.close(fd)
                except OSError:
                    pass
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", sys.argv[1]])
        os._exit(0)
"""
    token = uuid.uuid4().hex
    finished = scene.run(code, token)
    return finished.ending is ExitReason.OK and not in_command_lines(token)


def a_folder_that_cannot_be_removed(scene: Scene) -> bool:
    code = """
import os
print(os.getcwd(), flush=True)
top = os.getcwd()
for _ in range(200):
    os.mkdir("x" * 100)
    os.chdir("x" * 100)
os.chdir(top)
os.mkdir("shut")
os.mkdir("shut/in")
os.chmod("shut", 0)
os.chmod(".", 0)
"""
    finished = scene.run(code)
    folder = finished.stdout.decode().strip()
    return finished.ending is ExitReason.OK and bool(folder) and not (folder != "/work" and os.path.lexists(folder))


def forging_the_report(scene: Scene) -> bool:
    code = """
import glob, os, sys, time
said = b'{"ending": "ok", "code": 0, "wall_s": 0, "cpu_s": 0, "memory_bytes": 0}'
for path in [*range(3, 64), *glob.glob("/proc/%d/fd/*" % os.getppid()), *glob.glob("/proc/[0-9]*/fd/*")]:
    try:
        os.write(path if isinstance(path, int) else os.open(path, os.O_WRONLY | os.O_NONBLOCK), said)
    except OSError:
        pass
sys.exit(3)
"""
    finished = scene.run(code)
    return (finished.ending, finished.code) == (ExitReason.WRONG_EXIT, 3)


def namespaces_within(scene: Scene) -> bool:
    """New user namespaces bring rights: to mount memory that nobody counts, for one."""
    code = "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))\n"
    return scene.run(code).stdout.strip() == b"-1"


def writing_elsewhere(scene: Scene) -> bool:
    """In folders that are open to every user, what a program writes would stay."""
    name = f"rlhf-left-{scene.secret}"
    code = """
import sys
for folder in ("/tmp", "/var/tmp", "/dev/shm"):
    try:
        open(f"{folder}/{sys.argv[1]}", "w").write("left")
    except OSError:
        pass
"""
    scene.run(code, name)
    left = [path for folder in ("/tmp", "/var/tmp", "/dev/shm") if (path := Path(folder) / name).exists()]
    for path in left:
        path.unlink()
    return not left


def memory_of_system_v(scene: Scene) -> bool:
    """It belongs to no process: it outlives the one that made it."""
    return _leaves_nothing("shm", "libc.shmget({key}, 1 << 20, 0o1600)", scene)


def semaphores_of_system_v(scene: Scene) -> bool:
    made = {"sem": "libc.semget({key}, 1, 0o1600)", "msg": "libc.msgget({key}, 0o1600)"}
    return all(_leaves_nothing(kind, call, scene) for kind, call in made.items())


def _leaves_nothing(kind: str, call: str, scene: Scene) -> bool:
    """Whether what `call` made with a key that nobody else has is gone; if not, it is removed here."""
    key = 1 + uuid.uuid4().int % (1 << 30)
    finished = scene.run(f"import ctypes\nlibc = ctypes.CDLL(None)\nprint({call.format(key=key)})\n")
    rows = Path(f"/proc/sysvipc/{kind}").read_text("ascii").splitlines()[1:]
    left = [row.split()[1] for row in rows if int(row.split()[0]) == key]
    for number in left:
        subprocess.run(["ipcrm", {"shm": "-m", "sem": "-s", "msg": "-q"}[kind], number], check=False)
    return finished.ending is ExitReason.OK and b"-1" not in finished.stdout and not left


def being_spared_when_memory_runs_out(scene: Scene) -> bool:
    code = """
import os
for adjustment in range(-1000, 0, 100):
    try:
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), str(adjustment).encode())
        print(adjustment)
        break
    except OSError:
        pass
"""
    return not scene.run(code).stdout


#: What is stopped from which level on. The levels are those of an ordinary user, and of root, who becomes another user.
ATTACKS: dict[Callable[[Scene], bool], tuple[str, str]] = {
    fork_bomb: ("rlimits", "rlimits"),
    memory_bomb: ("rlimits", "rlimits"),
    memory_bomb_of_many: ("rlimits", "rlimits"),
    infinite_loop: ("rlimits", "rlimits"),
    endless_sleep: ("rlimits", "rlimits"),
    ten_gigabytes: ("rlimits", "rlimits"),
    endless_output: ("rlimits", "rlimits"),
    leaving_children_behind: ("rlimits", "rlimits"),
    a_folder_that_cannot_be_removed: ("rlimits", "rlimits"),
    memory_of_system_v: ("rlimits", "rlimits"),
    semaphores_of_system_v: ("namespaces", "rlimits"),
    being_spared_when_memory_runs_out: ("namespaces", "rlimits"),
    reading_environments: ("namespaces", "rlimits"),
    reading_files: ("namespaces", "rlimits"),
    forging_the_report: ("namespaces", "rlimits"),
    killing_the_parent: ("namespaces", "rlimits"),
    escaping_by_symlink: ("namespaces", "rlimits"),
    network: ("namespaces", "namespaces"),
    namespaces_within: ("namespaces", "namespaces"),
    writing_elsewhere: ("namespaces", "namespaces"),
}


def attempt(attack: Callable[[Scene], bool], isolation: Isolation) -> bool:
    """Whether `attack` was stopped."""
    with tempfile.TemporaryDirectory(prefix="rlhf-attacked-") as folder:
        try:
            return attack(Scene(isolation, Path(folder)))
        except SandboxError:  # it brought down what watches it
            return False


if __name__ == "__main__":
    found = probe_isolation()
    isolations = [
        isolation for isolation in found.isolations if str(isolation.level) in (sys.argv[1:] or map(str, Level))
    ]
    stopped = {str(isolation.level): {a.__name__: attempt(a, isolation) for a in ATTACKS} for isolation in isolations}
    print(json.dumps({"stopped": stopped, "why_not": {str(k): v for k, v in found.why_not.items()}}))
