"""A probe with a limit of the user's."""

from typing_extensions import override

from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.reading import MemoryReading


class BudgetProbe(PressureProbe):
    """Reads what another probe reads, against a budget.

    Args:
        inner: What says how many bytes are in use.
        budget_bytes: How many may be.

    Raises:
        ValueError: If the budget is not positive.
    """

    def __init__(self, inner: PressureProbe, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes={budget_bytes} leaves no memory at all; give 1 or more")
        self._inner = inner
        self._budget_bytes = budget_bytes

    @override
    def read(self) -> MemoryReading:
        """What `inner` reads, with the budget as its limit, also where the device has less."""
        return MemoryReading(self._inner.read().used_bytes, self._budget_bytes)
