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


def block_mean(blocks: Tensor) -> Tensor:
    """Mean magnitude in each block, by additions in an order that does not depend on how many blocks there are.

    Args:
        blocks: fp32 ``[n, block]``.

    Returns:
        fp32 ``[n, 1]``.
    """
    block = blocks.shape[1]
    width = block & -block  # the largest power of two that divides it
    share: float = 2.0 ** -block.bit_length()  # so that no sum overflows; multiplying by a power of two rounds nothing
    first, *others = blocks.split(width, dim=1)
    total: Tensor = first.abs().mul_(share)
    for other in others:
        total.add_(other.abs(), alpha=share)
    while width > 1:
        width //= 2
        total[:, :width].add_(total[:, width : 2 * width])
    return total[:, :1].mul(1 / share / block)


def mean_step(blocks: Tensor, ratio: float, levels: int) -> Tensor:
    """Distance between neighbouring levels in relation to each block's mean magnitude, so that large numbers clip.

    Args:
        blocks: fp32 ``[n, block]``.
        ratio: What the mean magnitude is multiplied by.
        levels: Number of levels above zero.

    Returns:
        fp32 ``[n, 1]``, held exactly by bf16, at least `TINY`. A level times its step is finite.
    """
    step = block_mean(blocks).mul_(ratio).clamp_(TINY, _largest_step(levels))
    step.view(torch.int32).bitwise_and_(~0xFFFF)
    return step


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
