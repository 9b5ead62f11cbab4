"""The invariant: each sample once, an order that follows from seed and epoch, and windows that are found at once."""

import itertools
from collections import Counter

import numpy as np
import pytest

from lightning_hpc.data.shard_order import ShardOrder


def whole(order: ShardOrder) -> list[int]:
    return [sample for _, samples in order.windows(0) for sample in samples.tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_windows_follow_each_other_and_hold_each_sample_once(shuffle: bool) -> None:
    for num_samples, buffer_size in itertools.product((1, 2, 49, 97, 1000), (1, 2, 48, 95, 97, 480, 2000)):
        order = ShardOrder(num_samples, buffer_size, shuffle, seed=5, epoch=3)
        assert sorted(whole(order)) == list(range(num_samples))
        next_start = 0
        for start, samples in order.windows(0):
            assert start == next_start
            assert len(samples) <= buffer_size
            next_start += len(samples)


def test_the_order_is_that_of_earlier_releases() -> None:
    """A run that was saved with one release may be resumed with another one, which must find the same order."""
    for buffer_size, expected in {
        60: [37, 15, 18, 39, 59, 52, 68, 80, 94, 93],
        96: [47, 50, 91, 77, 11, 26, 94, 85, 22, 42],
        200: [94, 73, 30, 85, 36, 68, 45, 4, 96, 83],
    }.items():
        assert whole(ShardOrder(97, buffer_size, shuffle=True, seed=5, epoch=0))[:10] == expected


def test_every_order_is_as_likely_if_the_buffer_holds_all() -> None:
    orders = Counter(tuple(whole(ShardOrder(4, 4, shuffle=True, seed=5, epoch=epoch))) for epoch in range(1200))
    assert len(orders) == 24
    assert sum((count - 50) ** 2 / 50 for count in orders.values()) < 50  # chi-square, 23 degrees of freedom: 0.1 %


@pytest.mark.parametrize("shuffle", [False, True])
def test_no_window_before_the_position_is_computed(shuffle: bool) -> None:
    order = ShardOrder(num_samples=1000, buffer_size=100, shuffle=shuffle, seed=5, epoch=0)
    expected = np.array(whole(order))
    for position in range(1000):
        start, samples = next(order.windows(position))
        assert start <= position < start + len(samples)
        assert (samples == expected[start : start + len(samples)]).all()
