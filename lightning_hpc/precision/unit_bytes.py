"""`UnitBytes`: what a unit saves for backward."""

from dataclasses import dataclass

# A saving below this part of what a unit saves for backward is not worth a rounding error.
_LEAST_SAVING = 0.01


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

    @property
    def is_useless(self) -> bool:
        """Whether that is next to nothing."""
        return self.saving < _LEAST_SAVING * self.plain
