"""Memory metrics of this process."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

#: Of `ru_maxrss`: Linux counts in kibibytes, macOS in bytes.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def used_memory() -> dict[str, float]:
    """Current and peak memory of the process, in 1e9 bytes; of a GPU, tensors only."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    found = {"memory/rss_gb": psutil.Process().memory_info().rss / 1e9, "memory/peak_gb": peak / 1e9}
    if torch.cuda.is_available():
        found["memory/gpu_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found
