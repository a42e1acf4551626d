"""Preflight check that a run fits into the free memory, before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import ModelError, RecipeError
from rlhf.estimate.figures import total

if TYPE_CHECKING:
    from rlhf.estimate.figures import Estimate, Part
    from rlhf.recipe import Recipe

#: Where Linux says how much memory the processes of a container may have, and have.
_CGROUP = Path("/sys/fs/cgroup")

_ASK_GPU = "import torch; print(*(torch.cuda.mem_get_info() if torch.cuda.is_available() else ()))"


def refuse_too_large(recipe: Recipe, n_processes: int = 1, n_here: int = 1, *, launches: bool = False) -> None:
    """Raise where a stage cannot fit; where the model's configuration cannot be read, loading it will tell.

    Args:
        recipe: to be trained.
        n_processes: that share every step.
        n_here: of them, on this machine.
        launches: whether this process only starts those.

    Raises:
        RecipeError: more memory is needed than is free: what takes most of it, and which key changes that.
    """
    from rlhf.estimate.memory import estimates

    try:
        found = estimates(recipe, n_processes)
    except ModelError:
        return
    gpu, host = free_gpu(in_passing=n_here > 1), free_memory()
    for estimate in found:
        if gpu is not None:
            check(estimate, parts_on_gpu(recipe, estimate, gpu[1]), gpu[0], "the GPU")
        of_host = list(estimate.parts if gpu is None else estimate.parts_of(host=True))
        if not launches:  # interpreter and libraries of this process are there already
            of_host = [
                replace(p, n_bytes=p.n_bytes * (n_here - 1) // n_here) if p.name == "program" else p for p in of_host
            ]
        check(estimate, [replace(p, n_bytes=p.n_bytes * n_here) for p in of_host], host, "this machine")


def check(estimate: Estimate, parts: Sequence[Part], free: int, whose: str) -> None:
    """Raise RecipeError if the parts need more memory than is free."""
    needed = sum(part.n_bytes for part in parts)
    if needed <= free:
        return
    ordered = sorted(parts, key=lambda part: -part.n_bytes)
    shown = ", ".join(f"{part.name} {size_of(part.n_bytes)}" for part in ordered[:4] if part.n_bytes)
    raise RecipeError(
        "this run needs more memory than is free",
        where=estimate.path,
        got=f"{size_of(needed)} at the highest: {shown}",
        expected=f"at most {size_of(free)}, which {whose} has free",
        hint=f"most is {ordered[0].name}: {estimate.change(ordered[0])}; --no-memory-check starts anyway",
    )


def parts_on_gpu(recipe: Recipe, estimate: Estimate, all_of_gpu: int) -> list[Part]:
    """Parts of memory at the peak of a GPU; an engine that sleeps is not there during an update."""
    found = estimate.on_gpu(all_of_gpu)
    peak, held = list(found.parts_of(host=False)), [part for part in found.held if not part.on_host]
    if not _sleeps(recipe, estimate):
        return with_engine_share(recipe, peak, all_of_gpu)
    updating = [part for part in peak if part.name not in ("engine", "kv_cache")]
    return max(updating, with_engine_share(recipe, held, all_of_gpu), key=total)


def _sleeps(recipe: Recipe, estimate: Estimate) -> bool:
    """True if the engine sleeps during the updates of a stage: those of policy gradients."""
    from rlhf.inference.settings import VllmSettings
    from rlhf.training.stages.policy_gradient import PolicyGradient

    engine, stage = recipe.engine, recipe.stages[estimate.number]
    return isinstance(engine, VllmSettings) and engine.sleep and isinstance(stage, PolicyGradient)


def with_engine_share(recipe: Recipe, parts: list[Part], all_of_gpu: int) -> list[Part]:
    """Parts with a separate engine's weights and cache raised to its share of the GPU."""
    from rlhf.estimate.memory import samples_elsewhere
    from rlhf.inference.settings import VllmSettings

    engine = recipe.engine
    if not isinstance(engine, VllmSettings) or engine.kv_cache_gb is not None or samples_elsewhere(recipe):
        return parts  # with a size of its own the cache is counted, and vLLM ignores the share
    others = [part for part in parts if part.name not in ("engine", "kv_cache")]
    [own] = [part for part in parts if part.name == "engine"]
    return [*others, replace(own, n_bytes=max(own.n_bytes, int(engine.gpu_memory_utilization * all_of_gpu)))]


def size_of(n_bytes: float) -> str:
    """Write a number of bytes for a person."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def free_memory() -> int:
    """Bytes of the machine that new tensors can have; in a container, of what it may use."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return free
        counted = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(counted.get("inactive_file", 0))  # counted as used, and given back as soon as it is asked for
        return min(free, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # another system, or no container
        return free


def free_gpu(*, in_passing: bool = False) -> tuple[int, int] | None:
    """Bytes of the GPU that are free, and all; None without one.

    With `in_passing` a process of a moment asks: whoever asks CUDA holds some of the memory on, and cannot choose
    another GPU any more.
    """
    import torch

    if torch.version.cuda is None:
        return None
    if not in_passing:
        return torch.cuda.mem_get_info() if torch.cuda.is_available() else None
    answer = subprocess.run([sys.executable, "-c", _ASK_GPU], capture_output=True, text=True)
    found = [int(number) for number in answer.stdout.split()]
    return (found[0], found[1]) if len(found) == 2 else None
