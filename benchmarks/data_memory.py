"""Memory of a question file that is held, and of one whose rows are read when they are drawn.

    python benchmarks/data_memory.py --gb 1

A file of JSON lines is written; then each way, in a process of its own, lists its training tasks and draws 1,000 in a
shuffled order. Printed are the bytes that the process came to hold beyond its libraries (`RssAnon`, which leaves
out pages of files), seconds, and the ratio to holding all; the tasks drawn are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

N_DRAWN = 1_000


def resident() -> int:
    """Bytes that this process holds, pages of files left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def child(path: Path, max_held_mb: int) -> None:
    """List, draw, and print what it took."""
    from environments.tasks.dataset import Dataset
    from rlhf.rollout.tasks import tasks_of
    from rlhf.tasks.shuffled import Shuffled

    before, begin = resident(), time.perf_counter()
    tasks = tasks_of(Dataset(path=path, max_held_mb=max_held_mb), "train")
    listed = time.perf_counter()
    drawn = Shuffled().start(tasks, 0).draw(N_DRAWN)
    ended = time.perf_counter()
    ids = hashlib.sha256(" ".join(task.id for task in drawn).encode()).hexdigest()
    found = {"bytes": resident() - before, "list_s": listed - begin, "draw_s": ended - listed, "ids": ids}
    print(json.dumps(found | {"n": len(tasks)}))


def write(path: Path, size: float) -> None:
    """Write questions of some 1,000 characters until the file has `size` bytes."""
    draw = random.Random(0)
    words = [f"word{n}" for n in range(10_000)]
    with path.open("w") as file:
        for n in range(1 << 60):
            text = " ".join(draw.choices(words, k=125))
            file.write(json.dumps({"question": f"{n}: {text}", "answer": n}) + "\n")
            if n % 1_000 == 0 and file.tell() >= size:
                return


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(Path(asked.child[0]), int(asked.child[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        write(path, asked.gb * 1e9)
        found = {}
        for name, held in (("held", 1 << 40), ("read", 0)):
            command = [sys.executable, __file__, "--child", str(path), str(held)]
            found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            own = found[name]
            size = f"{own['bytes'] / 1e6:,.0f} MB, {own['bytes'] / own['n']:,.0f} bytes a task"
            print(
                f"{name}: {own['n']:,} tasks, {size}, listed in {own['list_s']:.1f} s, drawn in {own['draw_s']:.2f} s"
            )
    assert found["held"]["ids"] == found["read"]["ids"], "the ways draw other tasks"
    print(f"memory: {found['read']['bytes'] / found['held']['bytes']:.4f} of holding all")


if __name__ == "__main__":
    main()
