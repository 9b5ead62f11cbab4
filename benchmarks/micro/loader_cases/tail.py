"""The case about how evenly batches come."""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.micro.loader_cases.datasets import Sleeping, read
from benchmarks.micro.loader_cases.figures import LOADERS, Figure, Size, Target, compare, count_workers, take_turns

BATCH = 64
BATCH_BYTES = 37_848_000
WORKERS = 2
WARM_UP = 12  # batches; each slot has been used by then


@dataclass(frozen=True)
class Waits:
    """One epoch.

    Attributes:
        seconds: What each `next` took.
        interrupted: How many of them the kernel interrupted for another process, in per cent.
        faulted: How many of them touched a page for the first time, in per cent.
    """

    seconds: list[float]
    interrupted: float
    faulted: float

    def percentile_ms(self, percent: int) -> float:
        """In milliseconds."""
        return 1e3 * statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


def p99(size: Size) -> Iterator[Figure]:
    """The 99th percentile of what `next` takes, in medians: at most 3.

    Batches of 38 MB from memory, two workers, a consumer that reads every byte: three processes that would each keep a
    core busy. So the figures also say how many of the waits were interrupted by another process, and how many touched
    memory for the first time.
    """
    dataset = Sleeping(BATCH * (WARM_UP + size.of(300, least=3)), BATCH_BYTES // BATCH, {})
    found = take_turns(list(LOADERS), size, "p99", lambda name: waits(dataset, name))
    columns: dict[str, Callable[[Waits], float]] = {
        "p50 of next(), ms": lambda one: one.percentile_ms(50),
        "p99 of next(), ms": lambda one: one.percentile_ms(99),
        "% of next() interrupted": lambda one: one.interrupted,
        "% of next() with page faults": lambda one: one.faulted,
        "p99 / p50": lambda one: one.percentile_ms(99) / one.percentile_ms(50),
    }
    for measure, value in columns.items():
        target = Target("at most 3", lambda median, _: median <= 3) if measure == "p99 / p50" else None
        values = {name: [value(one) for one in rounds] for name, rounds in found.items()}
        yield from compare("p99", count_workers(WORKERS), measure, values, target)


def waits(dataset: Sleeping, loader: str) -> Waits:
    """Reads an epoch."""
    seconds, interrupted, faulted = [], 0, 0
    iterator = iter(LOADERS[loader](dataset, batch_size=BATCH, num_workers=WORKERS))
    for position in range(len(dataset) // BATCH):
        usage, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        batch = next(iterator)
        took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        if position >= WARM_UP:
            seconds.append(took)
            interrupted += after.ru_nivcsw > usage.ru_nivcsw
            faulted += after.ru_minflt > usage.ru_minflt
        read(batch)
    return Waits(seconds, 100 * interrupted / len(seconds), 100 * faulted / len(seconds))
