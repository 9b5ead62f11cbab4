"""Measured sizes must be those that the codecs declare; times must only be there."""

import torch

from lightning_hpc.comm.codec_cost import measure_codec
from lightning_hpc.comm.codecs import CODEC_NAMES, make_codec
from lightning_hpc.comm.codecs.bitmask import BitmaskCodec
from lightning_hpc.comm.layout import ParameterSpec

PARAMETERS = [ParameterSpec("weight", 256 * 1024, 1024), ParameterSpec("bias", 1024, 1024), ParameterSpec("none", 0, 0)]


def test_every_codec_is_measured_and_smaller_than_fp32() -> None:
    for name in CODEC_NAMES:
        cost = measure_codec(make_codec(name), PARAMETERS, torch.device("cpu"))
        assert cost.name == name
        assert 0 < cost.scattered_bytes / 2 + cost.gathered_bytes < 4
        assert cost.pack_seconds > 0
        assert cost.unpack_seconds > 0


def test_sizes() -> None:
    costs = {
        name: measure_codec(make_codec(name), PARAMETERS, torch.device("cpu")) for name in ("bf16", "int8", "int4")
    }
    assert costs["bf16"].scattered_bytes == 4
    assert costs["int8"].scattered_bytes <= 0.27 * 8
    assert costs["int4"].scattered_bytes <= 0.14 * 8


def test_a_codec_that_finds_noise_too_dense_costs_what_is_sent_instead() -> None:
    cost = measure_codec(BitmaskCodec(threshold=1e-3), PARAMETERS, torch.device("cpu"))
    assert (cost.scattered_bytes, cost.gathered_bytes) == (8, 0)


def test_measuring_leaves_the_codec_as_it_was() -> None:
    codec = make_codec("lowrank")
    measure_codec(codec, PARAMETERS, torch.device("cpu"))
    assert codec.state_dict() == {}  # type: ignore[attr-defined]
