"""The memory of a CUDA device and PyTorch's allocator, without either."""

from typing import Any

import pytest
import torch


class FakeCudaMemory:
    """Figures that a test sets; `install` lets `torch.cuda` return them."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.reserved = self.allocated = self.peak = 0
        self.fraction = 1.0
        self.counters = {"allocation.all.allocated": 0, "num_device_alloc": 0, "num_alloc_retries": 0}
        self.inactive_split = 0
        self.backend = "native"
        self.devices: list[torch.device] = []

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        grown = max(self.allocated - self.reserved, 0)
        self.reserved += grown
        self.free -= grown

    def release(self, size: int) -> None:
        self.allocated -= size

    def empty_cache(self) -> None:
        self.free += self.reserved - self.allocated
        self.reserved = self.allocated

    def take(self, size: int) -> None:
        """What is allocated and freed at once stays in the cache."""
        if size > self.free + self.reserved - self.allocated:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        self.allocate(size)
        self.release(size)

    def stats(self, device: torch.device) -> dict[str, int]:
        self.devices.append(device)
        return {
            **self.counters,
            "reserved_bytes.all.current": self.reserved,
            "inactive_split_bytes.all.current": self.inactive_split,
        }

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.allocated

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCudaMemory":
        def fail(*args: Any) -> None:
            raise AssertionError("reading the memory must not wait for the device")

        functions = {
            "current_device": lambda: 1,
            "mem_get_info": lambda device: (self.free, self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "empty_cache": self.empty_cache,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": self.reset_peak,
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "memory_stats": self.stats,
            "synchronize": fail,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: self.backend)
        return self
