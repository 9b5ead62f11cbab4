"""Crosses the outermost level without a codec."""

import torch.distributed as dist
from typing_extensions import override

from lightning_hpc.comm.collectives import ExactSum, sum_rows
from lightning_hpc.comm.exchanges.exchange import Exchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats


class ExactExchange(Exchange):
    """Sums the values as they are, in fp32 where their dtype is narrower and there are more than two ranks."""

    name = "none"

    def __init__(self, level: Level | None, stats: CommStats) -> None:
        super().__init__(level, stats)
        self._sum = ExactSum(level, stats) if level is not None else None

    def start_late(self, item: Slice) -> dist.Work | None:
        """Starts the sum of a slice that was refused after its first hop."""
        assert self._sum is not None
        item.received, work = self._sum.start_late(item.values)
        return work

    def finish_late(self, item: Slice) -> None:
        """Called when it is done."""
        assert item.received is not None
        item.values.copy_(sum_rows(item.received))

    @override
    def start_scatter(self, item: Slice) -> dist.Work | None:
        assert self._sum is not None
        item.received, work = self._sum.start_scatter(item.values)
        return work

    @override
    def finish_scatter(self, item: Slice) -> None:
        assert self._sum is not None
        self._sum.finish_scatter(item.values, item.received)

    @override
    def start_gather(self, item: Slice) -> dist.Work | None:
        assert self._sum is not None
        return self._sum.start_gather(item.values)

    @override
    def finish_gather(self, item: Slice) -> None:
        """The sum is in place."""
