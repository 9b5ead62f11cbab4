"""How a bucket of gradients is cut into slices, and each slice into leaves.

A slice is what moves through the levels together. It is cut into as many *leaves* as there are owners over all levels:
going up, a rank keeps an ever smaller run of leaves. An exact slice lies in the bucket and may be cut anywhere. A slice
for a codec is a copy, put together from *parts* of parameters, so that its cuts depend on the parameter alone and never
on the bucket: DistributedDataParallel chooses other buckets after the first step, and the first ones again on resume
(pytorch#48867, #153404, #154447), yet what a codec has packed and kept for the next step must be the same then.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from typing_extensions import Self

_PIECE_NUMEL = 2**18  # a large parameter is cut into pieces of 1 MiB of fp32, which slices of any size are made of


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of a parameter.

    Attributes:
        name: Name in the module.
        numel: Number of elements.
        rows: Size of the first dimension; 1 for a scalar.
    """

    name: str
    numel: int
    rows: int

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> Self:
        """Describes a parameter."""
        return cls(name, parameter.numel(), parameter.shape[0] if parameter.dim() else 1)


@dataclass(frozen=True)
class Part:
    """A run of one parameter's elements within a slice.

    Attributes:
        parameter: The parameter.
        start: Its first element, in the flattened parameter.
        numel: Number of elements.
        offset: Where they lie in the slice.
        source: Where they lie in the bucket.
    """

    parameter: ParameterSpec
    start: int
    numel: int
    offset: int
    source: int


@dataclass(frozen=True)
class SliceLayout:
    """A slice of a bucket.

    Attributes:
        numel: Elements, with padding.
        bounds: Where the leaves begin, and where the last one ends.
        start: Where an exact slice begins in the bucket.
        parts: What a slice for a codec is put together from, in the order of the slice; empty for an exact one.
        compressed: Whether the codec is to be used.
    """

    numel: int
    bounds: tuple[int, ...]
    start: int = 0
    parts: tuple[Part, ...] = ()
    compressed: bool = False

    def run(self, start: int, stop: int) -> "Run":
        """What lies between two leaves' bounds."""
        return Run(tuple(part for part in self.parts if start <= part.offset < stop), start, stop)


