"""Which samples make up each batch of an epoch within a budget of tokens, and where last batches are cut for ranks.

A plan is two arrays: the samples in the order of their batches, and the *edges*, the places in that order where batches
meet, from 0 to the number of samples. It is that of all ranks together.
"""

import hashlib
import math
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

# Lengths within a bin differ by this much at most, relative. Measured on log-normal lengths (sigma 0.25 to 2, 10,000
# and 100,000 samples, budgets of 20 and 80 times the median): 3 % pads 0.4 to 2.4 %, 4 % up to 2.8 %, 6 % up to 3.6 %;
# the more is padded, the fewer samples meet again in the next epoch.
_TOLERANCE = 0.03


class TokenPlan:
    """The batches of each epoch, longest samples first before they are shuffled, for all ranks together.

    Samples are shuffled within bins of close lengths. A batch takes consecutive samples, as many as the longest sample
    of the bin that it begins in admits. Bins keep their places, so number and sizes of batches are those of any epoch.

    Args:
        lengths: int64 ``[num_samples]``: tokens of each sample, from 0 to ``max_tokens``.
        max_tokens: Tokens of a batch at most, padding counted.
        max_samples: Samples of a batch at most.
        shuffle: Whether composition and order change with seed and epoch.
    """

    def __init__(self, lengths: Ints, max_tokens: int, max_samples: int, shuffle: bool) -> None:
        self._lengths = lengths
        self._settings = (max_tokens, max_samples, shuffle)
        self._by_length: Ints = np.argsort(-lengths, kind="stable")
        longest = np.maximum(lengths[self._by_length], 1)  # any number of empty samples would fit
        if shuffle:
            starts = _bin_starts(longest, max_tokens, max_samples)
            sizes = np.diff(starts, append=len(longest))
            longest = np.repeat(longest[starts], sizes)
            self._bins = np.repeat(np.arange(len(starts)), sizes)
        self._edges = _greedy_edges(np.minimum(max_tokens // longest, max_samples))
        self._shuffle = shuffle
        self._cached: tuple[tuple[int, int], tuple[Ints, Ints]] | None = None

    @property
    def num_samples(self) -> int:
        """Of an epoch."""
        return len(self._by_length)

    @property
    def num_batches(self) -> int:
        """Of any epoch, before last batches are cut."""
        return len(self._edges) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides which samples a position means, apart from seed and epoch."""
        digest = hashlib.blake2b(repr(("plan 1", *self._settings)).encode(), digest_size=16)
        digest.update(self._lengths.astype("<i8").tobytes())
        return digest.hexdigest()

    def batches(self, seed: int, epoch: int) -> tuple[Ints, Ints]:
        """The samples in the order of their batches, ``[num_samples]``, and the edges, ``[num_batches + 1]``."""
        if not self._shuffle:
            return self._by_length, self._edges
        if self._cached is None or self._cached[0] != (seed, epoch):
            self._cached = (seed, epoch), self._shuffled(seed, epoch)
        return self._cached[1]

    def _shuffled(self, seed: int, epoch: int) -> tuple[Ints, Ints]:
        # Raw bits, as numpy keeps those the same in all releases, but not what its generators make of them.
        bits = np.random.PCG64([seed, epoch])
        order = self._by_length[_shuffle_within(self._bins, bits.random_raw(self.num_samples))]
        permutation = np.argsort(bits.random_raw(self.num_batches), kind="stable")
        sizes = np.diff(self._edges)[permutation]
        edges = np.concatenate(([0], np.cumsum(sizes)))
        places = np.arange(len(order)) + np.repeat(self._edges[permutation] - edges[:-1], sizes)
        return order[places], edges


def _bin_starts(longest_first: Ints, max_tokens: int, max_samples: int) -> Ints:
    """Begins a bin where the length, or the number of samples that fit, has changed by more than the tolerance."""
    ascending = -longest_first
    starts, position = [], 0
    while position < len(longest_first):
        starts.append(position)
        longest = int(longest_first[position])
        fitting = int((1 + _TOLERANCE) * min(max_tokens // longest, max_samples))
        shortest = math.ceil(longest / (1 + _TOLERANCE))
        if fitting < max_samples:
            shortest = max(shortest, max_tokens // (fitting + 1) + 1)
        position = int(np.searchsorted(ascending, -shortest, side="right"))
    return np.array(starts, np.int64)


def _greedy_edges(capacities: Ints) -> Ints:
    """Edges of batches that each take the capacity of the place where they begin."""
    edges, sizes = [0], capacities.tolist()
    while edges[-1] < len(sizes):
        edges.append(edges[-1] + sizes[edges[-1]])
    return np.minimum(edges, len(sizes))


def _shuffle_within(bins: Ints, random_bits: npt.NDArray[np.uint64]) -> Ints:
    """A permutation that keeps each of the ascending ``bins`` in its place.

    Sorts numbers made of the bin, random bits and the place, from the highest bit down: no two are equal, so all
    machines agree, and sorting them is faster than a stable sort that returns places.
    """
    bin_bits = int(bins[-1]).bit_length() if len(bins) else 0
    place_bits = len(bins).bit_length()
    assert bin_bits + place_bits <= 48, "too few random bits would be left"
    keys = (random_bits >> np.uint64(bin_bits + place_bits)) << np.uint64(place_bits)
    keys |= (bins.astype(np.uint64) << np.uint64(64 - bin_bits)) if bin_bits else np.uint64(0)
    keys |= np.arange(len(bins), dtype=np.uint64)
    keys.sort()
    places: Ints = (keys & np.uint64((1 << place_bits) - 1)).astype(np.int64)
    return places


def cut_last_steps(edges: Ints, num_replicas: int) -> Ints:
    """Splits the largest batches of as few last steps as hold a sample for every rank, so that all ranks get a batch.

    A step has a batch for each of the ``num_replicas`` ranks. Only last ones are cut, and in place: what any number of
    steps consumed is then a prefix of the epoch's samples, which means the same to every number of ranks.

    Returns:
        The edges of a multiple of ``num_replicas`` batches, or of one batch a sample where those are too few.
    """
    sizes = np.diff(edges)
    count = len(sizes)
    odd = count % num_replicas
    if odd == 0:
        return edges
    samples = np.cumsum(sizes[::-1])[odd - 1 :: num_replicas]  # of the last step, the last two, …
    wanted = num_replicas * np.arange(1, len(samples) + 1)
    steps = int(np.argmax(samples >= wanted)) + 1 if (samples >= wanted).any() else len(samples)
    first = count - odd - (steps - 1) * num_replicas
    parts = _parts(sizes[first:], min(int(wanted[steps - 1]), int(samples[steps - 1])))
    return np.concatenate((edges[:first], _split(edges[first:-1], sizes[first:], parts), edges[-1:]))


def _parts(sizes: Ints, wanted: int) -> Ints:
    """Into how many parts to split each batch, so that there are ``wanted`` in all and the largest part is small."""
    parts = np.ones(len(sizes), np.int64)
    for _ in range(wanted - len(sizes)):
        parts[np.argmax(sizes / parts)] += 1
    return parts


def _split(starts: Ints, sizes: Ints, parts: Ints) -> Ints:
    """Where the parts of batches begin, equally large up to one sample."""
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    begin: Ints = np.repeat(starts, parts) + number * np.repeat(sizes, parts) // np.repeat(parts, parts)
    return begin


def fill_last_step(count: int, num_replicas: int) -> Ints:
    """Numbers of batches, the first ones again at the end where ``count`` is no multiple of the ranks."""
    return np.resize(np.arange(count), math.ceil(count / num_replicas) * num_replicas)
