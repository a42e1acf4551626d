"""Speed of concurrent evaluation, and equality of a killed and resumed one.

    OMP_NUM_THREADS=1 python benchmarks/evaluate.py [--json] [--tasks 500] [--latency 0.05]

A server on this machine answers like a model: each reply takes `latency` seconds, whatever else is asked. `rlhf
evaluate` plays the tasks one after another (limits.max_concurrent 1, on a tenth of them), then 64 at a time; then it is
killed in the middle with SIGKILL and run again, and its summary has to be the one of the run that was not. Times are
from the first request to the last reply, as the server sees them: starting Python is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

SUITE = """
agent: {{kind: chat, show_admissible: true}}
limits: {{max_turns: 6, max_tokens: 16, max_concurrent: {concurrent}}}
tasks: {{split: test, n: {n}}}
parts:
  houses: {{environment: {{kind: keyhole, rows: 2, columns: 2, loops: 0, max_steps: 6}}}}
"""


@contextmanager
def served(latency: float) -> Iterator[tuple[str, list[float]]]:
    """A server whose model takes the first action that it is shown; its address, and when it was asked and replied."""
    times: list[float] = []

    async def answer(request: web.Request) -> web.Response:
        times.append(time.perf_counter())
        body = await request.json()
        await asyncio.sleep(latency)
        times.append(time.perf_counter())
        listed = body["messages"][-1]["content"].partition("Possible actions:")[2].strip()
        message = {"role": "assistant", "content": listed.splitlines()[0].removeprefix("- ")}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    ready, place = threading.Event(), {}

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place["port"] = runner.addresses[0][1]
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    ready.wait(60)
    yield f"http://127.0.0.1:{place['port']}", times


def command(folder: Path, url: str, n: int, concurrent: int, out: str) -> list[str]:
    suite = folder / f"{n}-{concurrent}.yaml"
    suite.write_text(SUITE.format(n=n, concurrent=concurrent))
    words = ["--endpoint", url, "--model", "m", "--suite", str(suite), "--out", str(folder / out), "--json"]
    return [sys.executable, "-m", "rlhf.cli", "evaluate", *words]


def seconds_of(words: list[str], times: list[float]) -> float:
    times.clear()
    subprocess.run(words, check=True, capture_output=True)
    return max(times) - min(times)


def killed_in_the_middle(words: list[str], trajectories: Path) -> int:
    """Kill the evaluation when its first block is there; returns how many files it had written."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(trajectories.glob("*.parquet")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(list(trajectories.glob("*.parquet")))


def measure(n: int, latency: float) -> dict[str, Any]:
    few = max(1, n // 10)
    with tempfile.TemporaryDirectory() as name, served(latency) as (url, times):
        folder = Path(name)
        alone = seconds_of(command(folder, url, few, 1, "alone"), times)
        together = seconds_of(command(folder, url, n, 64, "together"), times)
        words = command(folder, url, n, 64, "killed")
        n_files = killed_in_the_middle(words, folder / "killed" / "trajectories")
        resumed = seconds_of(words, times)
        same = (folder / "killed" / "summary.json").read_bytes() == (folder / "together" / "summary.json").read_bytes()
    per_s = {"one_after_another": few / alone, "together": n / together}
    return {
        "n_tasks": n,
        "latency_s": latency,
        "tasks_per_s": {key: round(value, 1) for key, value in per_s.items()},
        "ratio": round(per_s["together"] / per_s["one_after_another"], 1),
        "together_s": round(together, 2),
        "files_before_the_kill": n_files,
        "resumed_s": round(resumed, 2),
        "same_summary": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = measure(asked.tasks, asked.latency)
    if asked.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
