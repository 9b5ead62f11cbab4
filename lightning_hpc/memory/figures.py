"""All figures of a device's memory that go into a trace."""

import sys

import torch

from lightning_hpc.memory.allocator_counts import AllocatorCounts
from lightning_hpc.memory.default_probe import default_probe
from lightning_hpc.memory.nvml import NvmlDevice, NvmlReading


class MemoryFigures:
    """Reads the figures of a device; those of rates and peaks are for the time since the last reading.

    Args:
        device: Any device. Where it has no such figure, the figure is None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Linux knows a process's memory, other systems do not.
        self._probe = default_probe(device) if device.type == "cuda" or _is_host(device) else None
        self._nvml = NvmlDevice(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
        self._first = self._last = self._read_counts()

    def read(self) -> dict[str, float | None]:
        """The figures, by their key in a trace file: see `lightning_hpc.callbacks.MemoryMonitor`."""
        reading = None if self._probe is None else self._probe.read()
        gpu = NvmlReading() if self._nvml is None else self._nvml.read()
        return {
            "memory_used_bytes": None if reading is None else reading.used_bytes,
            "memory_limit_bytes": None if reading is None else reading.limit_bytes,
            **self._read_allocator(),
            "gpu_used_bytes": gpu.used_bytes,
            "gpu_utilization": gpu.utilization,
        }

    def close(self) -> None:
        """Gives NVML back."""
        if self._nvml is not None:
            self._nvml.close()

    def _read_allocator(self) -> dict[str, float | None]:
        before, counts = self._last, self._read_counts()
        self._last = counts
        if self._first is None or before is None or counts is None:
            keys = ("memory_reserved_bytes", "memory_hit_rate", "memory_fragmentation", "memory_retries")
            return dict.fromkeys(keys)
        return {
            "memory_reserved_bytes": counts.reserved_bytes,
            "memory_hit_rate": counts.hit_rate(before),
            "memory_fragmentation": counts.fragmentation,
            "memory_retries": counts.retries - self._first.retries,
        }

    def _read_counts(self) -> AllocatorCounts | None:
        # Others count only a part, and give zero for the rest.
        if self._device.type != "cuda" or torch.cuda.memory.get_allocator_backend() != "native":
            return None
        return AllocatorCounts.from_stats(torch.cuda.memory_stats(self._device))


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"
