import pytest

from lightning_hpc.memory.allocator_counts import AllocatorCounts


def counts(allocations: int = 0, device_allocations: int = 0, reserved: int = 0, stuck: int = 0) -> AllocatorCounts:
    return AllocatorCounts.from_stats(
        {
            "allocation.all.allocated": allocations,
            "num_device_alloc": device_allocations,
            "reserved_bytes.all.current": reserved,
            "inactive_split_bytes.all.current": stuck,
        }
    )


def test_the_hit_rate_is_that_of_the_time_between() -> None:
    assert counts(1100, 60).hit_rate(counts(1000, 50)) == pytest.approx(0.9)
    assert counts(1100, 300).hit_rate(counts(1000, 50)) == 0
    assert counts(1000, 50).hit_rate(counts(1000, 50)) is None


def test_fragmentation_is_a_part_of_what_is_reserved() -> None:
    assert counts(reserved=400, stuck=100).fragmentation == 0.25
    assert counts().fragmentation is None


def test_before_cuda_is_in_use_there_are_no_statistics() -> None:
    assert AllocatorCounts.from_stats({}) == AllocatorCounts(0, 0, 0, 0, 0, 0)
