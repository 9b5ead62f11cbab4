"""Matrices as products of two thin factors, of which one is sent."""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs._scale import TINY
from lightning_hpc.comm.codecs.arguments import require_number
from lightning_hpc.comm.codecs.codec import LinearCodec, Segment

_NOISE = 1e-6


@dataclass
class _Factor:
    """The basis that one segment is projected on, and where it came from.

    Attributes:
        rows: Rows of the segment.
        columns: Columns of the segment.
        steps: Number of times that the basis has been replaced. While it is even, the basis spans rows of the matrix
            and is ``[columns, rank]``; while it is odd, it spans columns and is ``[rows, rank]``.
        basis: Orthonormal columns, fp32.
        noise: Fixed random numbers, ``[max(rows, columns), rank]``.
    """

    rows: int
    columns: int
    steps: int
    basis: Tensor
    noise: Tensor

    def project(self, matrix: Tensor) -> Tensor:
        """The coordinates of ``[rows, columns]`` in the basis: ``[rows, rank]``, or ``[columns, rank]``."""
        return (matrix.T if self.steps % 2 else matrix) @ self.basis

    def expand(self, coordinates: Tensor) -> Tensor:
        """Inverse of `project` within the span of the basis: ``[rows, columns]``."""
        return self.basis @ coordinates.T if self.steps % 2 else coordinates @ self.basis.T

    def advance(self, coordinates: Tensor) -> None:
        """Makes the coordinates the next basis."""
        self.basis = _orthonormal(coordinates, self.noise)
        self.steps += 1

    @property
    def message_shape(self) -> tuple[int, int]:
        """Shape of what `project` gives."""
        return (self.columns if self.steps % 2 else self.rows), self.basis.shape[1]


class LowRankCodec(LinearCodec):
    """Sends each matrix as its coordinates in a basis of ``rank`` vectors, which all nodes have.

    Power iteration, spread over the steps: a basis Q of ``rank`` row vectors gives the message P = M Q and the result
    P Q^T; the sum of all nodes' P, made orthonormal, is the basis of column vectors of the next step, whose message is
    Q = M^T P, and so on in turn. Each step needs one all-reduce, of ``rank * rows`` and ``rank * columns`` numbers by
    turns, and the basis follows the gradients' main directions.

    Method: ACP-SGD in Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning", 2023; after Vogels et al., "PowerSGD", 2019.

    Segments for which this would not at least halve the numbers go into the message as they are: vectors, and matrices
    with ``rows * columns <= rank * (rows + columns)``.

    All nodes must compute the same basis from the same sums. They do on the same kind of device with the same number of
    threads; between different kinds, results differ as matrix products do, in the last bits. Numbers above
    3e38 / sqrt(max(rows, columns)) overflow.

    Args:
        rank: Vectors of a basis. Where a segment has fewer rows or columns, that number is taken.

    Raises:
        TypeError: If ``rank`` is not an integer.
        ValueError: If it is below 1.
    """

    name = "lowrank"

    def __init__(self, rank: int = 8) -> None:
        require_number("rank", rank, "an integer of at least 1", lambda number: number >= 1, kind=Integral)
        self.rank = rank
        self._factors: dict[tuple[str, int], _Factor] = {}

    @override
    def encode(self, values: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Maps fp32 ``[n]`` to an fp32 message."""
        parts = []
        for segment, part in zip(segments, values.split([segment.numel for segment in segments]), strict=True):
            factor = self._factor(segment, values.device)
            if factor is not None:
                part = factor.project(part.view(segment.rows, segment.columns)).flatten()
            parts.append(part)
        return torch.cat(parts) if parts else values.clone()

    @override
    def decode(self, message: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Maps an fp32 message, or a sum of messages, to fp32 ``[n]``."""
        values = message.new_empty(sum(segment.numel for segment in segments))
        outputs = values.split([segment.numel for segment in segments])
        for (factor, part), output in zip(self._parts(message, segments), outputs, strict=True):
            output.copy_(part if factor is None else factor.expand(part).flatten())
        return values

    @override
    def advance(self, message: Tensor, segments: Sequence[Segment]) -> None:
        """Takes the sum of all nodes' messages; it becomes the next basis."""
        for factor, part in self._parts(message, segments):
            if factor is not None:
                factor.advance(part)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """For each compressed segment its basis, and its rows, columns and steps."""
        state = {}
        for (name, start), factor in self._factors.items():
            state[f"{name}:{start}:basis"] = factor.basis
            state[f"{name}:{start}:rows_columns_steps"] = torch.tensor([factor.rows, factor.columns, factor.steps])
        return state

    @override
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave. Segments of another shape or start, or of another rank, start afresh."""
        self._factors.clear()
        for key, basis in state.items():
            name, start, kind = key.rsplit(":", 2)
            if kind == "basis":
                rows, columns, steps = state[f"{name}:{start}:rows_columns_steps"].tolist()
                noise = _noise(name, max(rows, columns), basis.shape[1]).to(basis.device)
                self._factors[name, int(start)] = _Factor(rows, columns, steps, basis, noise)

    def _parts(self, message: Tensor, segments: Sequence[Segment]) -> Iterator[tuple[_Factor | None, Tensor]]:
        """Each segment's factor and its part of the message, in the shape that the factor gives it."""
        start = 0
        for segment in segments:
            factor = self._factor(segment, message.device)
            shape = (segment.numel,) if factor is None else factor.message_shape
            end = start + math.prod(shape)
            yield factor, message[start:end].view(shape)
            start = end
        assert start == message.numel(), (start, message.numel())

    def _factor(self, segment: Segment, device: torch.device) -> _Factor | None:
        """The segment's factor, which is made where there is none that fits; None if the segment is sent as it is."""
        rows, columns = segment.rows, segment.columns
        rank = min(self.rank, rows, columns)
        if rows * columns <= rank * (rows + columns):
            return None
        factor = self._factors.get((segment.name, segment.start))
        if factor is None or (factor.rows, factor.columns, factor.basis.shape[1]) != (rows, columns, rank):
            noise = _noise(segment.name, max(rows, columns), rank).to(device)
            basis = _orthonormal(torch.zeros_like(noise[:columns]), noise)
            factor = self._factors[segment.name, segment.start] = _Factor(rows, columns, 0, basis, noise)
        elif factor.basis.device != device:
            factor.basis, factor.noise = factor.basis.to(device), factor.noise.to(device)
        return factor


def _noise(name: str, length: int, rank: int) -> Tensor:
    """Normal fp32 ``[length, rank]``, the same for a name everywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(length, rank, generator=generator)


def _orthonormal(vectors: Tensor, noise: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``vectors``, and random directions where these span less.

    Without noise, directions that the vectors lack would be filled up with the first unit vectors, and a gradient whose
    first rows are always zero would never be seen. Scaling by the largest keeps squares within the range of fp32.
    """
    scaled = vectors / vectors.abs().max().clamp(min=TINY)
    basis: Tensor = torch.linalg.qr(scaled.add_(noise[: len(scaled)], alpha=_NOISE)).Q
    return basis
