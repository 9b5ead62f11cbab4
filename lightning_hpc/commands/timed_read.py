"""One loader, read for some seconds by a consumer that touches every byte, with what it took."""

import itertools
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hpc.data import SharedMemoryLoader
from lightning_hpc.data.seeding import KeptGenerators

_FIRST = 2  # batches that are not timed, beside those that the workers make before anybody asks


@dataclass(frozen=True)
class ReadLimits:
    """When a trial is over, and how its consumer behaves.

    Attributes:
        seconds: It ends so long after its first batch, but not before one was timed.
        batches: It ends after so many timed batches; None is any number.
        step_seconds: How long the consumer has each batch, as a training step would; 0 asks for the next one at once.
    """

    seconds: float
    batches: int | None = None
    step_seconds: float = 0.0


@dataclass(frozen=True)
class TimedRead:
    """What one trial saw.

    Attributes:
        samples: In the timed batches.
        bytes: In the timed batches' tensors and arrays.
        batches: Number of timed batches.
        seconds: What the timed batches took, reading included.
        wait_seconds: What of it was spent waiting for the next batch.
        start_seconds: From asking for the first batch until it came.
        cpu_seconds: Processor time of this process and the workers for the timed batches.
    """

    samples: int
    bytes: int
    batches: int
    seconds: float
    wait_seconds: float
    start_seconds: float
    cpu_seconds: float


class TooFewBatchesError(ValueError):
    """A loader gives no batch that could be timed."""


def timed_read(make: Callable[[], DataLoader[Any]], limits: ReadLimits) -> TimedRead:
    """Reads a loader, as many epochs as it takes, and ends its workers.

    The first batches of each epoch are not timed: those that workers have made before the consumer asks for one, and
    two more. So neither the start of workers counts nor memory that is touched for the first time. All trials see the
    same state of the random number generators, and so the same samples.

    Args:
        make: Makes the loader. Nobody else may hold it, or its workers would live on.
        limits: When to end.

    Raises:
        TooFewBatchesError: If the epochs are so short that no batch can be timed.
    """
    with KeptGenerators(), warnings.catch_warnings():
        # Of more workers than processors, which is what was asked for.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return _read(make(), limits)


def read_batch(batch: Any) -> tuple[int, int]:
    """Touches every byte of a batch's tensors and arrays once.

    Returns:
        The size of the first dimension that is found, or the batch's length where there is none; and the number of
        bytes.
    """
    samples, total = None, 0
    for value in _arrays(batch, set()):
        if samples is None and len(value.shape):
            samples = int(value.shape[0])
        content = _bytes(value)
        total += content.size
        whole = content.size // 8 * 8
        content[:whole].view(np.uint64).sum()
        content[whole:].sum()
    if samples is None:
        samples = len(batch) if isinstance(batch, (list, tuple)) else 1
    return samples, total


def _read(loader: DataLoader[Any], limits: ReadLimits) -> TimedRead:
    generator = loader.generator
    state = None if generator is None else generator.get_state()
    trial = _Trial(loader, limits)
    try:
        return trial.run()
    finally:
        trial.close()
        if generator is not None and state is not None:
            generator.set_state(state)


