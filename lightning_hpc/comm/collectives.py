"""The collectives that everything is made of.

The scatter and the gather are both an all-to-all: gloo's own reduce-scatter sends the bytes of an all-reduce
(pytorch#118911, #149869), its all-gather wants parts of one size, and so sums can be taken in fp32 and in the order of
ranks: a number's sum does not depend on where in the tensor it lies.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.stats import CommStats

HOP_DEPTH = 2
"""Slices that a hop over the outermost level has under way: one waits for its slower direction, the next one sends."""


class Scratch:
    """Buffers that one stage uses for slice after slice, so that their pages are touched for the first time once.

    There are as many as a stage may have slices under way.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None] * HOP_DEPTH
        self._next = 0

    def __call__(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor with the dtype and device of ``like``; its memory is used again after `HOP_DEPTH` calls."""
        index, self._next = self._next, (self._next + 1) % HOP_DEPTH
        buffer = self._buffers[index]
        if buffer is None or buffer.dtype != like.dtype or buffer.numel() < numel:
            buffer = self._buffers[index] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel]


class Hops:
    """Sends parts of tensors to a level's ranks and theirs to all; counts the bytes.

    Each of the two ways belongs to one stage: what a call has returned holds until that method was called `HOP_DEPTH`
    times more.

    Args:
        level: The ranks.
        stats: Where the bytes are counted.
    """

    def __init__(self, level: Level, stats: CommStats) -> None:
        self._level = level
        self._sent = [stats.count_bytes(level.name) for _ in range(2)]
        self._received, self._copies = Scratch(), Scratch()

    def scatter(
        self, whole: Tensor, splits: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> tuple[Tensor, dist.Work | None]:
        """Sends each rank its part of ``whole``.

        Args:
            whole: Flat tensor.
            splits: Elements of each rank's part.
            group: The level's group to use; its `up` by default.

        Returns:
            What the ranks send to this one, ``[ranks, splits[index]]`` once the work is done, and the work.
        """
        mine = splits[self._level.index]
        self._sent[0].total += (whole.numel() - mine) * whole.element_size()
        received = self._received(len(splits) * mine, whole)
        work: dist.Work | None = dist.all_to_all_single(
            received,
            whole,
            output_split_sizes=[mine] * len(splits),
            input_split_sizes=list(splits),
            group=group or self._level.up,
            async_op=True,
        )
        return received.view(len(splits), mine), work

    def gather(
        self, part: Tensor, whole: Tensor, splits: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> dist.Work | None:
        """Sends ``part`` to all ranks, and receives theirs in ``whole``, one after the other.

        Args:
            part: Flat tensor; may be a view of ``whole``.
            whole: Flat tensor of ``sum(splits)`` elements.
            splits: Elements of each rank's part.
            group: The level's group to use; its `down` by default.
        """
        self._sent[1].total += (len(splits) - 1) * part.numel() * part.element_size()
        copies = self._copies(len(splits) * part.numel(), part)
        copies.view(len(splits), part.numel()).copy_(part)
        work: dist.Work | None = dist.all_to_all_single(
            whole,
            copies,
            output_split_sizes=list(splits),
            input_split_sizes=[part.numel()] * len(splits),
            group=group or self._level.down,
            async_op=True,
        )
        return work


class ExactSum:
    """Sums tensors over a level's ranks, in place, and always in the same order.

    Two ranks use the backend's all-reduce: a + b is b + a, and one collective has less to wait for than two.

    Args:
        level: The ranks.
        stats: Where the bytes are counted.
    """

    def __init__(self, level: Level, stats: CommStats) -> None:
        self._level = level
        self._hops = Hops(level, stats)
        self._late_hops = Hops(level, stats)
        self._sent = stats.count_bytes(level.name)

    def start_scatter(self, tensor: Tensor) -> tuple[Tensor | None, dist.Work | None]:
        """Starts the first hop of a flat tensor.

        Returns:
            What `finish_scatter` is to be given, and the work.
        """
        if not tensor.numel():
            return None, None
        if self._level.size == 2:
            self._sent.total += ring_bytes(tensor.numel() * tensor.element_size(), 2)
            return None, dist.all_reduce(tensor, group=self._level.up, async_op=True)
        return self._hops.scatter(tensor, even_splits(tensor.numel(), self._level.size))

    def finish_scatter(self, tensor: Tensor, received: Tensor | None) -> None:
        """To be called when the first hop is done."""
        if received is not None:
            self._part(tensor).copy_(sum_rows(received))

    def start_gather(self, tensor: Tensor) -> dist.Work | None:
        """Starts the second hop, after which ``tensor`` holds the sum."""
        if self._level.size == 2 or not tensor.numel():
            return None
        return self._hops.gather(self._part(tensor), tensor, even_splits(tensor.numel(), self._level.size))

    def start_late(self, tensor: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Starts all of a sum in the stage of the second hop: everything goes to everybody, which is seldom needed.

        Returns:
            What is to be summed by `sum_rows` once the work is done, ``[ranks, tensor.numel()]``, and the work.
        """
        rows = tensor.new_empty((self._level.size, tensor.numel()))
        return rows, self._late_hops.gather(tensor, rows.view(-1), [tensor.numel()] * self._level.size)

    def _part(self, tensor: Tensor) -> Tensor:
        parts: list[Tensor] = tensor.split(even_splits(tensor.numel(), self._level.size))
        return parts[self._level.index]


def sum_rows(rows: Tensor) -> Tensor:
    """Sums the rows of ``[n, m]`` in their order, in fp32 where the dtype is narrower. The rows may be overwritten."""
    narrow = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].float() if narrow else rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total


def even_splits(numel: int, ranks: int) -> list[int]:
    """Parts of nearly the same size."""
    return [(index + 1) * numel // ranks - index * numel // ranks for index in range(ranks)]


def ring_bytes(payload: int, size: int) -> int:
    """Bytes that each of ``size`` ranks sends in a ring all-reduce of ``payload`` bytes."""
    return 2 * (size - 1) * payload // size
