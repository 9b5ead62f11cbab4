"""Allocations that failed although enough was free in total, but in pieces."""

import re

from lightning_hpc.memory.allocator_counts import AllocatorCounts

_WANTED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Where the error does not say what was wanted: part of the reserved bytes that is stuck.
_FRAGMENTED = 0.1


def failed_for_pieces(error: BaseException, counts: AllocatorCounts, free_bytes: int) -> bool:
    """Whether the step may fit once what it holds, and then the allocator's cache, is freed.

    Args:
        error: Of `torch.cuda`'s allocator.
        counts: The allocator's when it failed, with the failed step still alive.
        free_bytes: What was free on the device.
    """
    wanted = _WANTED.search(str(error))
    if wanted is None:
        return (counts.fragmentation or 0.0) > _FRAGMENTED
    size = float(wanted[1]) * _UNITS[wanted[2]]
    return size <= free_bytes + counts.reserved_bytes - counts.allocated_bytes
