"""A probe made of a function of the user's."""

from collections.abc import Callable

from typing_extensions import override

from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.reading import MemoryReading


class CallableProbe(PressureProbe):
    """Asks a function.

    Args:
        function: Returns a `MemoryReading`. It should take microseconds and not wait for a device.

    Raises:
        TypeError: In `read`, if it returns something else.
    """

    def __init__(self, function: Callable[[], MemoryReading]) -> None:
        self._function = function

    @override
    def read(self) -> MemoryReading:
        """What the function returns."""
        reading = self._function()
        # The function is the user's, whatever it says it returns.
        if not isinstance(reading, MemoryReading):
            raise TypeError(
                f"{self._function!r} returned {reading!r}; a probe returns MemoryReading(used_bytes, limit_bytes)"
            )
        return reading
