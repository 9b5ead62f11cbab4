"""What `iter` of a `SharedMemoryLoader` gives, and what both know of the epoch."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

# What DataLoader does for `pin_memory`; it has no public name.
from torch.utils.data._utils.pin_memory import pin_memory as pin_batch
from typing_extensions import override

from lightning_hpc.data.position import Position, go_to, told_epoch


@dataclass
class Progress:
    """How far an epoch is.

    Attributes:
        start: Where it began.
        is_resumed: Whether that is a place where a former run was left.
        told: The epochs that sampler and dataset had been told then.
        asked: How often a batch was asked for since.
        handed_out: How many there were.
        is_over: Whether there are no more.
    """

    start: Position
    is_resumed: bool
    told: tuple[Any, Any]
    asked: int = 0
    handed_out: int = 0
    is_over: bool = False

    @property
    def total(self) -> int:
        """Batches of the epoch that are behind."""
        return self.start.total + self.handed_out


class EpochIterator(Iterator[Any]):
    """One epoch, or what is left of it.

    Args:
        loader: Whose it is.
        begin: Begins the epoch, with a seed for what is random in samples if one is given; returns its progress, and
            what gives the next batch.
        is_pinned: Whether batches are copied to page-locked memory.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        begin: Callable[[int | None], tuple[Progress, Callable[[], Any]]],
        is_pinned: bool,
    ) -> None:
        self._loader, self._begin, self._is_pinned = loader, begin, is_pinned
        self._progress, self._next_batch = begin(None)

    def __len__(self) -> int:
        return len(self._loader)

    @override
    def __next__(self) -> Any:
        if not self._progress.handed_out and told_epoch(self._loader) != self._progress.told:
            self._heed_epoch()
        self._progress.asked += 1
        try:
            batch = self._next_batch()
        except StopIteration:
            self._progress.is_over = True
            raise
        self._progress.handed_out += 1
        length: Any = self._loader._IterableDataset_len_called
        if length is not None and self._progress.handed_out > length:
            self._warn_of_length(length)
        return pin_batch(batch) if self._is_pinned else batch

    def _heed_epoch(self) -> None:
        """An epoch was announced after `iter`, as Lightning does when it resumes a run."""
        start = self._progress.start
        if not self._progress.is_resumed:
            self._progress, self._next_batch = self._begin(start.seed)
        elif start.order is not None:
            go_to(self._loader, start.order)  # what is left of another epoch comes first
        self._progress.told = told_epoch(self._loader)

    def _warn_of_length(self, length: int) -> None:
        warnings.warn(
            f"{type(self._loader.dataset).__name__} has a length of {length}, but gives more: batch"
            f" {self._progress.total}; with workers, each has to give its own part only"
            " (torch.utils.data.get_worker_info)",
            stacklevel=3,
        )
