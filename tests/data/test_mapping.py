"""Memory that processes share: its size is virtual, its descriptors are few, and views of it outlive it."""

import errno
import gc
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from lightning_hpc.data.mapping import PAGE, SharedMapping

NEAR = frozenset({0, 1})


def used_bytes(mapping: SharedMapping) -> int:
    return os.fstat(mapping._descriptor).st_blocks * 512


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lightning_hpc")


def write(mapping: SharedMapping, offset: int) -> None:
    assert mapping.near == NEAR
    mapping.view[offset : offset + 3] = b"abc"


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_process_writes_to_the_same_memory(method: str) -> None:
    mapping, offset = SharedMapping(NEAR), 5 * PAGE + 7
    process = multiprocessing.get_context(method).Process(target=write, args=(mapping, offset))  # type: ignore[attr-defined]
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert bytes(mapping.view[offset - 1 : offset + 4]) == b"\0abc\0"


def test_only_what_is_reserved_or_touched_takes_memory() -> None:
    mapping = SharedMapping()
    assert mapping.size >= 2**36
    assert used_bytes(mapping) == 0
    mapping.reserve(PAGE, 3 * PAGE)
    assert used_bytes(mapping) == 3 * PAGE
    mapping.view[10 * PAGE] = 1
    assert used_bytes(mapping) == 4 * PAGE


def test_released_memory_is_given_back_and_reads_as_zeros() -> None:
    mapping = SharedMapping()
    mapping.view[:PAGE] = b"x" * PAGE
    mapping.view[PAGE] = 5
    mapping.release(0, PAGE)
    assert used_bytes(mapping) == PAGE
    assert not any(mapping.view[:PAGE])
    assert mapping.view[PAGE] == 5


def test_one_map_and_a_constant_number_of_descriptors_as_long_as_it_lives() -> None:
    gc.collect()
    before = open_descriptors()
    mapping = SharedMapping()
    assert open_descriptors() - before <= 2  # ours, and a copy that the mmap object keeps
    assert maps() == 1
    for page in range(50):
        mapping.reserve(page * PAGE, PAGE)
        mapping.as_tensor()[page * PAGE] = 1
    assert open_descriptors() - before <= 2
    assert maps() == 1
    del mapping
    assert (open_descriptors(), maps()) == (before, 0)


def test_what_was_made_from_it_outlives_it() -> None:
    mapping = SharedMapping()
    mapping.view[:4] = b"\1\2\3\4"
    view, tensor = mapping.view[1:3], mapping.as_tensor()[2:4]
    del mapping
    assert bytes(view) == b"\2\3"
    assert torch.equal(tensor, torch.tensor([3, 4], dtype=torch.uint8))


def test_too_little_memory_is_an_error_that_says_how_much_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(MemoryError, match=r"no 3 MiB of shared memory.*No space left.*smaller batch"):
        SharedMapping().reserve(0, 3 * 2**20)
