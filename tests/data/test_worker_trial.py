"""A trial reads batches like the loader's own, and nobody notices that it was there."""

import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_hpc.data.batching import TokenBudgetBatchSampler
from lightning_hpc.data.fetching import BatchSource
from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler
from lightning_hpc.data.worker_trial import WorkerTrial, endless_indices
from tests.data.datasets import Augmented, Numbers, Parts
from tests.data.test_batch_stream import descriptors, memory_maps

_LONG_S = 60


def trial_of(loader: DataLoader[Any]) -> WorkerTrial:
    return WorkerTrial(loader, BatchSource(loader.dataset, loader.collate_fn, loader.batch_size is not None, False))


def children() -> set[str]:
    return set(Path("/proc/thread-self/children").read_text().split())


def read(trial: WorkerTrial, count: int) -> list[bool | None]:
    return [trial.read(_LONG_S) for _ in range(count)]


class Counts(Numbers):
    """Knows how often it was read."""

    read = 0

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.rand(index % 3 + 1)


def test_it_leaves_no_process_no_descriptor_no_map_and_no_trace_in_generators_and_dataset() -> None:
    dataset, own = Counts(50), torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * 50, 50, generator=own)
    loader = DataLoader(dataset, 1, sampler=sampler, generator=own, num_workers=1)
    gc.collect()
    before = children(), descriptors(), memory_maps()
    drawn = [torch.get_rng_state(), own.get_state(), random.getstate(), str(np.random.get_state())]
    with trial_of(loader) as trial:
        for workers in (1, 3, 2):
            trial.resize(workers)
            assert read(trial, 60) == [True] * 60
        assert children() - before[0]
    del trial
    assert (children(), descriptors(), memory_maps()) == before
    assert dataset.read == 0
    after = [torch.get_rng_state(), own.get_state(), random.getstate(), str(np.random.get_state())]
    assert all(str(one) == str(other) for one, other in zip(drawn, after, strict=True))
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


def test_it_is_ready_when_its_workers_are() -> None:
    with trial_of(DataLoader(Augmented(9), num_workers=1)) as trial:
        for workers in (1, 3):
            trial.resize(workers)
            deadline = time.monotonic() + _LONG_S
            while not trial.is_ready:
                assert trial.read(0.01) is not None
                assert time.monotonic() < deadline


