"""Reads the memory of a CUDA device."""

import torch
from typing_extensions import override

from lightning_hpc.memory.cuda_peak import CudaPeak
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.reading import MemoryReading


class CudaProbe(PressureProbe):
    """What the caching allocator has handed out, and how much it could.

    In use is the most since the last reading (see `CudaPeak` on what that resets). The limit is what is free on the
    device plus what the allocator has reserved already, or less if `torch.cuda.set_per_process_memory_fraction` says
    so. CUDA's context, NCCL's buffers and other processes are in neither, so they make the limit smaller.

    Args:
        device: A CUDA device; without an index the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._peak = CudaPeak(self._device)

    @override
    def read(self) -> MemoryReading:
        """Bytes. Asks the driver, but does not wait for the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        limit = min(free + torch.cuda.memory_reserved(self._device), allowed)
        return MemoryReading(self._peak.read(), max(limit, 1))
