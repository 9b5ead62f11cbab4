"""Small numbers become zero; one bit a number says which, and the rest is sent."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs.arguments import require_number
from lightning_hpc.comm.codecs.codec import SparseCodec

# Eight bytes in an int64. Multiplied by the first, their lowest bits meet in the highest byte, in order. Multiplied by
# the second, a byte is repeated in all of them; the third keeps another bit in each; added to those, the fourth carries
# each into its byte's highest bit.
_GATHER = 0x0102040810204080
_REPEAT = 0x0101010101010101
_BITS = 0x8040201008040201 - (1 << 64)  # as a signed number
_CARRY = 0x7F7F7F7F7F7F7F7F

_SMALLEST = 2.0**-149  # the least fp32 number above zero


class BitmaskCodec(SparseCodec):
    """Sends the numbers of at least ``threshold`` times the root mean square, in bf16, and a bit for each number.

    The threshold is relative because gradients differ by orders of magnitude between models, layers and stages of
    training: an absolute one would have to be tuned for each. Keep it below sqrt(3): under error feedback, numbers that
    are held back spread evenly below the threshold, and that many times their root mean square is all that evenly
    spread numbers can reach. Above it, the threshold grows until next to nothing is sent. At 1.5, from 6 to 14 % of the
    numbers are sent in the long run, for gradients from pure noise to nearly constant ones. The largest magnitude is
    always sent, so whatever the numbers are, something is.

    A packet is the numbers sent, in order, then ``ceil(n / 8)`` bytes of mask, lowest bit first: 1/32 + density/2 of
    fp32. A mask costs less than the indices of `TopKCodec` once one number in 8 is sent.

    Thresholded gradients with error feedback: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
    Computing", 2015.

    Args:
        threshold: Multiple of the root mean square; 0 sends all that is not zero.
        sparsity_limit: Least fraction of zeros at which a packet is made.

    Raises:
        TypeError: If one of them is not a number.
        ValueError: If ``threshold`` is negative or not finite, or ``sparsity_limit`` not from 0 to 1.
    """

    name = "bitmask"

    def __init__(self, threshold: float = 1.5, sparsity_limit: float = 0.8) -> None:
        require_number("threshold", threshold, "a finite number of at least 0", lambda number: 0 <= number < math.inf)
        require_number("sparsity_limit", sparsity_limit, "a number from 0 to 1", lambda number: 0 <= number <= 1)
        self.threshold = threshold
        self.sparsity_limit = sparsity_limit

    @override
    def encode(self, values: Tensor) -> Tensor | None:
        """Packs fp32 ``[n]`` into uint8, or None where fewer than ``sparsity_limit`` of the values become zero."""
        numel = values.numel()
        if numel == 0:
            return values.new_empty(0, dtype=torch.uint8)
        magnitudes = values.abs()
        threshold = max(min(self.threshold * _root_mean_square(values), 0.9 * magnitudes.max().item()), _SMALLEST)
        mask = values.new_zeros(8 * math.ceil(numel / 8), dtype=torch.bool)
        torch.ge(magnitudes, threshold, out=mask[:numel])
        sent = values[mask[:numel]]
        if (numel - sent.numel()) / numel < self.sparsity_limit:
            return None
        bits = (mask.view(torch.int64) * _GATHER).bitwise_right_shift_(56).to(torch.uint8)
        return torch.cat((bf16_to_bytes(sent), bits))

    @override
    def decode(self, packed: Tensor, numel: int) -> Tensor:
        """Unpacks uint8 into fp32 ``[numel]``."""
        sent, bits = packed.tensor_split([packed.numel() - math.ceil(numel / 8)])
        mask = (bits.to(torch.int64) * _REPEAT).bitwise_and_(_BITS).add_(_CARRY)
        mask = mask.bitwise_right_shift_(7).bitwise_and_(_REPEAT).view(torch.uint8)[:numel]
        # The place of each number among those sent, from 1; the rest takes the zero at place 0. Unlike `nonzero`, this
        # takes the same time at any density, and on CUDA the host does not wait for it.
        places = mask.cumsum(0, dtype=torch.int32).mul_(mask)
        return F.pad(bf16_from_bytes(sent), (1, 0)).index_select(0, places)


def _root_mean_square(values: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(values).item()
    if not 1e-18 < norm < 1e18:  # squares may have left the range of fp32
        norm = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norm / math.sqrt(values.numel())
