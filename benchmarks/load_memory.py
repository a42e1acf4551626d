"""Peak memory of each of two processes while a pretrained policy is loaded: whole, and in pieces.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --layers 24 --only fsdp

A model of random weights is written to a folder in bfloat16 and loaded in float32, as a model of a hub is by default.
For each trainer that cuts weights, two gloo processes on the CPU load it whole, as a policy of any other trainer is,
and two others load it in pieces, each in a fresh process. Printed is by how many bytes a process grew at most. Resident
memory is all that it had mapped, pages of the file included; private memory leaves these out, which the kernel may
drop. The ratios of one run are what to look at.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from rlhf.build.processes import check_alike  # noqa: E402
from rlhf.training.backends.optimizer import AdamW  # noqa: E402
from rlhf.training.backends.settings import DeepSpeed, Fsdp  # noqa: E402
from rlhf.training.backends.sharding import layout_of  # noqa: E402
from rlhf.training.policy.model import FromScratch, Policy, Pretrained  # noqa: E402
from rlhf.training.policy.sharded_load import ShardedLoad  # noqa: E402
from tests.training.together import together  # noqa: E402

KINDS: dict[str, Any] = {"fsdp": Fsdp(timeout_s=300), "zero3": DeepSpeed(zero_stage=3, timeout_s=300)}
#: Seconds between two looks at the process's memory.
EVERY_S = 0.002


def peak_of(work: Callable[[], Any]) -> dict[str, float]:
    """Do `work`; returns by how many bytes resident and private memory grew at most, and seconds."""
    before, most, done = sizes(), sizes(), threading.Event()

    def look() -> None:
        while not done.wait(EVERY_S):
            most.update({name: max(size, most[name]) for name, size in sizes().items()})

    watcher = threading.Thread(target=look)
    watcher.start()
    begun = time.perf_counter()
    try:
        kept = work()
    finally:
        done.set()
        watcher.join()
    del kept
    return {name: most[name] - size for name, size in before.items()} | {"seconds": time.perf_counter() - begun}


def sizes() -> dict[str, float]:
    """Bytes of this process that are in memory: all of them, and those that are no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: 1024.0 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return {"resident": sum(found.values()), "private": found["RssAnon"]}


def measured(rank: int, folder: Path, *, kind: str, in_pieces: bool) -> dict[str, float]:
    """Measurement in each process, after a small model has imported everything."""
    trainer = KINDS[kind]
    trainer.start(loaded(folder / "small", trainer, in_pieces), AdamW(), 1)
    return peak_of(partial(loaded, folder / "model", trainer, in_pieces))


def loaded(folder: Path, trainer: Any, in_pieces: bool) -> Policy:
    """A policy as a run has it before its first stage; without pieces, the trainer has still to cut it."""
    load = ShardedLoad(layout_of([trainer])) if in_pieces else None
    policy = Pretrained(path=str(folder)).build(0, loader=load.loader if load else None)
    if load:
        load.fill(policy)
    check_alike(policy)
    return policy


def main() -> None:
    """Print a line for each trainer, and all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of 13.6 MB each in float32")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, layers in (("small", 1), ("model", given.layers)):
            width = {"hidden_size": 512, "n_heads": 8, "head_dim": 64} if name == "model" else {"hidden_size": 32}
            policy = FromScratch(n_layers=layers, vocab_size=600, **width).build(0, ["some words to read"])  # type: ignore[arg-type]
            size = 4 * policy.n_parameters
            policy.model.to(torch.bfloat16)
            policy.save(folder / name)
        for kind in given.only:
            for in_pieces in (False, True):
                work = partial(measured, kind=kind, in_pieces=in_pieces)
                figures.setdefault(kind, {})["in pieces" if in_pieces else "whole"] = together(
                    work, folder, timeout_s=600
                )
            print(line_of(kind, figures[kind], size), flush=True)
    print(json.dumps({"model_bytes": size, "figures": figures}))


def line_of(kind: str, found: dict[str, Any], size: int) -> str:
    peaks = {how: {key: max(one[key] for one in of) for key in ("resident", "private")} for how, of in found.items()}
    parts = [
        f"{key} {peaks['whole'][key] / 1e6:.0f} MB whole, {peaks['in pieces'][key] / 1e6:.0f} MB in pieces "
        f"({peaks['in pieces'][key] / peaks['whole'][key]:.2f} of it)"
        for key in ("resident", "private")
    ]
    return f"{kind}, a model of {size / 1e6:.0f} MB in two processes, peak of one: {'; '.join(parts)}"


if __name__ == "__main__":
    main()
