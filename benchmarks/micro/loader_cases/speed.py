"""Cases about how fast batches come: a consumer that is hardly slower, slow samples, images that are decoded."""

import itertools
import time
from collections.abc import Iterator
from functools import partial

from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.micro.loader_cases.datasets import Sleeping, read, with_slow_ones
from benchmarks.micro.loader_cases.figures import LOADERS, Figure, Size, Target, compare, count_workers, take_turns

BATCH = 32
IMAGE_BYTES = 3 * 224 * 224
BATCH_S = 0.04
STEP_S = 1.05 * BATCH_S
AHEAD = 2  # batches a worker, the default of both
WARM_UP = 10  # batches; the first ones wait for the workers to start, and use memory for the first time


def wait(size: Size) -> Iterator[Figure]:
    """Share of the time that is spent in `next`, at most 2 % where the dataset is 5 % faster than the step.

    A batch of 32 images of 224 x 224 (4.8 MB) takes 40 ms of sleep, in one worker, or 80 ms in each of two; a step is
    a sleep of 42 ms. What the loader itself takes comes on top.
    """
    target = Target("at most 2 %", lambda median, _: median <= 2)
    batches = WARM_UP + size.of(100)
    for workers in (1, 2):
        dataset = Sleeping(BATCH * batches, IMAGE_BYTES, {BATCH * batch: workers * BATCH_S for batch in range(batches)})
        shares = take_turns(
            list(LOADERS), size, f"wait, {count_workers(workers)}", partial(share_in_next, dataset, workers)
        )
        yield from compare("wait", count_workers(workers), "% of the time in next()", shares, target)


def share_in_next(dataset: Sleeping, workers: int, loader: str) -> float:
    """Per cent of the time after the warm-up."""
    waited, began = 0.0, 0.0
    iterator = iter(LOADERS[loader](dataset, batch_size=BATCH, num_workers=workers))
    for position in range(len(dataset) // BATCH):
        before = time.perf_counter()
        if position == WARM_UP:
            began, waited = before, 0.0
        batch = next(iterator)
        waited += time.perf_counter() - before
        time.sleep(STEP_S)
        del batch
    return 100 * waited / (time.perf_counter() - began)


def slow_samples(size: Size) -> Iterator[Figure]:
    """Batches a second, in order, where one sample of a hundred takes 50 times as long: more than `DataLoader`.

    A sample is a sleep of 2 ms, or 100 ms; a batch has 16, so that one of seven has a slow one.
    """
    target = Target("more than DataLoader", lambda _, ratio: ratio > 1)
    length = 16 * size.of(200, least=12)
    dataset = Sleeping(length, 1000, with_slow_ones(length, 0.002, 0.1, share=0.01))
    for workers in (2, 4):
        found = take_turns(
            list(LOADERS), size, f"slow-samples, {count_workers(workers)}", partial(rate, dataset, 16, workers)
        )
        yield from compare("slow-samples", count_workers(workers), "batches/s", found, target)


def rate(dataset: Dataset[Tensor], batch_size: int, workers: int, loader: str) -> float:
    """Batches a second, for a consumer that reads them, while all workers have work.

    That is between the first batch and those that are made ahead at the end of the epoch: then workers of `DataLoader`
    stop, and leave the processors to the others, where ours begin the next epoch.
    """
    batches = LOADERS[loader](dataset, batch_size=batch_size, num_workers=workers)
    counted = len(batches) - 1 - AHEAD * workers
    iterator = iter(batches)
    read(next(iterator))
    began = time.perf_counter()
    for batch in itertools.islice(iterator, counted):
        read(batch)
    return counted / (time.perf_counter() - began)
