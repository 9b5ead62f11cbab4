"""The slices of a bucket as one rank sees them, and what travels through the stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.layout import Part, Run, SliceLayout


@dataclass(frozen=True)
class SlicePlan:
    """One rank's way through a slice.

    Attributes:
        layout: The slice.
        shards: Start and stop of what this rank holds after 0, 1, 2, … levels up, in elements of the slice.
        splits: For each level, the elements that each of its ranks holds after it.
        run: What this rank brings to the outermost level.
        owned: What this rank sums there.
    """

    layout: SliceLayout
    shards: tuple[tuple[int, int], ...]
    splits: tuple[list[int], ...]
    run: Run
    owned: Run

    @classmethod
    def make(cls, layout: SliceLayout, levels: Sequence[Level]) -> "SlicePlan":
        """Follows a rank through its levels, innermost first."""
        bounds, leaves = layout.bounds, (0, len(layout.bounds) - 1)
        shards, splits = [(bounds[0], bounds[-1])], []
        run = layout.run(*shards[0])
        for level in levels:
            owners = level.lanes or level.size
            if owners > leaves[1] - leaves[0]:  # the outermost level, where this slice is not cut further
                break
            width = (leaves[1] - leaves[0]) // owners
            cuts = [leaves[0] + index * width for index in range(owners + 1)]
            sizes = [bounds[stop] - bounds[start] for start, stop in pairwise(cuts)]
            splits.append(sizes + [0] * (level.size - owners))
            leaves = (cuts[level.index], cuts[level.index + 1]) if level.index < owners else (cuts[-1], cuts[-1])
            shards.append((bounds[leaves[0]], bounds[leaves[1]]))
            if level.lanes:
                run = layout.run(*shards[-1])
        return cls(layout, tuple(shards), tuple(splits), run, layout.run(*shards[-1]))


@dataclass
class Slice:
    """One slice on its way through the stages.

    Attributes:
        plan: Where it is cut.
        bucket: The flat bucket, which it is taken from and at last written to.
        exchange: How it crosses the outermost level; the stage there may choose another.
        label: The bucket, for errors.
        flush: Whether it crosses uncompressed, with all that the codec had kept.
        buffer: Its elements: a view of the bucket, or a copy from the first stage to the last.
        carried: What one stage of the outermost level leaves for the next.
        received: What has come in, until it is summed.
        sizes: Bytes of each rank's packet, where they differ.
        scale: What its values are divided by before they are packed.
        lost: What the first hop has lost, until it is known whether that counts.
        refused: Whether some rank's values are not finite, so that the slice is sent as it is.
        poisoned: On CUDA, a boolean scalar: whether a gradient of some rank is not finite.
    """

    plan: SlicePlan
    bucket: Tensor
    exchange: Any
    label: str = "a bucket"
    flush: bool = False
    buffer: Tensor = field(init=False)
    carried: Tensor | None = None
    received: Tensor | None = None
    sizes: list[int] = field(default_factory=list)
    scale: Tensor | None = None
    lost: Tensor | None = None
    refused: bool = False
    poisoned: Tensor | None = None

    def __post_init__(self) -> None:
        self.buffer = self.bucket  # until the first stage opens it

    def __str__(self) -> str:
        return self.label

    @property
    def temporaries(self) -> list[Tensor]:
        """What was made on the way and goes from stage to stage."""
        copied = self.buffer if self.plan.layout.parts and self.buffer is not self.bucket else None
        made = (copied, self.received, self.carried, self.scale, self.lost, self.poisoned)
        return [tensor for tensor in made if tensor is not None]

    def open(self) -> None:
        """Takes the elements from the bucket."""
        layout = self.plan.layout
        if not layout.parts:
            self.buffer = self.bucket[layout.start : layout.start + layout.numel]
            return
        self.buffer = torch.zeros(layout.numel, dtype=self.bucket.dtype, device=self.bucket.device)
        torch._foreach_copy_([_within(self.buffer, part) for part in layout.parts], self._sources())

    def close(self) -> None:
        """Writes the elements back."""
        if self.plan.layout.parts:
            torch._foreach_copy_(self._sources(), [_within(self.buffer, part) for part in self.plan.layout.parts])

    def shard(self, depth: int) -> Tensor:
        """What this rank holds after ``depth`` levels up."""
        start, stop = self.plan.shards[depth]
        return self.buffer[start:stop]

    @property
    def values(self) -> Tensor:
        """What this rank brings to the outermost level, and takes from there."""
        return self.buffer[self.plan.run.start : self.plan.run.stop]

    def _sources(self) -> list[Tensor]:
        return [self.bucket[part.source : part.source + part.numel] for part in self.plan.layout.parts]


def _within(buffer: Tensor, part: Part) -> Tensor:
    return buffer[part.offset : part.offset + part.numel]
