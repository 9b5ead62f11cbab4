"""What `iter` of a `SharedMemoryLoader` gives, and what both know of the epoch."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

# What DataLoader does for `pin_memory`; it has no public name.
from torch.utils.data._utils.pin_memory import pin_memory as pin_batch
from typing_extensions import override

from lightning_hpc.data.device_prefetch import DevicePrefetcher
from lightning_hpc.data.placed_operators import PlacedOperators
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
        prefetcher: What takes batches to a device, if they do not stay in host memory. It lies below the progress: a
            batch on its way has not been handed out.
        transform: Called with each batch that stays in host memory.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        begin: Callable[[int | None], tuple[Progress, Callable[[], Any]]],
        prefetcher: DevicePrefetcher | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._loader, self._begin = loader, begin
        self._prefetcher, self._transform = prefetcher, transform
        self._is_pinned = self._should_pin()
        self._is_unfinished = prefetcher is None and (transform is not None or self._is_pinned)
        self._start(None)

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
        return self._finish(batch) if self._is_unfinished else batch

    def _finish(self, batch: Any) -> Any:
        """What is done to a batch that stays in host memory."""
        if self._transform is not None:
            batch = self._transform(batch)
        return pin_batch(batch) if self._is_pinned else batch

    def _start(self, seed: int | None) -> None:
        self._progress, next_batch = self._begin(seed)
        if self._prefetcher is not None:
            # Slots are page-locked; what does not lie in one is copied to memory that is.
            fetch = partial(_next_pinned, next_batch) if self._is_pinned else next_batch
            next_batch = self._prefetcher.begin(fetch)
        self._next_batch = next_batch
        if isinstance(self._transform, PlacedOperators):
            self._next_batch = self._transform.timed(next_batch)

    def _heed_epoch(self) -> None:
        """An epoch was announced after `iter`, as Lightning does when it resumes a run."""
        start = self._progress.start
        if not self._progress.is_resumed:
            self._start(start.seed)
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

    def _should_pin(self) -> bool:
        if not self._loader.pin_memory or torch.accelerator.is_available():
            return self._loader.pin_memory
        warnings.warn("pin_memory=True has no effect without an accelerator", stacklevel=4)
        return False


def _next_pinned(next_batch: Callable[[], Any]) -> Any:
    return pin_batch(next_batch())
