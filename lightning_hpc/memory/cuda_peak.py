"""The highest number of bytes allocated on a CUDA device between two readings."""

from weakref import WeakSet

import torch

# There is one counter a device and process, and reading a peak anew means to reset it. Without knowing of each other,
# two readers would take each other's peaks away.
_readers: "WeakSet[CudaPeak]" = WeakSet()


class CudaPeak:
    """Most bytes of the caching allocator since the last reading of this object; any number of them may read a device.

    A reading resets the allocator's peaks (`torch.cuda.reset_peak_memory_stats`), so what
    `torch.cuda.max_memory_allocated` returns counts from the last reading.

    Args:
        device: A CUDA device with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0
        _readers.add(self)

    def read(self) -> int:
        """Bytes."""
        peak = torch.cuda.max_memory_allocated(self._device)
        for reader in _readers:
            if reader._device == self._device:
                reader._highest = max(reader._highest, peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        highest, self._highest = self._highest, 0
        return highest
