import pytest
import torch

from lightning_hpc.comm.codecs import BlockCodec, LinearCodec, Segment, SparseCodec, make_codec
from tests.comm.codecs.helpers import MAGNITUDES, random_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "int4", "int3"])
def test_blocks_are_those_of_the_cpu(name: str, magnitude: float) -> None:
    codec = make_codec(name)
    assert isinstance(codec, BlockCodec)
    blocks = random_values(1000 * codec.block, magnitude).view(1000, -1)
    packed = codec.encode(blocks)
    assert torch.equal(codec.encode(blocks.cuda()).cpu(), packed)
    assert torch.equal(codec.decode(packed.cuda()).cpu(), codec.decode(packed))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", ["bitmask", "topk"])
def test_packets_are_those_of_the_cpu(name: str, magnitude: float) -> None:
    codec = make_codec(name)
    assert isinstance(codec, SparseCodec)
    for numel in (1, 1000, 100_003):
        values = random_values(numel, magnitude)
        packet, on_device = codec.encode(values), codec.encode(values.cuda())
        assert (packet is None) == (on_device is None)
        if packet is not None and on_device is not None:
            # The root mean square may differ in its last bits, and with it a number just at the threshold.
            decoded, expected = codec.decode(on_device, numel).cpu(), codec.decode(packet, numel)
            assert (decoded != expected).sum() <= (2 if name == "bitmask" else 0)
            assert torch.equal(codec.decode(packet.cuda(), numel).cpu(), expected)


def test_low_rank_matches_the_cpu() -> None:
    segments = [Segment("weight", 0, 300, 200), Segment("bias", 0, 1, 300)]
    cpu, cuda = make_codec("lowrank"), make_codec("lowrank")
    assert isinstance(cpu, LinearCodec)
    assert isinstance(cuda, LinearCodec)
    for step in range(4):
        values = random_values(60_300, seed=step)
        message, on_device = cpu.encode(values, segments), cuda.encode(values.cuda(), segments)
        # The signs of basis vectors are the library's choice; what is decoded does not depend on them.
        expected = cpu.decode(message, segments)
        torch.testing.assert_close(cuda.decode(on_device, segments).cpu(), expected, rtol=0, atol=1e-3)
        cpu.advance(message, segments)
        cuda.advance(on_device, segments)


def test_low_rank_state_moves_to_the_device() -> None:
    segments = [Segment("weight", 0, 300, 200)]
    cpu, cuda = make_codec("lowrank"), make_codec("lowrank")
    assert isinstance(cpu, LinearCodec)
    assert isinstance(cuda, LinearCodec)
    values = random_values(60_000)
    cpu.advance(cpu.encode(values, segments), segments)
    cuda.load_state_dict(cpu.state_dict())
    message = cpu.encode(values, segments)
    torch.testing.assert_close(cuda.encode(values.cuda(), segments).cpu(), message, rtol=0, atol=1e-4)
