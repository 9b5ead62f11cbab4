"""The communication hook that `HPCStrategy` registers with DistributedDataParallel, and the state behind it."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hpc.comm.allreduce import HierarchicalAllReduce
from lightning_hpc.comm.exposed import CudaExposedClock, ExposedClock, HostExposedClock
from lightning_hpc.comm.flat import FlatAllReduce
from lightning_hpc.comm.groups import destroy_levels, keep_levels_for_ever, make_levels
from lightning_hpc.comm.pipeline import StreamPipeline, ThreadPipeline
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology


class GradientReducer:
    """Averages the gradient buckets of one DistributedDataParallel module over all ranks of the job.

    Making one is a collective: all ranks call it with the same arguments, after `torch.distributed` was initialised.

    Args:
        topology: The ranks. With one level only, buckets go to the backend's own all-reduce, as in plain DDP.
        device: Where the gradients are.
        slice_bytes: See `HierarchicalAllReduce`.
        timeout: How long one collective may take, or None for the backend's default.
        stats: Where bytes, buckets and exposed time are counted.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        device: torch.device,
        slice_bytes: int,
        timeout: timedelta | None,
        stats: CommStats,
    ) -> None:
        self._stats = stats
        assert dist.group.WORLD is not None, "torch.distributed is not initialised"
        self._flat = FlatAllReduce(dist.group.WORLD, stats)
        self._levels = make_levels(topology, timeout=timeout) if topology.depth > 1 else []
        self._hierarchical = (
            HierarchicalAllReduce(
                self._levels,
                world_size=topology.world_size,
                slice_bytes=slice_bytes,
                stats=stats,
                pipeline=partial(StreamPipeline, device=device) if device.type == "cuda" else ThreadPipeline,
            )
            if self._levels
            else None
        )
        self._reduce: Callable[[Tensor], Future[Tensor]] = self._hierarchical or self._flat
        self._clock: ExposedClock = (
            CudaExposedClock(stats, device) if device.type == "cuda" else HostExposedClock(stats)
        )

    def __call__(self, gradients: Tensor, is_last: bool) -> Future[Tensor]:
        """Starts the reduction of one bucket.

        Args:
            gradients: Flat tensor of the bucket's gradients; sparse gradients of embeddings take the flat path.
            is_last: Whether the backward computation ends with this bucket.

        Returns:
            A future of the same tensor, averaged in place.
        """
        self._stats.codecs["none"] += 1
        if gradients.layout is torch.strided:
            future = self._reduce(gradients)
        else:
            self._stats.fallbacks["sparse"] += 1
            future = self._flat(gradients)
        return self._clock.follow(future, is_last)

    def close(self) -> None:
        """Ends the executor and gives the process groups back."""
        if self._hierarchical is not None and not self._hierarchical.close():
            keep_levels_for_ever(self._levels)
        destroy_levels(self._levels)


# DistributedDataParallel compares these annotations with its own types. (mypy: not every build of torch has the name.)
def reduce_gradients(
    state: GradientReducer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook: starts the reduction of one bucket of gradients and returns at once."""
    return state(bucket.buffer(), bucket.is_last())
