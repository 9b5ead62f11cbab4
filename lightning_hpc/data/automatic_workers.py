"""What ``num_workers="auto"`` stands for: a number that is looked for at first, and changed while it is used."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from lightning_hpc.data.autotune import MOST_WORKERS, spare_processors, sweep
from lightning_hpc.data.batch_stream import BatchStream
from lightning_hpc.data.fetching import BatchSource
from lightning_hpc.data.tuned_reader import TunedReader
from lightning_hpc.data.worker_trial import WorkerTrial
from lightning_hpc.data.worker_tuner import Change, WorkerTuner


class AutomaticWorkers:
    """The number of workers of one loader.

    It stays what it is if it is 0 at first, and for an iterable dataset, whose workers have a part of it each.

    Args:
        loader: Made with one worker.
        source: Where its batches come from.
        ranks: Ranks that share this machine; None if nobody has said.

    Attributes:
        most: How many there may be.
    """

    def __init__(self, loader: DataLoader[Any], source: BatchSource, ranks: int | None = None) -> None:
        self._name = f"SharedMemoryLoader of a {type(source.dataset).__name__}"
        assert loader.prefetch_factor is not None
        self._prefetch_factor = loader.prefetch_factor
        self.most = min(spare_processors(ranks), MOST_WORKERS)
        # Nothing tells whether an iterable dataset gives each worker another part.
        self._is_fixed = isinstance(source.dataset, (IterableDataset, MapDataPipe))
        with WorkerTrial(loader, source) as trial:
            found = sweep(trial, 1 if self._is_fixed else self.most)
        rank_zero_info(f"{self._name}: num_workers={found}")
        self._start(found.num_workers)

    @property
    def num_workers(self) -> int:
        """How many there are now."""
        return self._tuner.num_workers if self._tuner is not None else self._num_workers

    def share(self, ranks: int) -> None:
        """Leaves their part of the processors to other ranks on this machine."""
        self.most = min(spare_processors(ranks), MOST_WORKERS)
        self._start(min(self.num_workers, self.most))

    def reader(self, stream: BatchStream, next_batch: Callable[[], Any]) -> Callable[[], Any]:
        """Gives what `next_batch` gives from a stream, and changes the number of its workers where that helps."""
        if self._tuner is None:
            return next_batch
        stream.resize(self.num_workers)
        return TunedReader(stream, next_batch, self._tuner, self._announce).next

    def _start(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._tuner: WorkerTuner | None = None
        if num_workers and self.most > 1 and not self._is_fixed:
            self._tuner = WorkerTuner(num_workers, self.most, self._prefetch_factor)

    def _announce(self, change: Change) -> None:
        rank_zero_info(f"{self._name}: num_workers={change.num_workers} from now on, as {change.reason}")


def require_workers(num_workers: Any, prefetch_factor: Any) -> None:
    """Checks what a loader is told of its workers, where `DataLoader` lets something else pass.

    Raises:
        TypeError: If their number is neither an integer nor ``"auto"``.
        ValueError: If they are to make no batch ahead.
    """
    if num_workers != "auto" and (not isinstance(num_workers, int) or isinstance(num_workers, bool)):
        raise TypeError(f"num_workers={num_workers!r} must be an integer of at least 0, or 'auto'")
    if prefetch_factor is not None and prefetch_factor < 1:
        raise ValueError(f"prefetch_factor={prefetch_factor!r} must be at least 1: batches that a worker makes ahead")
