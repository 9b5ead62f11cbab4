"""What a probe has read: how many bytes are in use, and how many may be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReading:
    """Bytes in use and the bytes that may be.

    Attributes:
        used_bytes: In use.
        limit_bytes: How many this process can have in use, with what it has now.

    Raises:
        ValueError: If `used_bytes` is negative, or `limit_bytes` is not positive.
    """

    used_bytes: int
    limit_bytes: int

    def __post_init__(self) -> None:
        if self.used_bytes < 0:
            raise ValueError(f"used_bytes={self.used_bytes} is negative; give 0 or more")
        if self.limit_bytes <= 0:
            raise ValueError(f"limit_bytes={self.limit_bytes} leaves no memory at all; give 1 or more")

    @property
    def pressure(self) -> float:
        """Part of the limit that is in use. Above 1 where the limit is a wish, as a budget is."""
        return self.used_bytes / self.limit_bytes
