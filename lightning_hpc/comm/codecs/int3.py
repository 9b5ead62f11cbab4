"""Just under three bits a number."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs._scale import mean_step
from lightning_hpc.comm.codecs.codec import BlockCodec

_THIRD = 128
_STEP = 0.82  # of a block's mean magnitude: least mean square error for normal numbers, as is the next one
_WIDE = 1.3


class Int3Codec(BlockCodec):
    """Rounds two numbers of three to 7 levels and one to 5: 7 * 7 * 5 = 245 combinations, which fit into a byte.

    The levels are symmetric about an exact zero and evenly spaced. The distance between the 7 is 0.82 of the mean
    magnitude of a block of 384, that between the 5 is 1.3 times as large, and what lies beyond the outermost level is
    clipped: with so few levels, a block's largest number would waste most of them on itself.

    A packed block is 128 bytes, of which byte ``i`` holds ``level[i] + 7 * level[128 + i] + 49 * level[256 + i]`` as
    int8, then the distance in bf16: 130 bytes, 0.085 of fp32.
    """

    name = "int3"
    block = 3 * _THIRD
    block_bytes = _THIRD + 2
    preconditioned = True

    @override
    def encode(self, blocks: Tensor) -> Tensor:
        """Packs fp32 ``[n, 384]`` into uint8 ``[n, 130]``."""
        step = mean_step(blocks, _STEP, levels=3)
        inverse = step.reciprocal()
        low, middle = (blocks[:, : 2 * _THIRD] * inverse).round_().clamp_(-3, 3).chunk(2, dim=1)
        high = (blocks[:, 2 * _THIRD :] * inverse.mul_(1 / _WIDE)).round_().clamp_(-2, 2)
        packed = blocks.new_empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        # Between -122 and 122, so that it is exact as a float and fits into an int8.
        packed[:, :_THIRD].view(torch.int8).copy_(low.add_(middle, alpha=7).add_(high, alpha=49))
        packed[:, _THIRD:].copy_(bf16_to_bytes(step))
        return packed

    @override
    def decode(self, packed: Tensor) -> Tensor:
        """Unpacks uint8 ``[n, 130]`` into fp32 ``[n, 384]``."""
        blocks = packed.new_empty((len(packed), self.block), dtype=torch.float32)
        low, middle, high = blocks.chunk(3, dim=1)
        low.copy_(packed[:, :_THIRD].view(torch.int8))
        # What the lower levels add to a multiple of 49, or of 7, is less than half of it.
        torch.mul(low, 1 / 49, out=high).round_()
        low.sub_(high, alpha=49)
        torch.mul(low, 1 / 7, out=middle).round_()
        low.sub_(middle, alpha=7)
        high.mul_(_WIDE)
        return blocks.mul_(bf16_from_bytes(packed[:, _THIRD:]))
