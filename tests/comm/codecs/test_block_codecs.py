"""What holds for all codecs of fixed blocks: bf16, fp16, int8, int4, int3."""

import pytest
import torch

from lightning_hpc.comm.codecs import BlockCodec, make_codec
from tests.comm.codecs.helpers import MAGNITUDES, largest_residual, random_values, round_trip

SIZE_RATIO = {"bf16": 0.5, "fp16": 0.502, "int8": 0.254, "int4": 0.129, "int3": 0.085}
ERROR = {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.01, "int4": 0.16, "int3": 0.35}
"""Largest error, relative to the norm. What remains of numbers below 1e-36 is smaller than their smallest step."""


@pytest.fixture(params=SIZE_RATIO)
def codec(request: pytest.FixtureRequest) -> BlockCodec:
    codec = make_codec(request.param)
    assert isinstance(codec, BlockCodec)
    return codec


@pytest.fixture(params=SIZE_RATIO.keys() - {"int3"})
def unclipped(request: pytest.FixtureRequest) -> BlockCodec:
    """Codecs that spare the largest numbers of a block."""
    codec = make_codec(request.param)
    assert isinstance(codec, BlockCodec)
    return codec


def test_size(codec: BlockCodec) -> None:
    assert codec.block_bytes / (4 * codec.block) <= SIZE_RATIO[codec.name]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_all_finite_magnitudes_survive(codec: BlockCodec, magnitude: float) -> None:
    values = random_values(5000, magnitude)
    error = (round_trip(codec, values) - values).double().norm() / values.double().norm()
    if magnitude > 1e-36:
        assert error <= ERROR[codec.name]
    else:
        assert error < 1


def test_largest_and_smallest_numbers(unclipped: BlockCodec) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, 0.0, 2.0**-149, -(2.0**-149)]).repeat(100)
    decoded = round_trip(unclipped, values)
    assert torch.allclose(decoded[:2], values[:2], rtol=2**-7)
    assert not decoded[2::5].any()
    assert round_trip(unclipped, torch.tensor([2.0**-149])).abs() <= 2.0**-126


@pytest.mark.parametrize("numel", [0, 1, 2, 127, 128, 129, 255, 257, 1000])
def test_any_number_of_values(unclipped: BlockCodec, numel: int) -> None:
    values = random_values(numel)
    assert torch.allclose(round_trip(unclipped, values), values, rtol=0, atol=ERROR[unclipped.name])


def test_constant_blocks_keep_their_value(unclipped: BlockCodec) -> None:
    for constant in (0.0, 1.0, -3.3e-5, 7e12):
        values = torch.full((2 * unclipped.block,), constant)
        assert torch.allclose(round_trip(unclipped, values), values, rtol=2**-7, atol=0)


def test_blocks_do_not_depend_on_each_other(codec: BlockCodec) -> None:
    blocks = random_values(8 * codec.block).view(8, -1) * torch.tensor(10.0).pow(torch.arange(-16, 16, 4))[:, None]
    blocks[3] = 0
    packed = codec.encode(blocks)
    for index in range(8):
        assert torch.equal(packed[index : index + 1], codec.encode(blocks[index : index + 1]))
        assert torch.equal(codec.decode(packed[index : index + 1]), codec.decode(packed)[index : index + 1])
        assert (codec.decode(packed)[index] - blocks[index]).norm() <= 2 * ERROR[codec.name] * blocks[index].norm()
    assert not codec.decode(packed)[3].any()


def test_packets_may_lie_anywhere_in_memory(codec: BlockCodec) -> None:
    packed = codec.encode(random_values(3 * codec.block).view(3, -1))
    for rows in (packed, packed[:1]):
        buffer = torch.zeros(rows.numel() + 8, dtype=torch.uint8)
        for offset in range(8):
            moved = buffer[offset : offset + rows.numel()].view_as(rows)
            moved.copy_(rows)
            assert torch.equal(codec.decode(moved), codec.decode(rows))
        wide = torch.zeros(len(rows), codec.block_bytes + 3, dtype=torch.uint8)[:, 1:-2]
        wide.copy_(rows)
        assert torch.equal(codec.decode(wide), codec.decode(rows))


def test_error_feedback_is_bounded_and_loses_nothing(codec: BlockCodec) -> None:
    largest, missed = largest_residual(codec)
    assert largest <= 2 * ERROR[codec.name]
    assert missed.abs().max() < 1e-4


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_error_is_at_most_half_a_step(name: str) -> None:
    codec, levels = make_codec(name), {"int8": 127, "int4": 7}[name]
    assert isinstance(codec, BlockCodec)
    for magnitude in MAGNITUDES[:-1]:
        blocks = random_values(100 * codec.block, magnitude).view(100, -1).double()
        error = (codec.decode(codec.encode(blocks.float())).double() - blocks).abs()
        step = (blocks.abs().amax(1, keepdim=True) / levels * (1 + 2**-7)).clamp(min=torch.finfo(torch.float32).tiny)
        assert (error <= step * 0.5000005).all()  # the product of a number and a step's inverse is rounded


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_level_comes_back(name: str) -> None:
    """All pairs of levels, which share a byte in int4."""
    codec, levels = make_codec(name), {"int8": 127, "int4": 7}[name]
    assert isinstance(codec, BlockCodec)
    pairs = torch.cartesian_prod(*[torch.arange(-levels, levels + 1.0)] * 2)
    pairs = torch.cat((pairs, torch.full((-len(pairs) % (codec.block // 2), 2), 1.0 * levels)))
    # Pairs of a number of the first half and the one at the same place of the second.
    blocks = pairs.view(-1, codec.block // 2, 2).transpose(1, 2).flatten(1)
    steps = 2.0 ** torch.arange(len(blocks)).remainder(7)[:, None]
    full = blocks.abs().amax(1) == levels  # the step of the others is smaller than 1
    assert full.sum() > 2
    blocks = (blocks * steps)[full]
    assert torch.equal(codec.decode(codec.encode(blocks)), blocks)


def test_fp16_keeps_relative_precision_of_small_numbers() -> None:
    codec = make_codec("fp16")
    assert isinstance(codec, BlockCodec)
    values = 2.0 ** -torch.arange(28.0).repeat(20) * (1 + torch.rand(560, generator=torch.Generator().manual_seed(0)))
    for magnitude in (1e-25, 1.0, 1e30):
        decoded = round_trip(codec, values * magnitude)
        assert torch.allclose(decoded, values * magnitude, rtol=2**-11 * 1.001, atol=0)
