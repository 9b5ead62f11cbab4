"""The sliced, pipelined all-reduce over the levels of a topology.

A tensor is cut into slices. Each slice takes the same way: up the levels (a reduce-scatter each, after which a rank
holds the sum of one shard), across the outermost level (exactly, or packed by a codec: see
`lightning_hpc.comm.exchanges`), and down again (an all-gather each). Every step of that way is a stage, and the stages
work at once: while slice k crosses the slow link, slice k+1 is summed in the node and slice k-1 is spread. Each stage
handles the slices in the order of their submission, which is the same on all ranks, on process groups that no other
stage uses: so no two ranks ever wait for each other crosswise.

The stages are written once; `lightning_hpc.comm.pipeline` runs them on threads or on CUDA streams.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_hpc.comm.collectives import HOP_DEPTH, Hops, Scratch, sum_rows
from lightning_hpc.comm.exchanges.exchange import Exchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.pipeline import Pipeline, Stage
from lightning_hpc.comm.slices import Slice, SlicePlan
from lightning_hpc.comm.stats import CommStats


class HierarchicalAllReduce:
    """Averages tensors over all ranks, in place; sums low-precision floats in fp32 within a level.

    Args:
        levels: This rank's levels, innermost first, as `make_levels` returns them.
        world_size: Number of ranks of the job, by which the sum is divided.
        stats: Where the bytes are counted.
        pipeline: Builds the executor of the stages, `ThreadPipeline` or `StreamPipeline`.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        world_size: int,
        stats: CommStats,
        pipeline: Callable[[Sequence[Stage]], Pipeline],
    ) -> None:
        self._pipeline = pipeline(_stages(levels, 1 / world_size, stats))

    def __call__(
        self,
        tensor: Tensor,
        plans: Sequence[SlicePlan],
        exchanges: Sequence[Exchange],
        *,
        label: str = "a bucket",
        flush: bool = False,
    ) -> Future[Tensor]:
        """Starts the reduction of a dense, contiguous tensor of any shape and floating or complex dtype.

        Args:
            tensor: What is to be averaged.
            plans: Its slices; those of a complex tensor count its real numbers.
            exchanges: How each of them crosses the outermost level.
            label: What it is, for errors.
            flush: Whether codecs give back what they have kept.

        Returns:
            A future of the same tensor, which then holds the mean. Until then nobody may touch it.
        """
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        slices = [Slice(plan, flat, exchange, label, flush) for plan, exchange in zip(plans, exchanges, strict=True)]
        return self._pipeline.submit(slices, tensor)

    def close(self) -> bool:
        """Ends the executor; what is still under way is given up. Returns whether no collective was left unfinished."""
        return self._pipeline.close()


def _stages(levels: Sequence[Level], scale: float, stats: CommStats) -> list[Stage]:
    """This rank's stages in a slice's order. The division by the number of ranks comes before anything can overflow."""
    up: list[Stage] = []
    down: list[Stage] = []
    for depth, level in enumerate(levels):
        if level.lanes:
            # Within the node the sum is divided; in fp32, where the dtype is narrower.
            up.append(_ReduceScatter(level, depth, scale if level.height == 0 else 1.0, stats))
            down.insert(0, _AllGather(level, depth, stats))
        else:
            up += [_Agree(level, stats), _Scatter(level), _Gather(level)]
    stages = up + down
    # A rank that is alone in its node divides what it brings to the first level.
    stages[0] = _Opening(stages[0], scale if levels[0].height > 0 else 1.0)
    stages[-1] = _Closing(stages[-1])
    return stages


