"""What an exchange is: how a slice crosses the outermost level."""

from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats


class Exchange(ABC):
    """Sums what the ranks of the outermost level bring to it, in place.

    It has three steps, each a stage of its own, so that they overlap: the ranks agree whether the slice can be packed,
    then there are one or two hops.

    Args:
        level: The outermost level; None on ranks that do not take part there.
        stats: Where bytes and fallbacks are counted.
    """

    name: str

    def __init__(self, level: Level | None, stats: CommStats) -> None:
        self._stats = stats
        if level is not None:
            self._level = level

    def agree(self, item: Slice) -> Tensor | None:
        """This rank's word on the slice, as an int64 scalar; None if there is nothing to agree on."""
        return None

    def agreed(self, item: Slice, words: Tensor) -> None:  # noqa: B027 (nothing to agree on, nothing to do)
        """Takes the words of all ranks, int64 ``[ranks]``."""

    @abstractmethod
    def start_scatter(self, item: Slice) -> dist.Work | None:
        """The first hop."""

    @abstractmethod
    def finish_scatter(self, item: Slice) -> None:
        """Called when it is done."""

    @abstractmethod
    def start_gather(self, item: Slice) -> dist.Work | None:
        """The second hop."""

    @abstractmethod
    def finish_gather(self, item: Slice) -> None:
        """Leaves the sum in the slice."""

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors that the next step depends on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores what `state_dict` gave."""
