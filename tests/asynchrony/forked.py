"""Runs of two processes, forked from a server that has loaded torch and DeepSpeed once, so that many can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch

from rlhf.processes import free_port
from tests.training import runs

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["rlhf.cli", "rlhf.build.train", "peft", "deepspeed"])

#: Longest that a run of a test may take.
LIMIT_S = 600.0


def run(path: Path, out: Path, n: int = 2) -> list[int]:
    """Train, or go on where `out` is a run, in `n` processes; exit codes, minus the signal of one that was killed.

    Once one has ended otherwise than well the others have the time to end by themselves; what they say is in `out`.txt.
    """
    port, is_resumed = free_port(), (out / "recipe.yaml").is_file()
    ranks = [_CONTEXT.Process(target=_main, args=(rank, n, port, path, out, is_resumed)) for rank in range(n)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
        process.kill()
        process.join()
    return [int(process.exitcode or 0) for process in ranks]


def _main(rank: int, n: int, port: int, path: Path, out: Path, is_resumed: bool) -> None:
    log = os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    runs.run(path, out, resume=is_resumed)
