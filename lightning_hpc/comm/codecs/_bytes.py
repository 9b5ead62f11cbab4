"""Numbers in bf16 as bytes."""

import torch
from torch import Tensor

_MAX = torch.finfo(torch.bfloat16).max


def bf16_to_bytes(values: Tensor) -> Tensor:
    """Rounds to bf16, to the largest number instead of inf.

    Args:
        values: fp32 ``[..., n]``, contiguous.

    Returns:
        uint8 ``[..., 2 * n]``.
    """
    return values.clamp(-_MAX, _MAX).bfloat16().view(torch.uint8)


def bf16_from_bytes(packed: Tensor) -> Tensor:
    """Inverse of `bf16_to_bytes`.

    Args:
        packed: uint8 ``[..., 2 * n]`` with any strides, wherever it lies in memory.

    Returns:
        fp32 ``[..., n]``.
    """
    return aligned(packed).view(torch.bfloat16).float()


def aligned(packed: Tensor) -> Tensor:
    """The same bytes such that they may be viewed as a two-byte type."""
    if packed.is_contiguous() and packed.storage_offset() % 2 == 0:
        return packed
    return packed.clone(memory_format=torch.contiguous_format)
