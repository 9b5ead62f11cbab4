"""One order of all samples of all shards, for any number of ranks, that is shuffled and yet read in long runs.

The samples stand in one row, which starts at another sample each epoch. It is cut into *blocks* of consecutive samples,
and these are shuffled. As many blocks as fill the shuffle buffer make a *window*: each block is shuffled by itself, and
then all are dealt in turn, the first sample of each, the second of each, and so on. (Two-level shuffling: Xu et al.,
"In-Database Machine Learning with CorgiPile", SIGMOD 2022.) All of it is computed from seed and epoch, a window at a
time and without reading data, so that any position is found at once.

As the blocks are dealt in turn and there are 48 of them, ranks that take turns in the order meet whole blocks if there
are 2, 3, 4, 6, 8, 12, 16, 24 or 48 of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCKS = 48  # in a window: divisible by most numbers of ranks


@dataclass(frozen=True)
class ShardOrder:
    """The order of all samples in one epoch, computed in windows.

    Attributes:
        num_samples: Number of samples.
        buffer_size: Samples of a window, at most.
        shuffle: Whether to shuffle.
        seed: Chooses the orders.
        epoch: Chooses one of them.
    """

    num_samples: int
    buffer_size: int
    shuffle: bool
    seed: int
    epoch: int

    def windows(self, position: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The order from a position on, or from shortly before it.

        Yields:
            Windows, from the one that ``position`` lies in: where it begins in the order, and int64 ``[samples]``.
        """
        if not self.shuffle:
            for start in range(position, self.num_samples, self.buffer_size):
                yield start, np.arange(start, min(start + self.buffer_size, self.num_samples))
            return
        # What the buffer can hold whole is one block, so that every order is possible.
        block = self.num_samples if self.num_samples <= self.buffer_size else max(self.buffer_size // _BLOCKS, 1)
        width = min(self.buffer_size // block, _BLOCKS)
        blocks = _permutation(1, self.num_samples // block, self.seed, self.epoch)[0]
        turn = _random(1, self.seed, self.epoch, 0) % np.uint64(self.num_samples)
        for window in range(position // (width * block), len(blocks) // width + 1):
            chosen = blocks[window * width : (window + 1) * width]
            places = _permutation(len(chosen), block, self.seed, self.epoch, 1, window) + chosen[:, None] * block
            row = places.T.ravel()
            if window == len(blocks) // width:  # the last one: what makes no whole block is at the end
                rest = self.num_samples - len(blocks) * block
                row = np.append(row, len(blocks) * block + _permutation(1, rest, self.seed, self.epoch, 2)[0])
            if len(row):
                yield window * width * block, (row + int(turn[0])) % self.num_samples


def _permutation(rows: int, columns: int, *key: int) -> NDArray[np.int64]:
    """For each of the rows a permutation of 0 … columns - 1, ``[rows, columns]``."""
    keys = _random(rows * columns, *key).reshape(rows, columns)
    return np.argsort(keys, axis=1, kind="stable")


def _random(count: int, *key: int) -> NDArray[np.uint64]:
    """Numbers that follow from the key (SplitMix64: Steele, Lea and Flood, 2014).

    numpy's generators may give other numbers in another release, and a run that is resumed needs the same ones.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, dtype=np.uint64)
    for word in key:
        state = _scramble(state + np.uint64(word % 2**64) + step)
    return _scramble(state + step * np.arange(1, count + 1, dtype=np.uint64))


def _scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
