"""Description of the device that a run trains on: what is chosen and refused by hardware asks this alone."""

from __future__ import annotations

import platform
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
        slow_bfloat16: whether a CPU has no instructions for products of bfloat16 matrices, and converts each number.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    n: int = 1
    slow_bfloat16: bool = False

    @property
    def is_gpu(self) -> bool:
        """True for a GPU."""
        return self.capability is not None

    @property
    def has_bfloat16(self) -> bool:
        """True if it multiplies bfloat16 matrices well: GPUs from Ampere on, CPUs with instructions for it."""
        return not self.slow_bfloat16 if self.capability is None else self.capability >= (8, 0)

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
        return Device("cpu", int(psutil.virtual_memory().total), slow_bfloat16=_cpu_converts_bfloat16())
    found = torch.cuda.get_device_properties(0)
    return Device(found.name, int(found.total_memory), (found.major, found.minor), torch.cuda.device_count())


def _cpu_converts_bfloat16() -> bool:
    """Whether PyTorch multiplies bfloat16 matrices number by number: on x86 without AVX-512."""
    import torch

    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2")


#: Signs of an allocation that failed: of CUDA, and of PyTorch on a CPU, which has no error of its own.
_FAILED = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


def allocation_failure(error: BaseException | None) -> str | None:
    """Message of the failed allocation that an error or one of its causes is; None where none is."""
    while error is not None:
        said = str(error)
        if isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and any(sign in said for sign in _FAILED)
        ):
            return said or "no memory left"
        error = error.__cause__
    return None
