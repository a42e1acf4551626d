"""The choice of how weights reach an instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.errors import EngineError

#: How weights reach an instance: in a GPU's memory, by NCCL or gloo, in this machine's memory, or in messages.
Route = Literal["cuda_ipc", "broadcast", "shared_memory", "http"]

#: What may be asked for; `auto` takes the first that is possible.
Way = Literal["auto", "cuda_ipc", "broadcast", "shared_memory", "http"]


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of an instance and of the sender, and whether the instance sees this machine's memory.

    Attributes:
        name: of the instance.
        sees_memory: whether it sees the memory of the sender's machine.
        gpus: of its workers; empty for one without.
        here: the sender's GPU; empty without one.
        folder: of the sender's memory.
    """

    name: str
    sees_memory: bool
    gpus: Sequence[str] = ("",)
    here: str = ""
    folder: str = ""

    @property
    def is_same_gpu(self) -> bool:
        """True if all is on one GPU."""
        return bool(self.here) and set(self.gpus) == {self.here}

    @property
    def is_apart(self) -> bool:
        """True if a group can be formed: of GPUs that differ, as NCCL takes none twice, or of CPUs."""
        return self.here not in self.gpus and all(self.gpus) if self.here else not any(self.gpus)


def route(way: Way, placement: Placement) -> Route:
    """The way that was asked for, or the first possible; `auto` broadcasts to GPUs of this machine only.

    Raises:
        EngineError: it is not possible.
    """
    if way == "auto":
        if placement.is_same_gpu:
            return "cuda_ipc"
        if not placement.sees_memory:
            return "http"
        return "broadcast" if placement.here and placement.is_apart else "shared_memory"
    theirs = ", ".join(gpu or "a CPU" for gpu in placement.gpus)
    where = f"engine.delivery {way}, {placement.name}"
    if way == "cuda_ipc" and not placement.is_same_gpu:
        raise EngineError(
            "the engine is not on this process's GPU",
            where=where,
            got=theirs,
            expected=placement.here or "a process with a GPU",
            hint="set engine.delivery: auto",
        )
    if way == "broadcast" and not placement.is_apart:
        raise EngineError(
            "trainer and engine cannot join one process group",
            where=where,
            got=f"the engine on {theirs}, this process on {placement.here or 'a CPU'}",
            expected="GPUs that differ, or no GPU on either side",
            hint="set engine.delivery: auto",
        )
    if way == "shared_memory" and not placement.sees_memory:
        raise EngineError(
            "the server does not see this machine's memory",
            where=where,
            got=f"nothing to be read at {placement.folder}",
            expected="a server of the same user on the same machine, in a container with the same /dev/shm",
            hint="set engine.delivery: auto, which sends weights to such a server",
        )
    return way
