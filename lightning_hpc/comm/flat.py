"""The all-reduce over all ranks at once, as DistributedDataParallel does it."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hpc.comm.collectives import ring_bytes
from lightning_hpc.comm.stats import CommStats


class FlatAllReduce:
    """Averages a tensor over a process group, in place. Takes any tensor that the backend does, also sparse ones.

    The arithmetic is that of `DistributedDataParallel` without a hook, bit for bit: multiply by 1/n, then sum.

    Args:
        group: The ranks.
        stats: Where the bytes are counted, as those of level ``"all_ranks"``.
    """

    def __init__(self, group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = group
        self._size = group.size()
        self._sent = stats.count_bytes("all_ranks")

    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        """Starts the reduction.

        Returns:
            A future of the mean: in ``tensor`` itself, or in a new tensor if it is sparse.
        """
        if tensor.layout is not torch.strided:
            # Not in place: autograd makes a sparse gradient's values share memory with the gradient that it hands on
            # to other layers. (DistributedDataParallel without a hook divides in place there, and halves both.)
            tensor = (tensor.coalesce() * (1.0 / self._size)).coalesce()
            # gloo gathers the indices and values of all ranks.
            self._sent.total += (self._size - 1) * sum(map(_bytes, (tensor.indices(), tensor.values())))
        else:
            tensor.mul_(1.0 / self._size)
            self._sent.total += ring_bytes(_bytes(tensor), self._size)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None

        def finish(future: Future[list[Tensor]]) -> Tensor:
            future.value()  # raises if the collective failed
            return tensor

        reduced: Future[Tensor] = work.get_future().then(finish)
        return reduced


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
