"""Several processes of one test, joined by gloo as a launcher would join them."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from rlhf.processes import free_port, join, leave


def together(work: Callable[[int, Path], Any], folder: Path, n: int = 2, *, timeout_s: float = 60.0) -> list[Any]:
    """What `work`, a function of a module, returns in each of `n` new processes, which wait for each other so long."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(_begin, args=(n, free_port(), folder, work, timeout_s), nprocs=n, join=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(n)]


def _begin(rank: int, n: int, port: int, folder: Path, work: Callable[[int, Path], Any], limit: float) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TOKENIZERS_PARALLELISM": "false"}
    faulthandler.enable()  # a crash in native code says where
    torch.set_num_threads(1)
    join(limit)
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    leave()
