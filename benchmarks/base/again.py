"""Whether the base's pretraining comes to the same weights again: from its start, and from a checkpoint in the middle.

    OMP_NUM_THREADS=1 python benchmarks/base/again.py runs/base-pretrain-seed0 --until 500
    OMP_NUM_THREADS=1 python benchmarks/base/again.py runs/base-pretrain-seed0 --start 1500 --until 2000

Checkpoints of these updates have to be there: in the run, or in the folder --kept, as a run keeps two.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def digest(checkpoint: Path) -> str:
    """SHA-256 of the weights of a checkpoint."""
    return hashlib.sha256((checkpoint / "policy" / "model.safetensors").read_bytes()).hexdigest()


def again(run: Path, kept: Path, start: int, until: int, folder: Path) -> Path:
    """Train from update `start` until the checkpoint of update `until` is there, in `folder`; returns that one."""
    words = [str(run / "recipe.yaml"), "--out", str(folder)]
    if start:
        shutil.copytree(
            run, folder, ignore=shutil.ignore_patterns("checkpoints", "result.json", "report.html", "*lock*")
        )
        for name in (name_of(0), name_of(start)):
            shutil.copytree(kept / name, folder / "checkpoints" / name)
        words = ["--resume", str(folder)]
    wanted = folder / "checkpoints" / name_of(until)
    process = subprocess.Popen([sys.executable, "-m", "rlhf.cli", "train", *words])
    while process.poll() is None and not (wanted / "state.json").is_file():
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.wait()
    return wanted


def name_of(update: int) -> str:
    """Of a checkpoint of the first stage."""
    return f"0-supervised-{update:06d}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--start", type=int, default=0, help="update of the checkpoint that is gone on from; 0 begins anew"
    )
    parser.add_argument("--until", type=int, default=500, help="update of the checkpoint that is compared")
    parser.add_argument("--kept", type=Path, help="folder of checkpoints; that of the run where nothing is said")
    asked = parser.parse_args()
    kept = asked.kept or asked.run / "checkpoints"
    with tempfile.TemporaryDirectory(prefix="base-again-") as folder:
        found = digest(again(asked.run, kept, asked.start, asked.until, Path(folder) / "run"))
    expected = digest(kept / name_of(asked.until))
    print(f"updates {asked.start} to {asked.until}: {found[:16]} again, {expected[:16]} before")
    sys.exit(found != expected)


if __name__ == "__main__":
    main()
