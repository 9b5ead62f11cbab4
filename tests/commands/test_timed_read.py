"""One trial: what it counts, what it leaves out, and that nothing of it is left."""

import multiprocessing
import random
import time
from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from typing_extensions import override

from lightning_hpc.commands.timed_read import ReadLimits, TooFewBatchesError, read_batch, timed_read
from lightning_hpc.data import SharedMemoryLoader

LONG = 60.0
LOADERS = [DataLoader, SharedMemoryLoader]
Pair = namedtuple("Pair", "a b")


class Busy(Dataset[Tensor]):
    """Each sample takes so many processor seconds."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length, self._seconds = length, seconds

    def __len__(self) -> int:
        return self._length

    @override
    def __getitem__(self, index: int) -> Tensor:
        until = time.process_time() + self._seconds
        while time.process_time() < until:
            pass
        return torch.zeros(4)


class Breaks(Dataset[Tensor]):
    """Raises at sample 9."""

    def __len__(self) -> int:
        return 100

    @override
    def __getitem__(self, index: int) -> Tensor:
        if index == 9:
            raise ValueError("no ninth")
        return torch.zeros(4)


class Numbers(IterableDataset[Tensor]):
    @override
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20.0))


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length, dtype=torch.float64))


@pytest.mark.parametrize(
    ("batch", "samples", "size"),
    [
        (torch.zeros(5, 3), 5, 60),
        ([torch.tensor(1.0), torch.zeros(2, 3, dtype=torch.bfloat16)], 2, 16),
        ({"a": np.zeros((4, 2), np.int16), "b": {"c": torch.zeros(4, dtype=torch.bool)}, "d": ["x"] * 4}, 4, 20),
        (Pair(torch.zeros(3, 5).T[1:], torch.zeros(0, 7)), 4, 48),
        (SimpleNamespace(x=torch.zeros(6, dtype=torch.complex64)), 6, 48),
        ((torch.zeros(3), np.array([None, "a", "b"])), 3, 12),
        (["a", "b"], 2, 0),
        (torch.zeros(3, 3).to_sparse(), 3, 0),
        (7, 1, 0),
    ],
)
def test_samples_and_bytes_of_any_batch(batch: Any, samples: int, size: int) -> None:
    assert read_batch(batch) == (samples, size)


def test_a_batch_may_hold_itself() -> None:
    batch: list[Any] = [torch.zeros(2)]
    batch.append(batch)
    assert read_batch(batch) == (2, 8)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_so_many_batches_are_timed_and_workers_are_ended(kind: Any, workers: int) -> None:
    before = multiprocessing.active_children()
    read = timed_read(lambda: kind(numbers(400), batch_size=4, num_workers=workers), ReadLimits(LONG, 10))
    assert (read.batches, read.samples, read.bytes) == (10, 40, 320)
    assert 0 < read.wait_seconds < read.seconds
    assert read.start_seconds > 0
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize("kind", LOADERS)
def test_epochs_follow_each_other_their_first_batches_are_not_timed_and_the_last_may_be_small(kind: Any) -> None:
    # 5 batches of 4, 4, 4, 4, 2 samples, of which two are not timed.
    read = timed_read(lambda: kind(numbers(18), batch_size=4), ReadLimits(LONG, 7))
    assert (read.batches, read.samples) == (7, 10 + 10 + 4)


def test_samples_are_those_that_the_loader_says_whatever_collate_makes_of_them() -> None:
    twice = DataLoader(numbers(40), batch_size=4, collate_fn=lambda samples: torch.zeros(2 * len(samples), 3))
    assert timed_read(lambda: twice, ReadLimits(LONG, 5)).samples == 20
    batches = [[0, 1, 2], [3], [4, 5], [6, 7]]
    read = timed_read(lambda: DataLoader(numbers(8), batch_sampler=batches), ReadLimits(LONG, 2))
    assert read.samples == 4


def test_samplers_are_told_the_epoch() -> None:
    class Sampler(RandomSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = Sampler(numbers(12))
    timed_read(lambda: DataLoader(numbers(12), batch_size=4, sampler=sampler), ReadLimits(LONG, 3))
    assert set(sampler.epochs) == {0, 1, 2}


def test_when_time_is_up_one_batch_is_timed_at_least() -> None:
    assert timed_read(lambda: DataLoader(numbers(40), batch_size=4), ReadLimits(1e-9)).batches == 1


def test_a_step_takes_its_time_and_waiting_is_beside_it() -> None:
    read = timed_read(lambda: DataLoader(numbers(40), batch_size=4), ReadLimits(LONG, 5, step_seconds=0.01))
    assert read.seconds - read.wait_seconds >= 5 * 0.01


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_processor_seconds_are_those_of_all_processes(kind: Any, workers: int) -> None:
    read = timed_read(lambda: kind(Busy(200, 0.01), batch_size=2, num_workers=workers), ReadLimits(LONG, 10))
    assert read.cpu_seconds > 0.5 * 20 * 0.01  # what was made before the clock was started is not in it


@pytest.mark.parametrize("kind", LOADERS)
def test_all_trials_see_the_same_samples_and_nobody_notices(kind: Any) -> None:
    seen: list[list[float]] = []

    def collate(samples: list[Any]) -> Tensor:
        seen[-1] += [float(value) for (value,) in samples]
        return torch.zeros(len(samples))

    generator = torch.Generator().manual_seed(3)
    own = generator.get_state(), torch.get_rng_state(), random.getstate()
    for given in (None, None, generator, generator):
        seen.append([])
        timed_read(
            lambda given=given: kind(numbers(40), batch_size=4, shuffle=True, generator=given, collate_fn=collate),  # type: ignore[misc]
            ReadLimits(LONG, 5),
        )
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert torch.equal(generator.get_state(), own[0])
    assert torch.equal(torch.get_rng_state(), own[1])
    assert random.getstate() == own[2]


@pytest.mark.parametrize("kind", LOADERS)
def test_an_error_of_a_worker_is_raised_and_the_others_are_ended(kind: Any) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(ValueError, match="no ninth"):
        timed_read(lambda: kind(Breaks(), batch_size=1, num_workers=2), ReadLimits(LONG, 50))
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize("kind", LOADERS)
def test_an_iterable_dataset_is_read(kind: Any) -> None:
    read = timed_read(lambda: kind(Numbers(), batch_size=2, num_workers=1), ReadLimits(LONG, 8))
    assert (read.batches, read.samples) == (8, 16)


def test_epochs_without_a_batch_to_time_are_an_error_that_says_why() -> None:
    with pytest.raises(TooFewBatchesError, match=r"an epoch has 3 batches, and the first 4 are not timed .*smaller"):
        timed_read(lambda: DataLoader(numbers(3), num_workers=1), ReadLimits(LONG))
    with pytest.raises(TooFewBatchesError, match="the loader gave no batch; it must give its batches anew"):
        timed_read(lambda: DataLoader(Numbers(), sampler=None, batch_size=100, drop_last=True), ReadLimits(LONG))
