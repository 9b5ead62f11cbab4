"""Reads batches from workers whose number follows from how long the training waits for them."""

import time
import warnings
from collections.abc import Callable
from pickle import PicklingError
from typing import Any

from lightning_hpc.data.batch_stream import BatchStream
from lightning_hpc.data.worker_tuner import Change, WorkerTuner


class TunedReader:
    """The batches of one epoch of a stream, and in between a worker more or fewer where the tuner wants it.

    Args:
        stream: Has the workers.
        next_batch: Gives the next batch of the epoch, from that stream.
        tuner: Decides.
        announce: Called with each change.
    """

    def __init__(
        self,
        stream: BatchStream,
        next_batch: Callable[[], Any],
        tuner: WorkerTuner,
        announce: Callable[[Change], None],
    ) -> None:
        self._stream, self._next_batch, self._tuner, self._announce = stream, next_batch, tuner, announce
        self._handed_out_s: float | None = None
        self._is_settled = False
        tuner.skip()

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: If the epoch is over.
        """
        asked_s = time.perf_counter()
        batch = self._next_batch()
        self._is_settled = self._is_settled or self._stream.is_settled
        if self._handed_out_s is not None and self._is_settled:
            change = self._tuner.observe(self._stream.waited_s, asked_s - self._handed_out_s)
            if change is not None:
                self._is_settled = False
                self._change(change)
        self._handed_out_s = time.perf_counter()
        return batch

    def _change(self, change: Change) -> None:
        try:
            self._stream.resize(change.num_workers)
        except (OSError, TypeError, AttributeError, PicklingError) as error:
            self._tuner.forbid_more()
            warnings.warn(f"no further worker can be started, so there will be no more: {error}", stacklevel=4)
        else:
            self._announce(change)
