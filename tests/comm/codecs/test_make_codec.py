import pytest
import torch

from lightning_hpc.comm.codecs import BlockCodec, LinearCodec, Segment, SparseCodec, make_codec

NAMES = ("bf16", "fp16", "int8", "int4", "int3", "bitmask", "topk", "lowrank")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_makes_its_codec(name: str) -> None:
    codec = make_codec(name)
    assert codec.name == name
    assert isinstance(codec, BlockCodec | SparseCodec | LinearCodec)
    assert make_codec(name) is not codec  # they hold state


def test_unknown_name_is_quoted_and_the_known_ones_listed() -> None:
    with pytest.raises(ValueError, match="'int5'") as caught:
        make_codec("int5")
    assert all(repr(name) in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_input_nor_the_global_random_state_is_touched(name: str) -> None:
    codec = make_codec(name)
    state = torch.get_rng_state()
    values = torch.randn(64 * 384, generator=torch.Generator().manual_seed(1))
    if isinstance(codec, BlockCodec):
        values = values.view(-1, codec.block)
    before = values.clone()
    if isinstance(codec, LinearCodec):
        segments = [Segment("weight", 0, 64, 384)]
        message = codec.encode(values, segments)
        received = message.clone()
        codec.decode(message, segments)
        codec.advance(message, segments)
        assert torch.equal(message, received)
    else:
        packed = codec.encode(values)
        assert packed is not None
        received = packed.clone()
        if isinstance(codec, BlockCodec):
            codec.decode(packed)
        else:
            codec.decode(packed, values.numel())
        assert torch.equal(packed, received)
    assert torch.equal(values, before)
    assert torch.equal(torch.get_rng_state(), state)
