"""Inputs and error feedback for the codecs' tests."""

import torch
from torch import Tensor

from lightning_hpc.comm.codecs import BlockCodec, SparseCodec

MAGNITUDES = (1e-38, 1e-30, 1e-20, 1e-7, 1.0, 1e7, 1e20, 1e30, 3.4e38)


def random_values(numel: int, magnitude: float = 1.0, seed: int = 0) -> Tensor:
    """Numbers of very different size, like those of a gradient, with the largest magnitude ``magnitude``."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator)
    if numel:
        values = (values / values.abs().max()).clamp(-1, 1)
    return values * magnitude


def round_trip(codec: BlockCodec | SparseCodec, values: Tensor) -> Tensor:
    """What the other nodes get of ``values``; a sparse codec must not have found them too dense."""
    if isinstance(codec, BlockCodec):
        padding = -values.numel() % codec.block
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, codec.block)
        packed = codec.encode(blocks)
        assert packed.dtype == torch.uint8
        assert packed.shape == (len(blocks), codec.block_bytes)
        decoded = codec.decode(packed)
        assert decoded.shape == blocks.shape
        decoded = decoded.flatten()
        assert not decoded[values.numel() :].any()  # what was padded with zeros is zero
        decoded = decoded[: values.numel()]
    else:
        packet = codec.encode(values)
        assert packet is not None
        assert packet.dtype == torch.uint8
        decoded = codec.decode(packet, values.numel())
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    assert decoded.isfinite().all()
    return decoded


def largest_residual(codec: BlockCodec | SparseCodec, steps: int = 200, numel: int = 3000) -> tuple[float, Tensor]:
    """Error feedback over random steps.

    Returns:
        The largest norm that the residual had, in norms of one step's values, and by how much the sum of all that was
        sent and the last residual miss the sum of all values.
    """
    residual, sent, given = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    largest = 0.0
    for step in range(steps):
        values = random_values(numel, seed=step)
        corrected = values + residual
        decoded = round_trip(codec, corrected)
        residual = corrected - decoded
        assert torch.equal(decoded + residual, corrected) or torch.allclose(decoded + residual, corrected, atol=1e-6)
        sent += decoded
        given += values
        largest = max(largest, (residual.norm() / values.norm()).item())
    return largest, sent + residual - given
