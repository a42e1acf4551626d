"""Child processes: their lines, their limits, and their end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from rlhf.child_process import Child, complaint, is_healthy, python_environment, run_python


def started(code: str) -> Child:
    return Child([sys.executable, "-c", code], env=python_environment())


def soon() -> float:
    return time.monotonic() + 60


def test_lines_come_one_by_one_and_end_with_the_process() -> None:
    child = started("print('a'); print('b', flush=True); print(input())")
    assert [child.line(soon()), child.line(soon())] == [b"a", b"b"]
    assert child.popen.stdin is not None
    child.popen.stdin.write(b"c\n")
    child.popen.stdin.flush()
    assert [child.line(soon()), child.line(soon())] == [b"c", None]
    child.kill()


def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert is_healthy(url) and not is_healthy(f"{url}/v2")
        server.shutdown()
    assert not is_healthy(url)


def test_a_line_that_does_not_come_in_time_is_none() -> None:
    child = started("input()")
    begin = time.monotonic()
    assert child.line(begin + 0.2) is None and time.monotonic() - begin >= 0.2
    child.kill()
    assert child.popen.returncode < 0


def test_a_line_that_is_too_long_is_none() -> None:
    child = started("print('x' * 300_000)")
    assert child.line(soon(), most=100_000) is None
    child.kill()


def test_killing_ends_what_the_process_began_and_may_be_done_twice() -> None:
    child = started(
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "
        "print(p.pid, flush=True); input()"
    )
    grandchild = psutil.Process(int(child.line(soon()) or b"0"))
    child.kill()
    child.kill()
    gone, _ = psutil.wait_procs([grandchild], timeout=60)
    assert gone or grandchild.status() == psutil.STATUS_ZOMBIE


def test_code_runs_elsewhere_and_complains_in_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text("import os; print(os.environ['OWN'])")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run_python("import found_here", 60, OWN="told")
    assert (done.returncode, done.stdout) == (0, "told\n") and complaint(done) == "exit code 0"
    assert complaint(run_python("raise ValueError('so')", 60)) == "ValueError: so"
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(600)", 0.2)
    assert "OWN" not in os.environ
