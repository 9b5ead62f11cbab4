"""The largest numbers, with their indices."""

import math

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._bytes import aligned, bf16_from_bytes, bf16_to_bytes
from lightning_hpc.comm.codecs.arguments import require_number
from lightning_hpc.comm.codecs.codec import SparseCodec

_CHUNK = 256  # so that an index within a chunk is one byte
_SAMPLES = 1 << 13


class TopKCodec(SparseCodec):
    """Sends the ``k = max(1, round(ratio * n))`` numbers of largest magnitude, in bf16. Of equals, the first.

    A packet is the numbers in order of their indices; how many of them each chunk of 256 has, in 16 bits; and their
    indices within their chunks, a byte each: ``3 * k + 2 * ceil(n / 256)`` bytes, about 0.75 * ratio + 0.002 of fp32.

    Method: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; with error feedback, Stich
    et al., "Sparsified SGD with Memory", 2018. The threshold is estimated from a sample, as in Lin et al., "Deep
    Gradient Compression", 2018, but only to narrow down the numbers among which it is then found exactly.

    Args:
        ratio: Fraction of the numbers to send.

    Raises:
        TypeError: If ``ratio`` is not a number.
        ValueError: If it is not above 0 and at most 1.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.04) -> None:
        require_number("ratio", ratio, "a number above 0 and at most 1", lambda number: 0 < number <= 1)
        self.ratio = ratio

    @override
    def encode(self, values: Tensor) -> Tensor:
        """Packs fp32 ``[n]`` into uint8."""
        numel = values.numel()
        if numel == 0:
            return values.new_empty(0, dtype=torch.uint8)
        indices = _largest(values.abs(), max(1, round(self.ratio * numel)))
        counts = torch.bincount(indices // _CHUNK, minlength=math.ceil(numel / _CHUNK)).to(torch.int16)
        within = indices.to(torch.uint8)  # modulo 256
        return torch.cat((bf16_to_bytes(values[indices]), counts.view(torch.uint8), within))

    @override
    def decode(self, packed: Tensor, numel: int) -> Tensor:
        """Unpacks uint8 into fp32 ``[numel]``."""
        chunks = math.ceil(numel / _CHUNK)
        count = (packed.numel() - 2 * chunks) // 3
        sent, counts, within = packed.split([2 * count, 2 * chunks, count])
        starts = torch.arange(0, numel, _CHUNK, device=packed.device)
        indices = starts.repeat_interleave(aligned(counts).view(torch.int16).long(), output_size=count) + within
        return torch.zeros(numel, device=packed.device).index_copy_(0, indices, bf16_from_bytes(sent))


def _largest(magnitudes: Tensor, k: int) -> Tensor:
    """Indices, ascending, of the ``k`` largest."""
    candidates = _candidates(magnitudes, k)
    found = magnitudes[candidates]
    least = found.topk(k, sorted=False).values.min()
    above, equal = found > least, found == least
    # `topk` does not say which of several equals it takes, and may differ between devices.
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return candidates[chosen]


def _candidates(magnitudes: Tensor, k: int) -> Tensor:
    """Indices, ascending, of a few more than the ``k`` largest where a sample tells which, else of all."""
    numel = magnitudes.numel()
    if numel > 2 * _SAMPLES:
        # Odd, so that a sample does not keep to a few columns of a matrix.
        sample = magnitudes[:: numel // _SAMPLES | 1]
        expected = sample.numel() * k / numel
        rank = math.ceil(expected + 4 * math.sqrt(expected) + 1)  # four standard deviations to the safe side
        if rank < sample.numel():
            threshold = sample.topk(rank, sorted=False).values.min()
            indices = (magnitudes >= threshold).nonzero().squeeze(1)
            if len(indices) >= k:
                return indices
    return torch.arange(numel, device=magnitudes.device)