class _Trial:
    """Reads epochs of a loader until there is enough."""

    def __init__(self, loader: DataLoader[Any], limits: ReadLimits) -> None:
        self._loader, self._limits = loader, limits
        self._warm_up = loader.num_workers * (loader.prefetch_factor or 0) + _FIRST
        self._epoch_samples = _epoch_samples(loader)
        self._start_seconds = self._seconds = self._wait_seconds = self._cpu_seconds = 0.0
        self._samples = self._bytes = self._batches = 0
        self._deadline = math.inf
        self._iterator: Any = None

    def run(self) -> TimedRead:
        for epoch in itertools.count():
            read = self._read_epoch(epoch)
            if not self._batches:
                self._raise_too_short(read)
            if self._is_over():
                break
        return TimedRead(
            samples=self._samples,
            bytes=self._bytes,
            batches=self._batches,
            seconds=self._seconds,
            wait_seconds=self._wait_seconds,
            start_seconds=self._start_seconds,
            cpu_seconds=self._cpu_seconds,
        )

    def close(self) -> None:
        """Ends the workers."""
        if isinstance(self._loader, SharedMemoryLoader):
            self._loader.close()
        # An error's traceback holds the iterator in a cycle. When the garbage collector ends that, the queues go before
        # their workers are told to end, and torch 2.13 waits for each worker for 5 s.
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _read_epoch(self, epoch: int) -> int:
        """Returns how many batches it has read."""
        _tell_epoch(self._loader, epoch)
        clock: _ProcessorClock | None = None
        number, warm_until = -1, math.inf
        asked = time.perf_counter()
        self._iterator = iter(self._loader)
        for number, batch in enumerate(self._iterator):
            got = time.perf_counter()
            if number == 0:
                warm_until = self._begin(got, got - asked)
            samples, size = self._use(number, batch, got)
            now = time.perf_counter()
            if clock is not None:
                self._count(samples, size, waited=got - asked, took=now - asked)
                self._cpu_seconds += clock.lap()
            elif number + 1 >= self._warm_up or now >= warm_until:
                clock = _ProcessorClock()
                now = time.perf_counter()
            if self._is_over():
                break
            asked = now
        return number + 1

    def _begin(self, now: float, start_seconds: float) -> float:
        """Returns when the warm-up of this epoch is over at the latest."""
        if self._deadline == math.inf:
            self._start_seconds = start_seconds
            self._deadline = now + self._limits.seconds
        return now + self._limits.seconds / 2

    def _use(self, number: int, batch: Any, got: float) -> tuple[int, int]:
        samples, size = read_batch(batch)
        batch_size = self._loader.batch_size
        if batch_size is not None:
            samples = int(min(batch_size, self._epoch_samples - number * batch_size))
        left = got + self._limits.step_seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return max(samples, 1), size

    def _count(self, samples: int, size: int, waited: float, took: float) -> None:
        self._samples += samples
        self._bytes += size
        self._batches += 1
        self._wait_seconds += waited
        self._seconds += took

    def _is_over(self) -> bool:
        if not self._batches:
            return False
        return self._batches >= (self._limits.batches or math.inf) or time.perf_counter() >= self._deadline

    def _raise_too_short(self, read: int) -> None:
        if not read:
            raise TooFewBatchesError(
                "the loader gave no batch; it must give its batches anew each time that it is iterated over"
            )
        raise TooFewBatchesError(
            f"an epoch has {read} batches, and the first {self._warm_up} are not timed with"
            f" num_workers={self._loader.num_workers}: give more data or smaller batches, or fewer --workers"
        )


class _ProcessorClock:
    """Processor seconds of this process and of its children that are alive now."""

    def __init__(self) -> None:
        # What clock_getcpuclockid(3) gives for a process, for which Python has no function.
        self._clocks = [~pid << 3 | 2 for child in multiprocessing.active_children() if (pid := child.pid)]
        self._children = [0.0] * len(self._clocks)
        self._last = 0.0
        self.lap()

    def lap(self) -> float:
        """Seconds since it was asked before."""
        self._children = [max(before, _clock_seconds(clock)) for clock, before in self._each()]
        now = time.process_time() + sum(self._children)
        passed, self._last = now - self._last, now
        return passed

    def _each(self) -> Iterator[tuple[int, float]]:
        return zip(self._clocks, self._children, strict=True)


def _clock_seconds(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:  # it has ended: no more than before
        return 0.0


def _epoch_samples(loader: DataLoader[Any]) -> float:
    """Samples in an epoch; infinite where nobody knows."""
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return math.inf


def _tell_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tells samplers the epoch, as Lightning does."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


def _arrays(value: Any, seen: set[int]) -> Iterator[Tensor | NDArray[Any]]:
    """The tensors and arrays of any nesting, those in attributes of a user's classes included."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _arrays(part, seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _bytes(value: Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    """Its content; empty where that is no plain memory of the host."""
    if isinstance(value, np.ndarray):
        is_plain = not value.dtype.hasobject
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8) if is_plain else np.empty(0, np.uint8)
    if value.layout is not torch.strided or value.is_nested or value.device.type != "cpu":
        return np.empty(0, np.uint8)
    content: NDArray[np.uint8] = value.detach().reshape(-1).view(torch.uint8).numpy()
    return content
