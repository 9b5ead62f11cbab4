"""What everything that reads memory looks like from outside."""

from typing import Protocol

from lightning_hpc.memory.reading import MemoryReading


class PressureProbe(Protocol):
    """Reads how full the memory is. It never waits for a device."""

    def read(self) -> MemoryReading:
        """The most bytes in use since the last call, as far as there is a peak to read, or those in use now."""
        ...
