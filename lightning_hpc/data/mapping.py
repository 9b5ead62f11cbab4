"""A piece of memory that several processes map."""

import contextlib
import mmap
import os
from collections.abc import Set
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from lightning_hpc.data.locality import running_on

_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which the module does not name before Python 3.13
_MIN_VIRTUAL_BYTES = 2**36

PAGE = mmap.PAGESIZE


class SharedMapping:
    """A sparse file in memory (memfd), mapped once, with one descriptor and one map for as long as it lives.

    Its size is virtual: a page takes memory from its first use on, or from `reserve` on. It lies on no file system, so
    that a small ``/dev/shm`` does not limit it (pytorch#58386) and nothing is left of it when all processes are gone,
    however they ended. A child process gets it by fork, or pickled while the child is being started.

    Args:
        near: Processors that the memory is to be next to, where that differs; none are all.
    """

    def __init__(self, near: Set[int] = frozenset()) -> None:
        self._attach(os.memfd_create("lightning_hpc", os.MFD_CLOEXEC), None, near)

    def __reduce__(self) -> tuple[object, ...]:
        return _attach_mapping, (reduction.DupFd(self._descriptor), self.size, self.near)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)

    @property
    def view(self) -> memoryview:
        """A new view of all of it. The memory stays mapped while there is a view, or anything made from one."""
        return memoryview(self._memory)

    @property
    def claims(self) -> memoryview:
        """The first page, as int64: which task each worker has taken."""
        return self.view[:PAGE].cast("q")

    def as_tensor(self) -> Tensor:
        """All of it, uint8."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def reserve(self, offset: int, numel: int) -> None:
        """Takes the memory of a range now, so that nobody meets a bus error there later.

        Raises:
            MemoryError: If there is not enough.
        """
        try:
            with running_on(self.near):  # the kernel takes memory where this thread runs
                os.posix_fallocate(self._descriptor, offset, numel)
        except OSError as error:
            raise MemoryError(
                f"no {numel / 2**20:.0f} MiB of shared memory for a batch ({error}); use a smaller batch, fewer workers"
                " or a smaller prefetch_factor"
            ) from error

    def release(self, offset: int, numel: int) -> None:
        """Gives the memory of a range back; it reads as zeros from then on."""
        self._memory.madvise(mmap.MADV_REMOVE, offset, numel)

    def _attach(self, descriptor: int, size: int | None, near: Set[int]) -> None:
        self._descriptor, self.near = descriptor, near
        self.size = size or max(2 * os.sysconf("SC_PHYS_PAGES") * PAGE, _MIN_VIRTUAL_BYTES)
        if size is None:
            os.ftruncate(descriptor, self.size)
        self._memory = mmap.mmap(descriptor, self.size, flags=mmap.MAP_SHARED | _NORESERVE)


def _attach_mapping(descriptor: Any, size: int, near: Set[int]) -> SharedMapping:
    mapping = SharedMapping.__new__(SharedMapping)
    mapping._attach(descriptor.detach(), size, near)
    return mapping
