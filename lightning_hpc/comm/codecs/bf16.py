"""bfloat16: the upper half of each fp32 number."""

from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs.codec import BlockCodec


class BF16Codec(BlockCodec):
    """Rounds each number to bf16: half the bytes, a relative error of at most 2^-8, and the range of fp32.

    A packed block is its numbers in bf16. Those above the largest bf16 number, 3.39e38, become that number, not inf.
    """

    name = "bf16"
    block = 256
    block_bytes = 2 * block

    @override
    def encode(self, blocks: Tensor) -> Tensor:
        """Packs fp32 ``[n, 256]`` into uint8 ``[n, 512]``."""
        return bf16_to_bytes(blocks)

    @override
    def decode(self, packed: Tensor) -> Tensor:
        """Unpacks uint8 ``[n, 512]`` into fp32 ``[n, 256]``."""
        return bf16_from_bytes(packed)
