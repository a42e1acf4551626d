"""Response time, memory, live delay and training cost of the viewer.

    python benchmarks/viewer.py                              # 1,000 steps with 500 attempts each
    python benchmarks/viewer.py --steps 100 --attempts 50    # a small one
    python benchmarks/viewer.py --cost 5                     # processor seconds of training, five pairs of runs
    python benchmarks/viewer.py --figures 5                  # the same of the key token_stats, and its bytes a token

A run folder is made of real episodes' shape, `rlhf view` is started on it in a process of its own, and its addresses
are asked one after another, the first time and again. Live delay: lines are appended to the log, and the time until an
event with them has come is taken. Where there are Chromium and Playwright, pages are opened in a browser too, each with
empty caches: the seconds until something is painted, until what was asked for is drawn, and until a page shows a line
that is appended. Memory is what the server has at most, eight clients at once among them. Cost: a short run is trained
with nobody watching, and with a viewer whose page is followed by a client that opens attempts, in turns; the ratio is
of the processor seconds of the training alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, Trajectory, Turn, Verdict
from rlhf.evaluation.rows import SCHEMA, TrajectoryRecord, encode
from rlhf.evaluation.statistics import mean_interval
from rlhf.metrics import METRICS
from rlhf.sinks import JsonlSink, LogLine

GROUP, TURNS, TOKENS = 8, 6, 12
STAGE = "0-policy_gradient"


def attempt(rng: random.Random, step: int, i: int) -> dict[str, Any]:
    turns, read, advantages = [], 200, []
    for k in range(TURNS):
        ids = [rng.randrange(32_000) for _ in range(TOKENS)]
        prompt = Prompt(tuple(rng.randrange(32_000) for _ in range(read)), (2,))
        logps = [-rng.random() for _ in ids]
        words = " ".join(rng.choice(("go", "north", "take", "coin", "door")) for _ in range(8))
        turns.append(
            Turn(Action(words, (Generation(prompt, ids, logps, Finish.STOP, step),)), f"You see {words}.", k / 9)
        )
        advantages.append(tuple(rng.gauss(0, 1) for _ in ids))
    solved = rng.random() < 0.5
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    trajectory = Trajectory(f"coin/{i // GROUP}", i % GROUP, "You are in a kitchen.", tuple(turns), outcome)
    score = Score({"success": Verdict(float(solved))}, tuple(t.reward for t in turns), float(solved))
    return encode(TrajectoryRecord(step, STAGE, "train", trajectory.task_id, trajectory, score, tuple(advantages)))


def make(folder: Path, n_steps: int, n_attempts: int) -> None:
    rng = random.Random(0)
    (folder / "trajectories").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"name: made-up\nstages: [{{kind: policy_gradient, steps: {2 * n_steps}}}]\n")
    sink = JsonlSink(folder / "metrics.jsonl")
    table = pa.Table.from_pylist([attempt(rng, 1, i) for i in range(n_attempts)], schema=SCHEMA)
    place = SCHEMA.get_field_index("step")
    for step in range(1, n_steps + 1):
        own = table.set_column(place, SCHEMA.field(place), pa.array([step] * n_attempts, pa.int64()))
        pq.write_table(own, folder / "trajectories" / f"{STAGE}-train-{step:06d}.parquet", compression="zstd")
        sink.write(line(rng, step))
    sink.close()


def line(rng: random.Random, step: int) -> LogLine:
    names = [name for name in METRICS if not name.endswith("/*")][:90]
    values = {name: rng.random() for name in names} | {"rollout/success": rng.random(), "rollout/n_episodes": 500.0}
    return LogLine(step, STAGE, time.time(), values | {"time/rollout_s": 1.0, "time/train_s": 0.5, "time/step_s": 1.5})


def asked(url: str) -> tuple[float, int]:
    begun = time.perf_counter()
    with urllib.request.urlopen(url, timeout=120) as answer:
        n = len(answer.read())
    return time.perf_counter() - begun, n


def addresses(n_steps: int) -> dict[str, str]:
    step = {"stage": STAGE, "phase": "train", "step": n_steps}
    names = "rollout/success,loss/total,loss/approx_kl,loss/entropy,time/rollout_s,time/train_s"
    queries: dict[str, tuple[str, dict[str, Any]]] = {
        "the page": ("", {}),
        "runs": ("api/runs", {}),
        "a run": ("api/run/made-up", {}),
        "its curves": ("api/run/made-up/metrics", {"names": names}),
        "its steps": ("api/run/made-up/steps", {}),
        "groups of a step": ("api/run/made-up/groups", step),
        "groups of the first step": ("api/run/made-up/groups", step | {"step": 1}),
        "groups with a text": ("api/run/made-up/groups", step | {"text": "north door"}),
        "an attempt": ("api/run/made-up/trajectory", step | {"row": 7}),
        "a text in all steps, first hits": ("api/run/made-up/search", {"text": "north door"}),
        "a text that is nowhere, a budget of 1 s": ("api/run/made-up/search", {"text": "nowhere"}),
    }
    return {name: f"{path}?{urllib.parse.urlencode(query)}" for name, (path, query) in queries.items()}


def delays(url: str, folder: Path, n_steps: int, n: int = 20) -> list[float]:
    rng, sink, found = random.Random(1), JsonlSink(folder / "metrics.jsonl"), []
    with urllib.request.urlopen(f"{url}api/run/made-up/events?since=0:{n_steps}", timeout=60) as stream:
        events = (raw for raw in stream if raw.startswith(b"data: "))
        next(events)
        for step in range(n_steps + 1, n_steps + n + 1):
            time.sleep(rng.random() / 2)
            sink.write(line(rng, step))
            begun = time.perf_counter()
            while json.loads(next(events)[6:])["head"]["step"] < step:
                pass
            found.append(time.perf_counter() - begun)
    return found


#: Pages that are opened in a browser, and what is there once they are drawn.
PAGES = {
    "runs": ("runs", ".chart canvas"),
    "curves": ("run/made-up", ".chart canvas"),
    "attempts": ("groups/made-up", "a.cell"),
    "an attempt": (f"attempt/made-up?stage={STAGE}&phase=train&step=1&row=3", ".turns .t"),
}


def painted(url: str, folder: Path, n_steps: int, n: int = 5) -> None:
    """Print the seconds of pages in a browser; `n_steps` lines are in the log."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        print("| in Chromium | first paint, median | drawn, median |\n|---|---|---|")
        for name, (where, there) in PAGES.items():
            first, drawn = [], []
            for _ in range(n):
                page = browser.new_context().new_page()
                begun = time.perf_counter()
                page.goto(f"{url}#/{where}")
                page.wait_for_selector(there)
                drawn.append(time.perf_counter() - begun)
                paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                first.append(page.evaluate(paint) / 1000)
                page.context.close()
            print(f"| {name} | {statistics.median(first):.2f} s | {statistics.median(drawn):.2f} s |", flush=True)
        page = browser.new_page()
        page.goto(f"{url}#/run/made-up")
        page.wait_for_selector("#live.on")
        rng, sink, found = random.Random(2), JsonlSink(folder / "metrics.jsonl"), []
        for step in range(n_steps + 1, n_steps + 2 * n + 1):
            sink.write(line(rng, step))
            begun = time.perf_counter()
            page.wait_for_selector(f".tile:has-text('{step} of ')")
            found.append(time.perf_counter() - begun)
        middle, worst = statistics.median(found), max(found)
        print(f"| a new line is seen, median and most of {len(found)} | {middle:.2f} s | {worst:.2f} s |", flush=True)
        browser.close()


