import pytest
import torch
from torch import Tensor

from lightning_hpc.comm.codecs.int3 import Int3Codec
from tests.comm.codecs.helpers import MAGNITUDES, random_values, round_trip

CODEC = Int3Codec()


def levels_of(step: float) -> tuple[Tensor, Tensor]:
    """What the first two thirds of a block, and the last one, may decode to."""
    return step * torch.arange(-3.0, 4), step * 1.3 * torch.arange(-2.0, 3)


def test_every_byte_is_a_combination_of_levels() -> None:
    sums = torch.arange(-122, 123)
    packed = torch.zeros(2, CODEC.block_bytes, dtype=torch.uint8)
    packed[:, :128] = torch.cat((sums, sums[:11])).to(torch.int8).view(torch.uint8).view(2, 128)
    packed[:, 128:] = torch.tensor([0x80, 0x3F], dtype=torch.uint8)  # 1.0 in bf16
    low, middle, high = CODEC.decode(packed).view(2, 3, 128).transpose(0, 1).flatten(1)
    high = high / torch.tensor(1.3)
    for levels, largest in ((low, 3), (middle, 3), (high, 2)):
        assert levels.unique().tolist() == list(range(-largest, largest + 1))
    assert torch.equal(low + 7 * middle + 49 * high, torch.cat((sums, sums[:11])).float())


def test_each_number_gets_the_nearest_level() -> None:
    for magnitude in MAGNITUDES[1:-1]:
        blocks = random_values(100 * CODEC.block, magnitude).view(100, -1)
        for block, decoded in zip(blocks, CODEC.decode(CODEC.encode(blocks)), strict=True):
            step = decoded[:256][decoded[:256] != 0].abs().min().item()
            assert step == pytest.approx(0.82 * block.abs().mean().item(), rel=2**-7)
            for part, levels in zip((slice(0, 256), slice(256, 384)), levels_of(step), strict=True):
                nearest = (block[part, None] - levels).abs().amin(1)
                assert torch.allclose((block[part] - decoded[part]).abs(), nearest, rtol=1e-4, atol=1e-4 * step)


def test_an_outlier_is_clipped_and_the_others_survive() -> None:
    values = random_values(CODEC.block)
    values[7] = 30 * values.abs().mean()
    decoded = round_trip(CODEC, values)
    others = torch.arange(CODEC.block) != 7
    assert 0 < decoded[7] < 0.2 * values[7]
    assert (decoded - values)[others].norm() < 0.5 * values[others].norm()


@pytest.mark.parametrize("numel", [0, 1, 2, 383, 384, 385, 1000])
def test_any_number_of_values_comes_closer(numel: int) -> None:
    values = random_values(numel)
    assert (round_trip(CODEC, values) - values).norm() <= values.norm()


def test_zeros_stay_zero() -> None:
    values = random_values(2 * CODEC.block)
    values[::3] = 0
    assert not round_trip(CODEC, values)[::3].any()


def test_the_largest_numbers_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, 0.0, 2.0**-149]).repeat(96)
    decoded = round_trip(CODEC, values)
    assert torch.equal(decoded.sign(), values.sign() * (values.abs() > 1))


def test_less_is_lost_of_normal_numbers_than_with_five_levels() -> None:
    values = torch.randn(100 * CODEC.block, generator=torch.Generator().manual_seed(0))
    assert (round_trip(CODEC, values) - values).square().mean() < 0.06  # 0.080 with the best 5 levels, 0.044 with 7
