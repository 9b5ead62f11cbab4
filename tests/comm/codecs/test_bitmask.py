import math
from typing import Any

import pytest
import torch

from lightning_hpc.comm.codecs.bitmask import BitmaskCodec
from tests.comm.codecs.helpers import random_values, round_trip


@pytest.mark.parametrize("numel", [1001, 1008, 20_000])
def test_size_is_a_bit_a_number_and_two_bytes_each_sent(numel: int) -> None:
    values = random_values(numel)
    codec = BitmaskCodec(threshold=2)
    packet = codec.encode(values)
    assert packet is not None
    sent = (values.abs() >= 2 * values.square().mean().sqrt()).sum().item()
    assert packet.numel() == math.ceil(numel / 8) + 2 * sent
    assert codec.decode(packet, numel).count_nonzero() == sent


@pytest.mark.parametrize(
    ("nonzero", "packed"), [(0, True), (1, True), (199, True), (200, True), (201, False), (1000, False)]
)
def test_falls_back_below_the_limit_and_not_at_it(nonzero: int, packed: bool) -> None:
    values = torch.zeros(1000)
    values[torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:nonzero]] = -1.0
    packet = BitmaskCodec(threshold=0, sparsity_limit=0.8).encode(values)
    assert (packet is not None) == packed
    if packet is not None:
        assert torch.equal(BitmaskCodec().decode(packet, 1000), values)


@pytest.mark.parametrize("numel", [1, 2, 100])
def test_equal_magnitudes_are_never_held_back(numel: int) -> None:
    """No number is above a multiple of the root mean square, which must not keep them from being sent for ever."""
    values = torch.full((numel,), 0.5)
    assert BitmaskCodec(threshold=3).encode(values) is None
    assert torch.equal(round_trip(BitmaskCodec(threshold=3, sparsity_limit=0), values), values)


def test_every_pattern_of_bits_comes_back() -> None:
    patterns = torch.arange(256)[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1).float().flatten()
    for numel in range(len(patterns) - 9, len(patterns) + 1):
        values = patterns[:numel]
        assert torch.equal(round_trip(BitmaskCodec(threshold=0, sparsity_limit=0), values), values)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("threshold", -1.0, ValueError),
        ("threshold", math.nan, ValueError),
        ("threshold", math.inf, ValueError),
        ("threshold", "1.5", TypeError),
        ("threshold", True, TypeError),
        ("threshold", None, TypeError),
        ("sparsity_limit", 1.1, ValueError),
        ("sparsity_limit", math.nan, ValueError),
        ("sparsity_limit", "0.8", TypeError),
    ],
)
def test_bad_arguments_are_quoted_with_what_is_allowed(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}={value!r} must be a .*number"):
        BitmaskCodec(**{name: value})
