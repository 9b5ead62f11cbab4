"""Codecs that make gradients smaller before they cross a slow network."""

from collections.abc import Callable

from lightning_hpc.comm.codecs.bf16 import BF16Codec
from lightning_hpc.comm.codecs.bitmask import BitmaskCodec
from lightning_hpc.comm.codecs.codec import BlockCodec, Codec, LinearCodec, Segment, SparseCodec
from lightning_hpc.comm.codecs.fp16 import FP16Codec
from lightning_hpc.comm.codecs.int3 import Int3Codec
from lightning_hpc.comm.codecs.int4 import Int4Codec
from lightning_hpc.comm.codecs.int8 import Int8Codec
from lightning_hpc.comm.codecs.lowrank import LowRankCodec
from lightning_hpc.comm.codecs.topk import TopKCodec

__all__ = ["CODEC_NAMES", "BlockCodec", "Codec", "LinearCodec", "Segment", "SparseCodec", "make_codec"]

_CODECS: dict[str, Callable[[], Codec]] = {
    codec.name: codec
    for codec in (BF16Codec, FP16Codec, Int8Codec, Int4Codec, Int3Codec, BitmaskCodec, TopKCodec, LowRankCodec)
}

CODEC_NAMES = tuple(_CODECS)


def make_codec(name: str) -> Codec:
    """Makes the codec called ``name``, with its default settings.

    Raises:
        ValueError: If no codec has this name.
    """
    if name not in _CODECS:
        raise ValueError(f"There is no codec {name!r}; there are {', '.join(map(repr, _CODECS))}.")
    return _CODECS[name]()
