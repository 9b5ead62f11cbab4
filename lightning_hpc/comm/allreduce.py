"""The sliced, pipelined all-reduce over the levels of a topology.

A tensor is cut into slices. Each slice takes the same way: up the levels (a reduce-scatter each, after which a rank
holds the sum of one shard), across the outermost level (an all-reduce of the shard), and down again (an all-gather
each). Every step of that way is a stage, and the stages work at once: while slice k crosses the slow link, slice k+1 is
summed in the node and slice k-1 is spread. Each stage handles the slices in the order of their submission, which is
the same on all ranks, on process groups that no other stage uses: so no two ranks ever wait for each other crosswise.

The stages are written once; `lightning_hpc.comm.pipeline` runs them on threads or on CUDA streams.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.pipeline import Pipeline, Slice, Stage
from lightning_hpc.comm.stats import CommStats


class HierarchicalAllReduce:
    """Averages tensors over all ranks, in place; sums low-precision floats in fp32 within a level.

    Args:
        levels: This rank's levels, innermost first, as `make_levels` returns them.
        world_size: Number of ranks of the job, by which the sum is divided.
        slice_bytes: Size of a slice. Small slices overlap better, large ones pay less latency.
        stats: Where the bytes are counted.
        pipeline: Builds the executor of the stages, `ThreadPipeline` or `StreamPipeline`.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        world_size: int,
        slice_bytes: int,
        stats: CommStats,
        pipeline: Callable[[Sequence[Stage]], Pipeline],
    ) -> None:
        assert slice_bytes > 0, slice_bytes
        self._levels = levels
        self._slice_bytes = slice_bytes
        self._pipeline = pipeline(_stages(levels, 1 / world_size, stats))

    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        """Starts the reduction of a dense, contiguous tensor of any shape and floating or complex dtype.

        Returns:
            A future of the same tensor, which then holds the mean. Until then nobody may touch it.
        """
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        slices = [self._shards(part) for part in self._cut(flat)]
        return self._pipeline.submit(slices, tensor)

    def close(self) -> bool:
        """Ends the executor; what is still under way is given up. Returns whether no collective was left unfinished."""
        return self._pipeline.close()

    def _cut(self, flat: Tensor) -> Sequence[Tensor]:
        """Slices of equal size near the wanted one; a small rest would pay a round trip of its own on every level."""
        if not flat.numel():
            return []
        wanted = max(round(flat.numel() * flat.element_size() / self._slice_bytes), 1)
        return torch.chunk(flat, min(wanted, flat.numel()))

    def _shards(self, part: Tensor) -> list[Tensor]:
        """What this rank holds of a slice after 0, 1, 2, … levels up. Its last shard may be empty."""
        shards = [part]
        for level in self._levels:
            if level.lanes:
                start, stop = _shard_bounds(shards[-1].numel(), level.lanes, level.index)
                shards.append(shards[-1][start:stop])
        return shards


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
            up.append(_AllReduce(level, depth, stats))
    if levels[0].height > 0:
        up[0] = _Scaled(up[0], scale)
    return up + down


class _Scaled:
    """A rank that is alone in its node divides what it brings to the first level."""

    def __init__(self, stage: Stage, scale: float) -> None:
        self._stage, self._scale = stage, scale

    def __str__(self) -> str:
        return str(self._stage)

    def start(self, shards: Slice) -> dist.Work | None:
        shards[0].mul_(self._scale)
        return self._stage.start(shards)

    def finish(self, shards: Slice) -> None:
        self._stage.finish(shards)


