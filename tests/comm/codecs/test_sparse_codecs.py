"""What holds for all codecs that drop numbers: bitmask, topk."""

import pytest
import torch

from lightning_hpc.comm.codecs import SparseCodec, make_codec
from tests.comm.codecs.helpers import MAGNITUDES, largest_residual, random_values, round_trip


@pytest.fixture(params=["bitmask", "topk"])
def codec(request: pytest.FixtureRequest) -> SparseCodec:
    codec = make_codec(request.param)
    assert isinstance(codec, SparseCodec)
    return codec


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_the_largest_are_sent_and_the_rest_is_zero(codec: SparseCodec, magnitude: float) -> None:
    values = random_values(40_000, magnitude)
    decoded = round_trip(codec, values)
    sent = decoded != 0
    assert 0.01 < sent.float().mean() <= 0.2
    assert values[sent].abs().min() >= values[~sent].abs().max()
    # Below the smallest normal number, bf16 has fewer bits.
    assert torch.allclose(decoded[sent], values[sent], rtol=2**-8, atol=2.0**-133)


def test_largest_and_smallest_numbers(codec: SparseCodec) -> None:
    values = torch.zeros(4000)
    values[::200] = torch.finfo(torch.float32).max
    values[1::200] = 2.0**-149
    assert torch.allclose(round_trip(codec, values)[::200], values[::200], rtol=2**-7)


@pytest.mark.parametrize("numel", [9, 255, 256, 257, 1000, 40_001])
def test_one_spike_survives_in_any_place(codec: SparseCodec, numel: int) -> None:
    for place in {0, 1, 7, 8, numel // 2, numel - 9, numel - 1}:
        values = torch.zeros(numel)
        values[place] = -2.5
        assert torch.equal(round_trip(codec, values), values)


@pytest.mark.parametrize("numel", [0, 1, 7, 300, 40_000])
def test_zeros_stay_zeros(codec: SparseCodec, numel: int) -> None:
    assert not round_trip(codec, torch.zeros(numel)).any()


def test_packets_may_lie_anywhere_in_memory(codec: SparseCodec) -> None:
    values = random_values(1003)
    packet = codec.encode(values)
    assert packet is not None
    for offset in range(8):
        moved = torch.zeros(packet.numel() + 8, dtype=torch.uint8)[offset : offset + packet.numel()]
        moved.copy_(packet)
        assert torch.equal(codec.decode(moved, 1003), codec.decode(packet, 1003))


def test_error_feedback_is_bounded_and_loses_nothing(codec: SparseCodec) -> None:
    largest, missed = largest_residual(codec)
    assert largest < 25
    assert missed.abs().max() < 1e-3
