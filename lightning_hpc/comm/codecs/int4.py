"""Four bits a number."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs._scale import quantization_step
from lightning_hpc.comm.codecs.codec import BlockCodec


class Int4Codec(BlockCodec):
    """Rounds to 15 levels, symmetric about an exact zero, with a step of its own for each block of 128.

    A packed block is 64 bytes, of which byte ``i`` holds ``level[i] + 16 * level[64 + i]`` as int8, then the step in
    bf16, rounded up: 66 bytes, 0.129 of fp32. The error of a number is at most half its block's step, which is 1/7 of
    the block's largest magnitude, up to 0.8 % more by rounding, and at least 1.2e-38.

    Block-wise quantisation of gradients as in `Int8Codec`.
    """

    name = "int4"
    block = 128
    block_bytes = 66
    preconditioned = True

    @override
    def encode(self, blocks: Tensor) -> Tensor:
        """Packs fp32 ``[n, 128]`` into uint8 ``[n, 66]``."""
        step = quantization_step(blocks, levels=7)
        low, high = (blocks * step.reciprocal()).round_().chunk(2, dim=1)
        packed = blocks.new_empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        # Between -7 * 17 and 7 * 17, so that it is exact as a float and fits into an int8.
        packed[:, :64].view(torch.int8).copy_(low.add_(high, alpha=16))
        packed[:, 64:].copy_(bf16_to_bytes(step))
        return packed

    @override
    def decode(self, packed: Tensor) -> Tensor:
        """Unpacks uint8 ``[n, 66]`` into fp32 ``[n, 128]``."""
        pairs = packed[:, :64].view(torch.int8)
        blocks = packed.new_empty((len(packed), self.block), dtype=torch.float32)
        # Both come out as 16 times their level: int8 arithmetic drops what does not fit, which takes the upper level
        # out of the lower; adding 8 undoes the borrow of a negative lower level before its bits are cleared.
        blocks[:, :64].copy_(pairs * 16)
        blocks[:, 64:].copy_((pairs + 8).bitwise_and_(-16))
        return blocks.mul_(bf16_from_bytes(packed[:, 64:]).mul_(1 / 16))