#: A run of a few seconds that stores attempts at each step, as every run does.
SHORT = """
name: short
policy: {kind: from_scratch, hidden_size: 64, n_layers: 2, n_heads: 2, max_context: 512}
environment: {kind: babyai, level: GoToObj, max_steps: 8}
agent: {kind: chat, system: ""}
rewards: {success: {kind: outcome}}
limits: {max_turns: 8, max_tokens: 8}
evaluation: {n_tasks: 8}
stages: [{kind: policy_gradient, steps: 12, tasks_per_step: 4, group_size: 8}]
"""


def follow(url: str, run: str, over: threading.Event) -> None:
    """Client that acts as a page: it receives each line and opens the newest groups."""
    while run not in [one["id"] for one in json.load(urllib.request.urlopen(f"{url}api/runs", timeout=60))["runs"]]:
        time.sleep(0.2)
    with urllib.request.urlopen(f"{url}api/run/{run}/events", timeout=120) as stream:
        for raw in stream:
            if over.is_set():
                return
            told = json.loads(raw[6:]) if raw.startswith(b"data: ") else {}
            if newest := told.get("newest"):
                asked(f"{url}api/run/{run}/groups?{urllib.parse.urlencode(newest)}")
                asked(f"{url}api/run/{run}/trajectory?{urllib.parse.urlencode({**newest, 'row': 0})}")


