"""Reads samples of tar shards in place: few open files, and the kernel told ahead of what comes."""

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.data.shard_index import ShardIndex

_OPEN_FILES = 2
_ANNOUNCED_BYTES = 4 * 2**20  # what the kernel is told of ahead of reading


class ShardReader:
    """Reads samples in place, with few files open at a time.

    Args:
        index: Of the shards that the samples are numbered in.
    """

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._descriptors: dict[int, int] = {}  # by shard, the one used last at the end

    def read(self, sample: int) -> bytes:
        """What lies in the span of a sample.

        Raises:
            OSError: If the shard cannot be read.
            ValueError: If it is no longer the file that was indexed.
        """
        return next(self.read_each(np.array([sample])))[1]

    def read_each(self, samples: NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
        """Yields number and content of each sample; see `read`. It is read when it is asked for."""
        shards, starts, lengths = self._index.spans(samples)
        announced, ahead = 0, 0  # how many samples, and how many bytes of them are yet to be read
        for sample, shard, start, length in zip(samples.tolist(), shards, starts, lengths, strict=True):
            descriptor = self._descriptor(shard)
            while announced < len(shards) and shards[announced] == shard and ahead < _ANNOUNCED_BYTES:
                _announce(descriptor, starts[announced], lengths[announced])
                ahead += lengths[announced]
                announced += 1
            ahead -= length
            yield sample, self._read_span(shard, descriptor, start, length)

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read_span(self, shard: int, descriptor: int, start: int, length: int) -> bytes:
        try:
            content = os.pread(descriptor, length, start)
            while len(content) < length and (more := os.pread(descriptor, length - len(content), start + len(content))):
                content += more  # Linux reads 2 GiB at most
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._index.paths[shard]) from error
        if len(content) < length:
            raise self._changed(shard)
        return content

    def _descriptor(self, shard: int) -> int:
        if shard in self._descriptors:
            self._descriptors[shard] = self._descriptors.pop(shard)
            return self._descriptors[shard]
        if len(self._descriptors) == _OPEN_FILES:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        descriptor = os.open(self._index.paths[shard], os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[shard] = descriptor
        if os.fstat(descriptor).st_size != self._index.file_sizes[shard]:
            raise self._changed(shard)
        return descriptor

    def _changed(self, shard: int) -> ValueError:
        return ValueError(
            f"shard {self._index.paths[shard]} does not have the {self._index.file_sizes[shard]} bytes that it had when"
            " its headers were read; do not write to shards that are in use, make the dataset anew"
        )


def _announce(descriptor: int, start: int, length: int) -> None:
    """Lets the kernel begin to read: a disk or a server with several requests to work on is several times faster."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