@dataclass(frozen=True, eq=False)  # it is a key, and equal runs of different layouts are different
class Run:
    """Consecutive leaves of a slice, which one rank encodes together.

    Attributes:
        parts: What they hold.
        start: Where they begin in the slice.
        stop: Where they end.
    """

    parts: tuple[Part, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements, with padding."""
        return self.stop - self.start

    @property
    def padding(self) -> Tensor:
        """Where there is none of the parts: indices, counted from the start."""
        ends = [part.offset + part.numel for part in self.parts]
        begins = [part.offset for part in self.parts]
        gaps = zip([self.start, *ends], [*begins, self.stop], strict=True)
        return torch.cat([torch.arange(end - self.start, begin - self.start) for end, begin in gaps])


@dataclass(frozen=True)
class Grain:
    """How finely a codec's slices may be cut.

    Attributes:
        block: Leaves begin at multiples of this many elements of a parameter; None keeps each parameter whole.
        min_numel: Smaller parameters are sent uncompressed.
        grouped: Whether a slice may hold several parameters.
        crossing: Whether the ranks of the outermost level own a leaf each.
    """

    block: int | None
    min_numel: int = 0
    grouped: bool = True
    crossing: bool = True


def exact_slices(numel: int, leaves: int, slice_numel: int) -> list[SliceLayout]:
    """Slices of equal size near the wanted one; a small rest would pay a round trip of its own on every level."""
    count = min(max(round(numel / slice_numel), 1), numel)
    bounds = [index * numel // count for index in range(count + 1)] if count else []
    return [
        SliceLayout(stop - start, _even_bounds(stop - start, leaves), start=start) for start, stop in pairwise(bounds)
    ]


def codec_slices(
    bucket: Sequence[ParameterSpec], leaves: int, slice_numel: int, grain: Grain, homes: Mapping[str, int]
) -> list[SliceLayout]:
    """Slices of whole pieces of parameters.

    Args:
        bucket: The parameters in the order of the bucket.
        leaves: Number of leaves of each slice.
        slice_numel: Elements of a slice, about.
        grain: What the codec asks for.
        homes: Where each parameter's cuts begin, from `assign_homes`.
    """
    sources = accumulate((spec.numel for spec in bucket), initial=0)
    placed = [(spec, source) for spec, source in zip(bucket, sources, strict=False) if spec.numel]
    small = [pair for pair in placed if pair[0].numel < grain.min_numel]
    large = [pair for pair in placed if pair[0].numel >= grain.min_numel]
    return [
        *(_pack(group, 1, leaves, homes, False) for group in _grouped(small, 1, slice_numel, True)),
        *(
            _pack(group, grain.block, leaves, homes, True)
            for group in _grouped(large, grain.block, slice_numel, grain.grouped)
        ),
    ]


def assign_homes(parameters: Sequence[ParameterSpec], leaves: int) -> dict[str, int]:
    """Gives each parameter the leaf that its first cut lies in, so that all leaves get about as many elements.

    The largest parameter goes first, always to the leaf that has least so far (the LPT rule: Graham, 1969).
    """
    loads = [0] * leaves
    homes = {}
    for spec in sorted(parameters, key=lambda spec: -spec.numel):
        homes[spec.name] = loads.index(min(loads))
        loads[homes[spec.name]] += spec.numel
    return homes


@dataclass(frozen=True)
class _Piece:
    parameter: ParameterSpec
    source: int  # where the parameter begins in the bucket
    start: int
    stop: int


def _grouped(
    placed: Sequence[tuple[ParameterSpec, int]], block: int | None, slice_numel: int, grouped: bool
) -> Iterator[list[_Piece]]:
    """The parameters' pieces, gathered into lists for one slice each."""
    group: list[_Piece] = []
    filled = 0
    for piece in (piece for spec, source in placed for piece in _pieces(spec, source, block)):
        numel = piece.stop - piece.start
        # Half a piece too many is better than half a slice too few.
        if group and (not grouped or filled + numel // 2 > slice_numel):
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += numel
    if group:
        yield group


def _pieces(spec: ParameterSpec, source: int, block: int | None) -> Iterator[_Piece]:
    step = spec.numel if block is None else max(_PIECE_NUMEL // block, 1) * block
    for start in range(0, spec.numel, step):
        yield _Piece(spec, source, start, min(start + step, spec.numel))


def _pack(
    pieces: Sequence[_Piece], block: int | None, leaves: int, homes: Mapping[str, int], compressed: bool
) -> SliceLayout:
    """Puts a slice together leaf by leaf, each part padded to whole blocks."""
    parts: list[Part] = []
    bounds = [0]
    filled = 0
    cuts = [_cuts(piece.start, piece.stop, block, leaves) for piece in pieces]
    for leaf in range(leaves):
        for piece, cut in zip(pieces, cuts, strict=True):
            place = (leaf - homes[piece.parameter.name]) % leaves
            start, stop = cut[place], cut[place + 1]
            if start < stop:
                parts.append(Part(piece.parameter, start, stop - start, filled, piece.source + start))
                filled += stop - start if block is None else -(-(stop - start) // block) * block
        bounds.append(filled)
    return SliceLayout(filled, tuple(bounds), parts=tuple(parts), compressed=compressed)


def _cuts(start: int, stop: int, block: int | None, leaves: int) -> list[int]:
    """Bounds of a piece's parts, one a leaf, at multiples of the block from the piece's start."""
    if block is None:
        return [start] + [stop] * leaves
    blocks = -(-(stop - start) // block)
    return [min(start + index * blocks // leaves * block, stop) for index in range(leaves + 1)]


def _even_bounds(numel: int, leaves: int) -> tuple[int, ...]:
    return tuple(index * numel // leaves for index in range(leaves + 1))