class _Wrapper(Stage):
    """Does something beside a stage, in its thread or on its stream."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.ranks, self.depth = stage.ranks, stage.depth

    def __str__(self) -> str:
        return str(self._stage)

    @override
    def start(self, item: Slice) -> dist.Work | None:
        return self._stage.start(item)

    @override
    def finish(self, item: Slice) -> None:
        self._stage.finish(item)


class _Opening(_Wrapper):
    """The first stage takes the slice from the bucket."""

    def __init__(self, stage: Stage, scale: float) -> None:
        super().__init__(stage)
        self._scale = scale

    @override
    def start(self, item: Slice) -> dist.Work | None:
        item.open()
        if self._scale != 1.0:
            item.buffer.mul_(self._scale)
        return super().start(item)


class _Closing(_Wrapper):
    """The last stage writes the slice back."""

    @override
    def finish(self, item: Slice) -> None:
        super().finish(item)
        item.close()


class _ReduceScatter(Stage):
    """Sums a level's shards into their owners."""

    def __init__(self, level: Level, depth: int, scale: float, stats: CommStats) -> None:
        self._level, self._depth, self._scale = level, depth, scale
        self.ranks = level.ranks
        self._hops = Hops(level, stats)

    def __str__(self) -> str:
        return f"reduce-scatter of {self._level}"

    @override
    def start(self, item: Slice) -> dist.Work | None:
        item.received, work = self._hops.scatter(item.shard(self._depth), item.plan.splits[self._depth])
        return work

    @override
    def finish(self, item: Slice) -> None:
        shard = item.shard(self._depth + 1)
        if shard.numel() and item.received is not None:
            total = sum_rows(item.received)
            shard.copy_(total if self._scale == 1.0 else total.mul_(self._scale))


class _AllGather(Stage):
    """Spreads the owners' shards over a level."""

    def __init__(self, level: Level, depth: int, stats: CommStats) -> None:
        self._level, self._depth = level, depth
        self.ranks = level.ranks
        self._hops = Hops(level, stats)

    def __str__(self) -> str:
        return f"all-gather of {self._level}"

    @override
    def start(self, item: Slice) -> dist.Work | None:
        part, whole = item.shard(self._depth + 1), item.shard(self._depth)
        return self._hops.gather(part, whole, item.plan.splits[self._depth])

    @override
    def finish(self, item: Slice) -> None:
        """The whole slice is in place."""


class _Agree(Stage):
    """The ranks of the outermost level learn whether each of them can pack the slice."""

    def __init__(self, level: Level, stats: CommStats) -> None:
        self._level = level
        self.ranks = level.ranks
        self._hops = Hops(level, stats)
        self._words = Scratch()
        self._asked = False

    def __str__(self) -> str:
        return f"agreement of {self._level}"

    @override
    def start(self, item: Slice) -> dist.Work | None:
        word = item.exchange.agree(item)
        self._asked = word is not None
        if word is None:
            return None
        assert self._level.agree is not None
        self._received = self._words(self._level.size, word)
        return self._hops.gather(word.view(1), self._received, [1] * self._level.size, self._level.agree)

    @override
    def finish(self, item: Slice) -> None:
        if self._asked:
            item.exchange.agreed(item, self._received)


class _Scatter(Stage):
    """The first hop over the outermost level."""

    depth = HOP_DEPTH

    def __init__(self, level: Level) -> None:
        self._level = level
        self.ranks = level.ranks

    def __str__(self) -> str:
        return f"reduce-scatter of {self._level}"

    @override
    def start(self, item: Slice) -> dist.Work | None:
        work: dist.Work | None = item.exchange.start_scatter(item)
        return work

    @override
    def finish(self, item: Slice) -> None:
        item.exchange.finish_scatter(item)


class _Gather(Stage):
    """The second hop over the outermost level."""

    depth = HOP_DEPTH

    def __init__(self, level: Level) -> None:
        self._level = level
        self.ranks = level.ranks

    def __str__(self) -> str:
        return f"all-gather of {self._level}"

    @override
    def start(self, item: Slice) -> dist.Work | None:
        work: dist.Work | None = item.exchange.start_gather(item)
        return work

    @override
    def finish(self, item: Slice) -> None:
        item.exchange.finish_gather(item)
