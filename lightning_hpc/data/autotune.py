"""How many workers a loader begins with: a short sweep, until more workers bring no more batches a second."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

MOST_WORKERS = 8

_WORTH_A_WORKER_S = 5e-4
"""What a batch must take to make: below, handing it from process to process costs as much."""

_WORTH_MORE = 0.1
"""Further batches a second, as a share, that the next number of workers has to bring."""

_BUDGET_S = 2.0
_START_S = 10.0  # for the first worker, which has to import all this where it is not forked
_FIRST_READS = (4, 40)  # at least, and at most
_READS, _FEWEST_READS = 8, 2  # for each worker; the latter if `_SLICE_S` is over: they deliver in bursts
_SLICE_S = (0.05, 0.5)  # at least, and at most
_TURN_S = 0.01


class Trial(Protocol):
    """Reads batches of a loader, one after the other, with as many workers as one likes."""

    @property
    def is_ready(self) -> bool:
        """Whether all workers have started."""

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers. It begins with one."""

    def read(self, timeout_s: float) -> bool | None:
        """Reads a batch; returns whether there was one in time, and None if there are no more."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep has found.

    Attributes:
        num_workers: How many are worth having.
        batches_s: Batches a second that so many workers have made, as far as was looked.
        reason: Why there are not more or fewer.
    """

    num_workers: int
    batches_s: dict[int, float]
    reason: str

    def __str__(self) -> str:
        curve = ", ".join(f"{workers}: {speed:.3g}" for workers, speed in self.batches_s.items())
        return f"{self.num_workers}, {self.reason}" + (f" (batches/s by workers: {curve})" if curve else "")


def sweep(trial: Trial, most: int, clock: Callable[[], float] = time.perf_counter) -> Sweep:
    """Reads with 1, 2, 4, … workers, and stops where the next number brings less than 10 % more batches a second.

    It takes about two seconds, and the start of a worker. What has taken too long to be measured until then is taken to
    grow with the number of workers: whoever uses them sees whether it does.

    Args:
        trial: Reads the batches.
        most: Number of workers that there may be.
        clock: Tells the time in seconds.
    """
    curve: dict[int, float] = {}
    latest = clock() + _START_S
    while not trial.is_ready and clock() < latest and trial.read(_TURN_S) is not None:
        pass
    end = clock() + _BUDGET_S
    took_s = _first_batches(trial, end, clock)
    if took_s is None:
        return Sweep(0, curve, "as there are too few batches to tell")
    if most == 1 and took_s >= _WORTH_A_WORKER_S:
        return Sweep(1, {1: 1 / took_s}, "the most there may be")
    if took_s < _WORTH_A_WORKER_S:
        return Sweep(0, {1: 1 / max(took_s, 1e-9)}, "as a batch is made faster than it is worth handing over")
    best = 0
    for workers in _numbers(most):
        speed = _speed(trial, workers, end, clock)
        if speed is None:
            return Sweep(most, curve, "the most there may be: batches are too slow to look for a limit")
        curve[workers] = speed
        if best and speed < curve[best] * (1 + _WORTH_MORE):
            return Sweep(best, curve, f"as {workers} bring {max(speed / curve[best] - 1, 0):.0%} more")
        best = workers
    return Sweep(most, curve, "the most there may be")


def spare_processors(ranks: int | None = None) -> int:
    """Processors for the workers of one rank, at least 1.

    Args:
        ranks: Ranks that share this machine; None is what torchrun says, or one.
    """
    if ranks is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(len(os.sched_getaffinity(0)) // ranks - 1, 1)


def _numbers(most: int) -> list[int]:
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _first_batches(trial: Trial, end: float, clock: Callable[[], float]) -> float | None:
    """Seconds that one worker takes for a batch; None if there are too few, all the time if that is too short for one.

    A quarter has taken less: on a machine that does other work too, most are longer on their way than they should be.
    """
    read = trial.read(end - clock())
    times = [clock()]
    enough = times[0] + _SLICE_S[0]
    while read and (len(times) < _FIRST_READS[0] or (times[-1] < enough and len(times) < _FIRST_READS[1])):
        read = trial.read(end - clock())
        if read:
            times.append(clock())
    if read is None and len(times) < _FIRST_READS[0]:
        return None
    took_s = sorted(after - before for before, after in pairwise(times))
    return took_s[len(took_s) // 4] if took_s else _BUDGET_S


def _speed(trial: Trial, workers: int, end: float, clock: Callable[[], float]) -> float | None:
    """Batches a second; None if there are too few to tell before the time is over."""
    trial.resize(workers)
    skipped = 0
    while not trial.is_ready or skipped < workers:  # those that fewer have made
        read = trial.read(min(end - clock(), _TURN_S))
        if read is None or clock() >= end:
            return None
        skipped += read
    begun = last = clock()
    least, longest = begun + _SLICE_S[0], min(begun + _SLICE_S[1], end)
    count = 0
    while (last < least or count < _READS * workers) and trial.read(longest - clock()):
        count, last = count + 1, clock()
    return count / (last - begun) if count >= _FEWEST_READS * workers else None
