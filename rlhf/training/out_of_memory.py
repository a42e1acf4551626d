"""Out-of-memory errors of a stage, with the recipe keys to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlhf.device import allocation_failure
from rlhf.errors import EngineError, RlhfError, TrainingError

#: Keys that say how much one pass takes; a stage has one of them.
_BUDGETS = ("max_tokens_per_microbatch", "pairs_per_microbatch")


@contextmanager
def explain_out_of_memory(stage: Any, index: int, folder: Path) -> Iterator[None]:
    """Context that turns a failed allocation into a TrainingError with the key that needs less, and how to go on.

    An EngineError stays: no micro-batch has to do with it.

    Args:
        stage: that is trained, number `index` of the recipe.
        index: see there.
        folder: of the run.
    """

    def explained(said: str) -> TrainingError:
        has = {field.name for field in fields(stage)}
        half = [f"stages.{index}.{key}={max(vars(stage)[key] // 2, 1)}" for key in _BUDGETS if key in has]
        again = f"stages.{index}{'.trainer' * ('trainer' in has)}.gradient_checkpointing=true"
        return TrainingError(
            "out of memory",
            where=f"stages[{index}]",
            got=said,
            expected="memory for a micro-batch beside weights, moments and the engine",
            hint=f"{' '.join(['rlhf train --resume', str(folder), *half])} goes on; {again} takes less too, and "
            f"rlhf show {folder} lists the memory by use",
        )

    with _explained_by(explained):
        yield


@contextmanager
def explain_engine_out_of_memory(folder: Path, where: str) -> Iterator[None]:
    """Context that turns a failed allocation of rollouts into an EngineError with the keys that need less.

    Args:
        folder: of the run.
        where: the step.
    """

    def explained(said: str) -> EngineError:
        return EngineError(
            "out of memory during rollouts",
            where=where,
            got=said,
            expected="memory for episodes beside the weights",
            hint="lower limits.max_concurrent, engine.max_sessions, engine.max_batch_tokens or, of vLLM, "
            f"engine.gpu_memory_utilization: rlhf train --resume {folder} KEY=VALUE goes on; "
            "a new run also takes less with a lower limits.max_tokens or limits.max_context",
        )

    with _explained_by(explained):
        yield


@contextmanager
def _explained_by(explained: Callable[[str], RlhfError]) -> Iterator[None]:
    """Context that raises what `explained` returns of the words of a failed allocation."""
    try:
        yield
    except Exception as error:
        said = allocation_failure(error)
        if said is None or isinstance(error, EngineError):
            raise
        raise explained(" ".join(said.split())[:300]) from error
