"""The case about how many workers are worth having."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from benchmarks.micro.loader_cases.datasets import Sleeping
from benchmarks.micro.loader_cases.figures import LOADERS, OWN, PEER, Figure, Size, Target, compare, take_turns

EPOCHS = 3
MANY = 4
AUTO = f"{OWN}, auto"
WORKERS: dict[str, tuple[str, Any]] = {
    PEER: (PEER, 0),
    f"{PEER}, {MANY} workers": (PEER, MANY),
    OWN: (OWN, 0),
    f"{OWN}, {MANY} workers": (OWN, MANY),
    AUTO: (OWN, "auto"),
}
"""Class of the loader and number of workers, by name."""


@dataclass(frozen=True)
class Job:
    """Some epochs of one loader.

    Attributes:
        epoch_s: Seconds an epoch; the start of the workers counts, and their end.
        choice_s: Seconds that it took to make the loader.
        workers: How many it has.
    """

    epoch_s: float
    choice_s: float
    workers: int


def auto(size: Size) -> Iterator[Figure]:
    """What `num_workers="auto"` picks, and what an epoch takes with it, with 0 and with 4 workers (Lightning#17410).

    Tiny: 2,048 samples of 32 numbers that lie in memory, 16 a batch; workers only cost. Slow: a sample is a sleep of
    5 ms, 8 a batch. An epoch is the mean of three, with the start of the workers; so is the choice, a figure by itself.
    """
    tiny = TensorDataset(torch.randn(16 * size.of(128, least=6), 32))
    slow_length = 8 * size.of(25, least=6)
    slow = Sleeping(slow_length, 1000, dict.fromkeys(range(slow_length), 0.005))
    yield from _compare("tiny", tiny, 16, size, Target("0 workers", lambda median, _: median == 0))
    yield from _compare("slow", slow, 8, size, Target("1 worker or more", lambda median, _: median >= 1))


def _compare(setting: str, dataset: Dataset[Any], batch_size: int, size: Size, target: Target) -> Iterator[Figure]:
    jobs = take_turns(list(WORKERS), size, f"auto, {setting}", partial(measure, dataset, batch_size))
    epochs_ms = {name: [1e3 * job.epoch_s for job in found] for name, found in jobs.items()}
    yield from compare("auto", setting, "ms an epoch", epochs_ms)
    picked = [float(job.workers) for job in jobs[AUTO]]
    yield Figure.judged("auto", setting, AUTO, "workers picked", picked, target)
    yield Figure("auto", setting, AUTO, "ms to pick", [1e3 * job.choice_s for job in jobs[AUTO]])


def measure(dataset: Dataset[Any], batch_size: int, name: str) -> Job:
    """Makes a loader and reads some epochs."""
    kind, workers = WORKERS[name]
    began = time.perf_counter()
    loader = LOADERS[kind](dataset, batch_size, num_workers=workers)
    made = time.perf_counter()
    workers = loader.num_workers
    for _ in range(EPOCHS):
        for _ in loader:
            pass
    del loader
    return Job((time.perf_counter() - made) / EPOCHS, made - began, workers)