class Slow(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(10**6)
        raise AssertionError


def test_a_sample_that_takes_for_ever_is_not_waited_for() -> None:
    before = children()
    begun = time.monotonic()
    with trial_of(DataLoader(Slow(9), num_workers=1)) as trial:
        assert trial.read(0.01) is False
    assert children() == before
    assert time.monotonic() - begun < _LONG_S


class Raising(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        raise ArithmeticError("planted")


class Dying(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        os._exit(3)


@pytest.mark.filterwarnings("ignore:worker .* was replaced")
@pytest.mark.parametrize("dataset", [Raising(9), Dying(9), Numbers(0), Parts(0)])
def test_what_cannot_be_read_is_the_end(dataset: Any) -> None:
    sampler = None if isinstance(dataset, Parts) else [0] * len(dataset)
    with trial_of(DataLoader(dataset, num_workers=1, sampler=sampler)) as trial:
        assert read(trial, 1) == [None]


def test_an_iterable_dataset_is_read_to_its_end_by_one_worker() -> None:
    with trial_of(DataLoader(Parts(9), 2, num_workers=1)) as trial:
        trial.resize(4)
        assert read(trial, 7) == [True] * 5 + [None] * 2
    with trial_of(DataLoader(Parts(3), None, num_workers=1)) as trial:
        assert read(trial, 4) == [True] * 3 + [None]


def first(loader: DataLoader[Any], count: int) -> list[Any]:
    return list(itertools.islice(endless_indices(loader), count))


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 10, 97, 100])
def test_indices_of_the_usual_samplers_are_spread_and_come_once_a_round(numel: int) -> None:
    dataset = Numbers(numel)
    loaders = [
        DataLoader(dataset, None, shuffle=True),
        DataLoader(dataset, None, sampler=DistributedSampler(dataset, 2, 0)),
        DataLoader(dataset, None, sampler=ElasticSampler(dataset, 2, 1)),
        DataLoader(dataset, None),
    ]
    for loader in loaders:
        indices = first(loader, 2 * numel)
        assert sorted(indices[:numel]) == sorted(indices[numel:]) == list(range(numel))
    assert first(loaders[-1], numel) == list(range(numel))
    if numel >= 97:
        assert max(first(loaders[0], 3)) - min(first(loaders[0], 3)) > numel / 3


def test_batches_have_the_size_of_the_loaders() -> None:
    dataset = Numbers(10)
    even = EvenBatchSampler(ElasticSampler(dataset, 2, 0, repeats=False), 4)
    assert [len(batch) for batch in first(DataLoader(dataset, 4, shuffle=True), 5)] == [4] * 5
    assert [len(batch) for batch in first(DataLoader(dataset, batch_sampler=even), 5)] == [4] * 5
    assert [len(batch) for batch in first(DataLoader(dataset, 99, drop_last=True), 2)] == [10] * 2
    assert first(DataLoader(Numbers(0), 4, sampler=ElasticSampler(Numbers(0), 1, 0)), 2) == []
    assert first(DataLoader(Parts(9), 3), 2) == [[None] * 3] * 2
    assert first(DataLoader(Parts(9), None), 2) == [None] * 2


class Names(Sampler[str]):
    """Changes itself whenever it is read."""

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[str]:
        self.rounds += 1
        return iter([f"{self.rounds} {name}" for name in "ab"])

    def __len__(self) -> int:
        return 2


def test_other_samplers_are_asked_in_a_copy() -> None:
    names: Any = Names()
    assert first(DataLoader(Numbers(9), None, sampler=names), 3) == ["1 a", "1 b", "2 a"]
    assert first(DataLoader(Numbers(9), batch_sampler=BatchSampler(names, 2, False)), 2) == [
        ["1 a", "1 b"],
        ["2 a", "2 b"],
    ]
    assert names.rounds == 0
    subset: Any = SubsetRandomSampler([7, 8])
    assert sorted(first(DataLoader(Numbers(9), None, sampler=subset), 2)) == [7, 8]
    assert sorted(first(DataLoader(Numbers(9), None, sampler=RandomSampler(range(3))), 3)) == [0, 1, 2]
    batches = [[1, 2], [3]]
    assert first(DataLoader(Numbers(9), batch_sampler=batches), 3) == [[1, 2], [3], [1, 2]]
    tokens = TokenBudgetBatchSampler([3, 4, 5, 6], max_tokens=12)
    expected = list(TokenBudgetBatchSampler([3, 4, 5, 6], max_tokens=12))
    state = tokens.state_dict()
    assert first(DataLoader(Numbers(4), batch_sampler=tokens), len(expected)) == expected
    assert tokens.state_dict() == state


@pytest.mark.parametrize(
    "make",
    [
        lambda: (index for index in range(4)),
        lambda: map(int, range(4)),
        lambda: filter(bool, range(4)),
        lambda: itertools.chain(range(2), range(2, 4)),
    ],
)
def test_a_sampler_that_can_be_read_once_only_is_left_alone(make: Callable[[], Iterator[int]]) -> None:
    once, expected = make(), list(make())
    assert first(DataLoader(Numbers(4), None, sampler=once), 3) == []
    assert list(once) == expected


class Unready(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("call set_epoch first")


def test_a_sampler_that_is_not_ready_yet_leaves_nothing_behind() -> None:
    before = children()
    with trial_of(DataLoader(Numbers(4), 2, sampler=Unready())) as trial:
        assert read(trial, 1) == [None]
    assert children() == before
