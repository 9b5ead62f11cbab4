"""Eight bits a number."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs._scale import quantization_step
from lightning_hpc.comm.codecs.codec import BlockCodec


class Int8Codec(BlockCodec):
    """Rounds to 255 levels, symmetric about an exact zero, with a step of its own for each block of 128.

    A packed block is 128 int8 levels, then the step in bf16, rounded up: 130 bytes, 0.254 of fp32. (Two bytes of step
    for 128 numbers lose less than four for 256, at the same size.) The error of a number is at most half its block's
    step, which is 1/127 of the block's largest magnitude, up to 0.8 % more by rounding, and at least 1.2e-38.

    Block-wise quantisation of gradients: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016.
    """

    name = "int8"
    block = 128
    block_bytes = 130

    @override
    def encode(self, blocks: Tensor) -> Tensor:
        """Packs fp32 ``[n, 128]`` into uint8 ``[n, 130]``."""
        step = quantization_step(blocks, levels=127)
        packed = blocks.new_empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        packed[:, : self.block].view(torch.int8).copy_((blocks * step.reciprocal()).round_())
        packed[:, self.block :].copy_(bf16_to_bytes(step))
        return packed

    @override
    def decode(self, packed: Tensor) -> Tensor:
        """Unpacks uint8 ``[n, 130]`` into fp32 ``[n, 128]``."""
        return packed[:, : self.block].view(torch.int8).float().mul_(bf16_from_bytes(packed[:, self.block :]))
