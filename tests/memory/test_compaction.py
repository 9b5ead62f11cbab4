import pytest
import torch

from lightning_hpc.memory.allocator_counts import AllocatorCounts
from lightning_hpc.memory.compaction import failed_for_pieces

GIB = 2**30


def counts(*, allocated: int, reserved: int, stuck: int = 0) -> AllocatorCounts:
    return AllocatorCounts(0, 0, 0, allocated, reserved, stuck)


@pytest.mark.parametrize(
    ("wanted", "in_pieces"),
    [("1.90 GiB", True), ("2.10 GiB", False), ("2000.00 MiB", True), ("512.00 KiB", True), ("300 bytes", True)],
)
def test_what_is_free_in_total_decides(wanted: str, in_pieces: bool) -> None:
    error = torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 8 GiB"
    )
    # 0.5 GiB are free on the device, 1.5 GiB in the cache.
    state = counts(allocated=5 * GIB, reserved=int(6.5 * GIB))
    assert failed_for_pieces(error, state, free_bytes=GIB // 2) is in_pieces


@pytest.mark.parametrize(("stuck", "in_pieces"), [(0, False), (GIB // 2, False), (GIB, True)])
def test_an_error_that_does_not_say_what_was_wanted(stuck: int, in_pieces: bool) -> None:
    state = counts(allocated=5 * GIB, reserved=8 * GIB, stuck=stuck)
    assert failed_for_pieces(torch.OutOfMemoryError("no memory"), state, free_bytes=0) is in_pieces
    assert not failed_for_pieces(torch.OutOfMemoryError("no memory"), counts(allocated=0, reserved=0), free_bytes=0)