def trained(recipe: Path, folder: Path, is_watched: bool, *overrides: str) -> float:
    """Processor seconds of a training process, and of it alone."""
    folder.mkdir()
    over, server = threading.Event(), None
    if is_watched:
        command = [sys.executable, "-m", "rlhf.cli", "view", str(folder), "--port", "0", "--json"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        threading.Thread(target=follow, args=(url, folder.name, over), daemon=True).start()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlhf.cli", "train", str(recipe), *overrides, "--out", str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    over.set()
    if server is not None:
        server.kill()
        server.wait()
    if status:
        sys.exit(f"the training failed: {status}")
    return used.ru_utime + used.ru_stime


def cost(n: int, *overrides: str) -> None:
    """Print the ratios of processor seconds of `n` pairs, and the 95% interval of the mean.

    Args:
        n: pairs.
        overrides: that the second run of each pair has; without any it is watched.
    """
    ratios, what = [], "with the key" if overrides else "watched"
    print(f"| pair | alone | {what} | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        recipe = Path(home) / "short.yaml"
        recipe.write_text(SHORT)
        trained(recipe, Path(home) / "warm", False)  # caches of files are filled before anything is compared
        for i in range(n):
            found = {}
            for changed in (False, True) if i % 2 else (True, False):
                folder = Path(home) / f"{i}-{changed}"
                found[changed] = trained(recipe, folder, changed and not overrides, *(overrides if changed else ()))
            ratios.append(found[True] / found[False])
            print(f"| {i + 1} | {found[False]:.2f} s | {found[True]:.2f} s | {ratios[-1]:.3f} |", flush=True)
        if overrides:
            (n_tokens, less), (_, more) = (stored(Path(home) / f"0-{changed}") for changed in (False, True))
            print(f"| bytes a token of {n_tokens:,} | {less / n_tokens:.1f} | {more / n_tokens:.1f} | |")
    mean = mean_interval(ratios)
    print(f"| mean, 95% interval | | | {mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f}) |")


def stored(folder: Path) -> tuple[int, int]:
    """Sampled tokens of a run's training, and bytes of the files that they are stored in."""
    files = list((folder / "trajectories").glob("*-train-*.parquet"))
    tokens = (pc.sum(pq.read_table(path, columns=["n_tokens"])["n_tokens"]).as_py() for path in files)
    return sum(tokens), sum(path.stat().st_size for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="where the run is made, or was")
    parser.add_argument(
        "--cost", type=int, metavar="N", help="measure what it costs training, by so many pairs of runs"
    )
    parser.add_argument("--figures", type=int, metavar="N", help="measure the key token_stats, by so many pairs")
    given = parser.parse_args()
    if given.cost or given.figures:
        cost(given.cost or given.figures, *["stages.0.token_stats={}"] * bool(given.figures))
        return
    with tempfile.TemporaryDirectory() as home:
        folder = (given.folder or Path(home)) / "made-up"
        if not folder.is_dir():
            make(folder, given.steps, given.attempts)
        command = [sys.executable, "-m", "rlhf.cli", "view", str(folder), "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            begun = time.perf_counter()
            url, process = json.loads(server.stdout.readline())["url"], psutil.Process(server.pid)
            print(f"| ready after | {time.perf_counter() - begun:.2f} s | |\n|---|---|---|")
            most = 0.0
            print("| asked for | first | again |")
            for name, path in addresses(given.steps).items():
                (first, size), (again, _) = asked(url + path), asked(url + path)
                most = max(most, process.memory_info().rss / 1e6)
                print(f"| {name} ({size / 1e3:.0f} kB) | {first:.3f} s | {again:.3f} s |", flush=True)
            place = f"{url}api/run/made-up/trajectory?stage={STAGE}&phase=train&row=3&step="
            for n_clients in (1, 8):  # many steps, one after another, then by as many clients
                with ThreadPoolExecutor(n_clients) as clients:
                    steps = range(1, given.steps, max(1, given.steps // 100))
                    list(clients.map(lambda step: asked(f"{place}{step}"), steps))
                most = max(most, process.memory_info().rss / 1e6)
            n_lines = sum(1 for _ in (folder / "metrics.jsonl").open())
            found = delays(url, folder, n_lines)
            middle, worst = statistics.median(found), max(found)
            print(f"| live delay, median and most of {len(found)} | {middle:.2f} s | {worst:.2f} s |")
            if find_spec("playwright") and shutil.which("chromium"):
                painted(url, folder, n_lines + len(found))
            print(f"| resident memory of the server, most | {max(most, process.memory_info().rss / 1e6):.0f} MB | |")
            server.terminate()


if __name__ == "__main__":
    main()
