"""Measures exposed communication: backward has finished, but not all gradients are reduced yet."""

import threading
import time
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_hpc.comm.stats import CommStats


class ExposedClock(Protocol):
    """Follows the buckets of each backward pass."""

    def follow(self, future: Future[Tensor], is_last: bool) -> Future[Tensor]:
        """Notes the end of one bucket's reduction, and with ``is_last`` that the backward computation ends here.

        Returns:
            A future of the same value that completes after the note was taken.
        """


class HostExposedClock(ExposedClock):
    """For CPU tensors, where a bucket is computed when its hook is called and reduced when its future completes.

    Attributes:
        reduced_at: When the last bucket of the last backward pass was reduced, as `time.perf_counter` says.
    """

    def __init__(self, stats: CommStats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._pending = 0
        self._computed_at: float | None = None
        self.reduced_at = 0.0

    @override
    def follow(self, future: Future[Tensor], is_last: bool) -> Future[Tensor]:
        with self._lock:
            self._pending += 1
            if is_last:
                self._computed_at = time.perf_counter()
        return future.then(self._reduced)

    def _reduced(self, future: Future[Tensor]) -> Tensor:
        with self._lock:
            self._pending -= 1
            if self._pending == 0 and self._computed_at is not None:
                self.reduced_at = time.perf_counter()
                self._stats.exposed_seconds += self.reduced_at - self._computed_at
                self._stats.reductions += 1
                self._computed_at = None
        return future.value()


class CudaExposedClock(ExposedClock):
    """For CUDA tensors: events on the streams, read in a later step when they have passed. Nothing synchronises."""

    def __init__(self, stats: CommStats, device: torch.device) -> None:
        self._stats = stats
        self._device = device
        self._reduced: list[torch.cuda.Event] = []
        self._unread: list[tuple[torch.cuda.Event, list[torch.cuda.Event]]] = []

    @override
    def follow(self, future: Future[Tensor], is_last: bool) -> Future[Tensor]:
        # The callback runs at once, on a stream that waits for the reduction.
        followed = future.then(self._note_reduced)
        if is_last:
            self._unread.append((self._record(), self._reduced))
            self._reduced = []
            self._stats.reductions += 1
            self._read()
        return followed

    def _note_reduced(self, future: Future[Tensor]) -> Tensor:
        self._reduced.append(self._record())
        return future.value()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        while self._unread:
            computed, reduced = self._unread[0]
            if not (computed.query() and all(event.query() for event in reduced)):
                return
            milliseconds = max((computed.elapsed_time(event) for event in reduced), default=0.0)
            self._stats.exposed_seconds += max(milliseconds, 0.0) / 1e3
            del self._unread[0]
