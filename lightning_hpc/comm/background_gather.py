"""An all-gather that nobody waits for."""

import ctypes
import time
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

# How far this rank may be ahead of the slowest one. Ranks that reduce gradients are never a whole one apart, but the
# threads that exchange may have to wait for a processor.
_MOST_PENDING = 16


class BackgroundGather:
    """Collects arrays of one shape from all ranks, while they go on with what they do.

    It has a process group of its own, on gloo and in the host's memory, also where the training uses NCCL: so nothing
    of the training waits behind it, and no device is waited for. All ranks make it and call `start` equally often.
    Where they do not, because a rank has ended or failed, nobody hangs: what is pending is left behind.

    Constructing it is a collective.

    Attributes:
        failure: Why nothing more is collected, or None.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", group_desc="hpc:background_gather")
        self._ranks = dist.get_world_size(self._group)
        # gloo reads and writes the tensors until the work is done.
        self._pending: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    @property
    def pending(self) -> int:
        """Number of collections that have not been taken."""
        return len(self._pending)

    def start(self, values: NDArray[np.float64]) -> None:
        """Starts to collect the ranks' ``values``, which must not be changed afterwards."""
        if self.failure is not None or self._group is None:
            return
        if len(self._pending) == _MOST_PENDING:
            self.failure = f"the slowest rank is {_MOST_PENDING} exchanges behind"
            return
        mine = torch.from_numpy(values)
        received = mine.new_empty((self._ranks * len(mine), *mine.shape[1:]))
        try:
            work = dist.all_gather_single(received, mine, group=self._group, async_op=True)
        except RuntimeError as error:  # a peer is gone
            self.failure = str(error)
            return
        assert work is not None
        self._pending.append((work, mine, received))

    def take(self, wait_s: float = 0.0) -> NDArray[np.float64] | None:
        """The oldest collection that has not been taken, of shape (ranks, …); None if it is not complete yet.

        Args:
            wait_s: Most seconds to wait for it.
        """
        if not self._pending or not self._is_completed(time.monotonic() + wait_s):
            return None
        work, mine, received = self._pending.popleft()
        try:
            work.wait()
        except RuntimeError as error:  # a peer is gone
            self.failure = str(error)
            return None
        return received.view(self._ranks, *mine.shape).numpy()

    def close(self) -> None:
        """Gives the process group back, unless peers may never answer what is pending."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._pending or self.failure is not None:
            # gloo's destructor joins its threads, and so would hold up the end of the process until the time-out.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        else:
            dist.destroy_process_group(group)

    def _is_completed(self, deadline: float) -> bool:
        work = self._pending[0][0]
        while not work.is_completed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True
