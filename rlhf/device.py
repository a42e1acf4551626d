"""Description of the device that a run trains on: what is chosen and refused by hardware asks this alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Device:
    """One device, and how many of its kind this process sees.

    Attributes:
        name: as the driver has it.
        memory_bytes: of one.
        capability: CUDA's compute capability, such as (9, 0) of an H100; None of a CPU.
        n: devices.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    n: int = 1

    @property
    def is_gpu(self) -> bool:
        """True for a GPU."""
        return self.capability is not None

    @property
    def has_bfloat16(self) -> bool:
        """True if matrix units take bfloat16: CPUs, and GPUs from Ampere on."""
        return self.capability is None or self.capability >= (8, 0)

    @property
    def has_flash(self) -> bool:
        """True if it has variable-length flash attention: GPUs from Ampere on."""
        return self.capability is not None and self.capability >= (8, 0)

    @property
    def has_triton(self) -> bool:
        """True if Triton, and so torch.compile, makes kernels for it: GPUs from Volta on."""
        return self.capability is not None and self.capability >= (7, 0)

    @property
    def has_fp8(self) -> bool:
        """True if matrix units take 8-bit floats: GPUs from Ada and Hopper on."""
        return self.capability is not None and self.capability >= (8, 9)


@cache
def present() -> Device:
    """The device of this process. Asks CUDA: a process that is to take one of several GPUs does so before."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", int(psutil.virtual_memory().total))
    found = torch.cuda.get_device_properties(0)
    return Device(found.name, int(found.total_memory), (found.major, found.minor), torch.cuda.device_count())
