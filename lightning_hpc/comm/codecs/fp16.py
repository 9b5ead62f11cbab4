"""IEEE half precision with a scale for each block."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import aligned, bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs._scale import TINY, block_amax
from lightning_hpc.comm.codecs.codec import BlockCodec

_MAX = 32752.0  # the largest fp16 number below 2^15


class FP16Codec(BlockCodec):
    """Rounds each number to fp16 after scaling its block by a power of two, so that nothing overflows or vanishes.

    A packed block is 256 fp16 numbers below 2^15, then their scale in bf16: 514 bytes, 0.502 of fp32. The relative
    error is at most 2^-11 for numbers down to 2^-28 of their block's largest; smaller ones have an absolute error.
    (Only numbers that would round up to 2^15 are rounded down instead, so that the largest of fp32 stay finite.)
    """

    name = "fp16"
    block = 256
    block_bytes = 2 * block + 2

    @override
    def encode(self, blocks: Tensor) -> Tensor:
        """Packs fp32 ``[n, 256]`` into uint8 ``[n, 514]``."""
        # Only the exponent of the largest magnitude is kept; divided by the scale, that is from 2^14 to 2^15.
        exponent = block_amax(blocks).view(torch.int32).bitwise_and_(0x7F800000)
        scale = exponent.view(torch.float32).mul_(2.0**-14).clamp_(min=TINY)
        scaled = (blocks * scale.reciprocal()).clamp_(-_MAX, _MAX).half()
        packed = blocks.new_empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        packed[:, :-2].copy_(scaled.view(torch.uint8))
        packed[:, -2:].copy_(bf16_to_bytes(scale))
        return packed

    @override
    def decode(self, packed: Tensor) -> Tensor:
        """Unpacks uint8 ``[n, 514]`` into fp32 ``[n, 256]``."""
        return aligned(packed[:, :-2]).view(torch.float16).float().mul_(bf16_from_bytes(packed[:, -2:]))
