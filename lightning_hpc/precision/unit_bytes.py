"""`UnitBytes`: what a unit saves for backward."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitBytes:
    """Bytes that the forward of one unit saves for backward and that no unit before it has saved already.

    Attributes:
        plain: In float32.
        low: In low precision; half of what is float32 in `plain`, and the rest of it, as long as it is not measured.
        inputs: Number of elements that the unit was given, since batches may differ in size.
        is_measured: Whether `low` is measured.
    """

    plain: int
    low: int
    inputs: int
    is_measured: bool = False

    @property
    def saving(self) -> int:
        """Bytes that low precision saves."""
        return self.plain - self.low
