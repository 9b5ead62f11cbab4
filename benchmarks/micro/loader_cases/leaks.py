"""The case about what grows from batch to batch."""

import gc
import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from benchmarks.micro.loader_cases.datasets import read
from benchmarks.micro.loader_cases.figures import LOADERS, Figure, Size, Target, count_workers, show_progress

EPOCHS = 8
WARM_UP = 2
BATCH = 8
WORKERS = 2
NOISE_KIB = 512
"""The allocator's; 70 bytes a batch would be more."""


class Rows(Dataset[Tensor]):
    """Rows of up to 6,000 bytes.

    Args:
        length: Number of samples.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((random.Random(index).randrange(1, 6000),), index % 251, dtype=torch.uint8)


@dataclass(frozen=True)
class Usage:
    """What the trainer's process (first) and its workers (together) have.

    Attributes:
        trainer_fds: Open file descriptors.
        worker_fds: Of all workers.
        trainer_maps: Mapped pieces of memory.
        worker_maps: Of all workers.
        trainer_pss_kib: Proportional set size, in which n processes that share a page have an n-th each; without files.
        worker_pss_kib: Of all workers.
    """

    trainer_fds: float
    worker_fds: float
    trainer_maps: float
    worker_maps: float
    trainer_pss_kib: float
    worker_pss_kib: float


def leaks(size: Size) -> Iterator[Figure]:
    """Growth of descriptors, maps and proportional set size over 10,000 batches: none.

    Eight epochs of 1,250 shuffled batches, padded to their longest row, two workers that are kept. Growth is the median
    of the last three epochs less that of the three before; the first two are the warm-up.
    """
    dataset = Rows(BATCH * size.of(1250, least=2))
    for loader in LOADERS:
        usages = watch(dataset, loader)
        for field in fields(Usage):
            yield _judge(loader, field.name, [getattr(usage, field.name) for usage in usages])


def watch(dataset: Rows, name: str) -> list[Usage]:
    """What there is after each epoch but the first two."""
    others = set(multiprocessing.active_children())
    kwargs = {"shuffle": True, "num_workers": WORKERS, "persistent_workers": True, "collate_fn": pad}
    loader, found = LOADERS[name](dataset, BATCH, **kwargs), []
    for epoch in range(EPOCHS):
        show_progress(f"leaks, epoch {epoch + 1} of {EPOCHS}: {name}")
        for batch in loader:
            read(batch)
        if epoch < WARM_UP:
            continue
        gc.collect()
        workers = [process.pid or 0 for process in set(multiprocessing.active_children()) - others]
        found.append(Usage(*_count(descriptors, workers), *_count(maps, workers), *_count(pss_kib, workers)))
    return found


def pad(rows: list[Tensor]) -> Tensor:
    """One tensor of rows of different lengths."""
    return pad_sequence(rows, batch_first=True)


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def maps(pid: int) -> int:
    """Mapped pieces of memory of a process."""
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def pss_kib(pid: int) -> int:
    """Proportional set size of a process, without files: any other process may begin or end to share those."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(rollup.split(f"\n{kind}:")[1].split()[0]) for kind in ("Pss_Anon", "Pss_Shmem"))


def _count(count: Callable[[int], int], workers: list[int]) -> tuple[int, int]:
    return count(os.getpid()), sum(count(pid) for pid in workers)


def _judge(loader: str, measure: str, values: list[float]) -> Figure:
    growth = statistics.median(values[-3:]) - statistics.median(values[:3])
    allowed = NOISE_KIB if measure.endswith("kib") else 0
    target = Target(f"no growth: {growth:+,.0f}, noise {allowed}", lambda *_: growth <= allowed)
    return Figure.judged("leaks", count_workers(WORKERS), loader, measure, values, target)
