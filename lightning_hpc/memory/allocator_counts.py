"""The counters of PyTorch's caching allocator."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AllocatorCounts:
    """Counters of the caching allocator at one time.

    Attributes:
        allocations: Blocks that were asked for so far.
        device_allocations: Times that it had to ask the device for memory so far.
        retries: Times that the device had none left, and the cache was freed, so far.
        allocated_bytes: Handed out now.
        reserved_bytes: Held now.
        stuck_bytes: Held now in the free parts of blocks that are partly in use, so that they cannot be given back.
    """

    allocations: int
    device_allocations: int
    retries: int
    allocated_bytes: int
    reserved_bytes: int
    stuck_bytes: int

    @classmethod
    def from_stats(cls, stats: Mapping[str, int]) -> "AllocatorCounts":
        """Takes them from `torch.cuda.memory_stats`, which is empty as long as CUDA is not in use."""
        return cls(
            allocations=stats.get("allocation.all.allocated", 0),
            device_allocations=stats.get("num_device_alloc", 0),
            retries=stats.get("num_alloc_retries", 0),
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            stuck_bytes=stats.get("inactive_split_bytes.all.current", 0),
        )

    def hit_rate(self, before: "AllocatorCounts") -> float | None:
        """Part of the allocations since ``before`` that the cache served, 0 to 1; None if there was none."""
        allocations = self.allocations - before.allocations
        if allocations <= 0:
            return None
        # With expandable segments one block may take several calls.
        return max(1 - (self.device_allocations - before.device_allocations) / allocations, 0.0)

    @property
    def fragmentation(self) -> float | None:
        """Part of the reserved bytes that is stuck, 0 to 1; None if nothing is reserved."""
        return self.stuck_bytes / self.reserved_bytes if self.reserved_bytes else None
