"""The scale of a block of numbers that is to be stored in few bits."""

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
"""Smallest scale: its inverse is finite, and it survives where denormal numbers are flushed to zero."""


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude in each block.

    Args:
        blocks: fp32 ``[n, block]``.

    Returns:
        fp32 ``[n, 1]``.
    """
    # Two reductions that only read are faster than writing the magnitudes first.
    return torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())


def quantization_step(blocks: Tensor, levels: int) -> Tensor:
    """Distance between neighbouring levels when each block's largest magnitude gets the level ``levels``.

    It is rounded up to a number that bf16 holds exactly, so that it costs two bytes and nothing is clipped.

    Args:
        blocks: fp32 ``[n, block]``.
        levels: Number of levels above zero.

    Returns:
        fp32 ``[n, 1]``, at least `TINY`. A level times its step is finite.
    """
    step = block_amax(blocks).mul_(1 / levels).clamp_(min=TINY)
    bits = step.view(torch.int32)  # the upper half of an fp32 number is its bf16 value, rounded towards zero
    bits.add_(0xFFFF).bitwise_and_(~0xFFFF)
    # The level of the very largest fp32 numbers: rounded up, it would become inf once multiplied.
    return step.clamp_(max=_largest_step(levels))


def _largest_step(levels: int) -> float:
    bits = torch.tensor(torch.finfo(torch.float32).max / levels).view(torch.int32).bitwise_and_(~0xFFFF)
    return bits.view(torch.float32).item()
