"""Launcher of a tested program: writes its files, sets its limits, and replaces itself with the program (exec).

The built-in sandbox imports it; a container gets it as text for a fresh interpreter, so it needs only the standard
library.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # without importing typing: this is read anew for every program that is run
if TYPE_CHECKING:
    from typing import Any, NoReturn


def launch(order: dict[str, Any], status: int) -> NoReturn:
    """Replace this process by the program of `order`; earlier errors go to `status`."""
    try:
        os.set_inheritable(status, False)
        for path, text in order["files"].items():
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(text.encode("latin-1"))
        if os.getsid(0) != os.getpid():
            os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by the interpreter that runs this
            signal.signal(ignored, signal.SIG_DFL)
        _limit(order)
        os.write(status, b"started\n")
        os.execve(order["program"][0], order["program"], order["environment"])
    except BaseException as error:
        os.write(status, b"error " + str(error).replace("\n", " ").encode() + b"\n")
        os._exit(1)


def _limit(order: dict[str, Any]) -> None:
    cpu_s = int(-(-order["cpu_s"] // 1))
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, order["memory_bytes"], order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"], order["file_bytes"]),
        (resource.RLIMIT_NOFILE, order["max_open_files"], order["max_open_files"]),
        (resource.RLIMIT_NPROC, order["user_processes"], order["user_processes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        most = resource.getrlimit(limit)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(limit, (soft, hard))


if __name__ == "__main__":
    with open(int(sys.argv[1]), encoding="utf-8") as given:
        given.seek(0)
        read = json.load(given)
    os.chdir(sys.argv[3])
    launch(read, int(sys.argv[2]))