class _ReduceScatter:
    """Sums a level's shards into their owners.

    An all-to-all and a local sum, since gloo's own reduce-scatter sends the bytes of an all-reduce
    (pytorch#118911, #149869), and since the sum of low-precision floats can then be taken in fp32.
    """

    def __init__(self, level: Level, depth: int, scale: float, stats: CommStats) -> None:
        self._level, self._depth, self._scale = level, depth, scale
        self._sent = stats.count_bytes(level.name)
        self._received = _Scratch()

    def __str__(self) -> str:
        return f"reduce-scatter of {self._level}"

    def start(self, shards: Slice) -> dist.Work | None:
        whole, shard = shards[self._depth], shards[self._depth + 1]
        level = self._level
        self._sent.total += (whole.numel() - shard.numel()) * whole.element_size()
        work: dist.Work | None = dist.all_to_all_single(
            self._received(level.size * shard.numel(), whole),
            whole,
            output_split_sizes=[shard.numel()] * level.size,
            input_split_sizes=_split_sizes(whole.numel(), level),
            group=level.up,
            async_op=True,
        )
        return work

    def finish(self, shards: Slice) -> None:
        shard = shards[self._depth + 1]
        if shard.numel():
            received = self._received(self._level.size * shard.numel(), shard)
            _sum_into(shard, received.view(self._level.size, -1), self._scale)


class _AllReduce:
    """Sums the shard over the ranks of the outermost level."""

    def __init__(self, level: Level, depth: int, stats: CommStats) -> None:
        self._level, self._depth = level, depth
        self._sent = stats.count_bytes(level.name)

    def __str__(self) -> str:
        return f"all-reduce of {self._level}"

    def start(self, shards: Slice) -> dist.Work | None:
        shard = shards[self._depth]
        if not shard.numel():
            return None
        self._sent.total += ring_bytes(shard.numel() * shard.element_size(), self._level.size)
        work: dist.Work | None = dist.all_reduce(shard, group=self._level.up, async_op=True)
        return work

    def finish(self, shards: Slice) -> None:
        """The sum is in place."""


class _AllGather:
    """Spreads the owners' shards over a level. An all-to-all too: gloo's all-gather wants shards of one size."""

    def __init__(self, level: Level, depth: int, stats: CommStats) -> None:
        self._level, self._depth = level, depth
        self._sent = stats.count_bytes(level.name)
        self._copies = _Scratch()

    def __str__(self) -> str:
        return f"all-gather of {self._level}"

    def start(self, shards: Slice) -> dist.Work | None:
        whole, shard = shards[self._depth], shards[self._depth + 1]
        level = self._level
        self._sent.total += shard.numel() * shard.element_size() * (level.size - 1)
        copies = self._copies(level.size * shard.numel(), whole)
        copies.view(level.size, shard.numel()).copy_(shard)
        work: dist.Work | None = dist.all_to_all_single(
            whole,
            copies,
            output_split_sizes=_split_sizes(whole.numel(), level),
            input_split_sizes=[shard.numel()] * level.size,
            group=level.down,
            async_op=True,
        )
        return work

    def finish(self, shards: Slice) -> None:
        """The whole slice is in place."""


class _Scratch:
    """A buffer that one stage uses for slice after slice, so that its pages are touched for the first time once."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def __call__(self, numel: int, like: Tensor) -> Tensor:
        if self._buffer is None or self._buffer.dtype != like.dtype or self._buffer.numel() < numel:
            self._buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._buffer[:numel]


def ring_bytes(payload: int, size: int) -> int:
    """Bytes that each of ``size`` ranks sends in a ring all-reduce of ``payload`` bytes."""
    return 2 * (size - 1) * payload // size


def _sum_into(shard: Tensor, parts: Tensor, scale: float) -> None:
    """``shard = scale * parts.sum(0)``, rounded once where the dtype is narrower than fp32."""
    if shard.dtype in (torch.float16, torch.bfloat16):
        shard.copy_(torch.sum(parts, 0, dtype=torch.float32).mul_(scale))
        return
    torch.sum(parts, 0, out=shard)
    if scale != 1.0:
        shard.mul_(scale)


def _shard_bounds(numel: int, lanes: int, index: int) -> tuple[int, int]:
    """Start and end of a rank's shard; ranks beyond the lanes own none."""
    if index >= lanes:
        return numel, numel
    return index * numel // lanes, (index + 1) * numel // lanes


def _split_sizes(numel: int, level: Level) -> list[int]:
    """Elements of each rank's shard of a slice."""
    bounds = (_shard_bounds(numel, level.lanes, index) for index in range(level.size))
    return [stop - start for start, stop in bounds]
