"""`SharedMemoryLoader` gives what `DataLoader` gives, in the same order, and draws the same from the generators."""

import gc
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.seeding import KeptGenerators
from tests import helpers
from tests.data.datasets import (
    Augmented,
    AugmentedTogether,
    FetchedTogether,
    Nested,
    Numbers,
    Parts,
    Sized,
    as_list,
    assert_same,
    draws,
    with_arrays,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*length of IterableDataset")


class Eager(Sampler[int]):
    """Draws when it is asked for an iterator, not when that is asked for an index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


@dataclass
class Case:
    """Arguments of a loader, drawn at random, and what is done with it.

    Attributes:
        seed: Decides everything.
        stops: For each epoch, after how many batches it is broken off; None if it is not.
    """

    seed: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_persistent: bool | None = None

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.stops = [rng.choice([None, None, 1, 3]) for _ in range(rng.randrange(1, 4))]
        self.kwargs["num_workers"] = workers = rng.choice([0, 1, 2, 3])
        if workers:
            self.kwargs["prefetch_factor"] = rng.choice([1, 2, 3])
            self.kwargs["in_order"] = rng.random() < 0.85
            self.is_persistent = rng.choice([None, False, True])
        collates = [None, None, as_list, with_arrays]
        if rng.random() < 0.35:
            self._draw_iterable()
        else:
            self._draw_map()
        if isinstance(self.dataset, Nested) or self.kwargs.get("batch_size", 1) is None:
            collates.remove(with_arrays)
        self.kwargs["collate_fn"] = rng.choice(collates)
        self.generator = torch.Generator() if rng.random() < 0.3 else None

    def run(self, kind: Any, persistent_workers: bool | None) -> list[Any]:
        """All batches, and what the generators give between them."""
        torch.manual_seed(self.seed)
        if self.generator is not None:
            self.generator.manual_seed(self.seed + 1)
        loader = kind(self.dataset, generator=self.generator, persistent_workers=persistent_workers, **self.kwargs)
        found: list[Any] = []
        for stop in self.stops:
            found += self._epoch(loader, stop)
        return found

    def _epoch(self, loader: Any, stop: int | None) -> list[Any]:
        batches, states = [], []
        iterator = iter(loader)
        states.append(self._state())
        for batch in iterator:
            batches.append(batch)
            states.append(self._state())
            if len(batches) == stop:
                break
        if not self.kwargs.get("in_order", True):
            return [] if stop else sorted(batches, key=repr)
        return [*batches, *states]

    def _state(self) -> torch.Tensor:
        return (torch.default_generator if self.generator is None else self.generator).get_state()

    def _draw_iterable(self) -> None:
        rng = self.rng
        limits = [rng.choice([0, 1, 3, 10**6]) for _ in range(3)]
        self.dataset: Any = rng.choice([Parts, Sized])(rng.choice([0, 1, 7, 30]), limits)
        self.kwargs["batch_size"] = rng.choice([None, 1, 2, 7])
        if self.kwargs["batch_size"] is not None:
            self.kwargs["drop_last"] = rng.random() < 0.4

    def _draw_map(self) -> None:
        rng, length = self.rng, self.rng.choice([1, 2, 5, 13, 30])
        tensors = TensorDataset(torch.arange(length * 600).view(length, 600), torch.arange(length))
        self.dataset = rng.choice(
            [Numbers(length), Nested(length), FetchedTogether(length), tensors, list(range(length))]
        )
        samplers: list[Any] = [
            *(None, "shuffle", "batches", Eager(length), WeightedRandomSampler([1.0] * length, 2 * length)),
            *(SubsetRandomSampler(range(length)), RandomSampler(range(length), True, rng.randrange(1, 90))),
        ]
        match rng.choice(samplers):
            case "batches":
                sizes = [rng.randrange(1, 9) for _ in range(rng.randrange(8))]
                self.kwargs["batch_sampler"] = [[rng.randrange(length) for _ in range(size)] for size in sizes]
                return
            case "shuffle":
                self.kwargs["shuffle"] = True
            case sampler:
                self.kwargs["sampler"] = sampler
        self.kwargs["batch_size"] = rng.choice([None, 1, 2, 7])
        if self.kwargs["batch_size"] is not None:
            self.kwargs["drop_last"] = rng.random() < 0.4


def compare(seed: int) -> None:
    """Runs the same with both loaders."""
    case = Case(seed)
    with KeptGenerators():
        expected = case.run(DataLoader, bool(case.is_persistent))
        assert_same(case.run(SharedMemoryLoader, case.is_persistent), expected)


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_the_same_batches_order_and_draws_as_dataloader_whatever_its_arguments(first: int) -> None:
    for seed in range(first, first + 8):
        compare(seed)


RANDOM: dict[str, dict[str, Any]] = {
    "samples": {"dataset": Augmented(10), "batch_size": 3},
    "single": {"dataset": Augmented(4), "batch_size": None},
    "whole batches": {"dataset": AugmentedTogether(10), "batch_size": 3, "shuffle": True},
    "collate": {"dataset": TensorDataset(torch.arange(600.0).view(10, 60)), "batch_size": 3, "collate_fn": draws},
}


@pytest.mark.parametrize("kwargs", RANDOM.values(), ids=RANDOM)
def test_random_samples_are_the_same_for_any_number_of_workers_and_differ_between_epochs(kwargs: Any) -> None:
    with KeptGenerators():
        found = []
        for workers in range(4):
            torch.manual_seed(7)
            loader = SharedMemoryLoader(num_workers=workers, **kwargs)
            np.random.randn(workers)  # another state of the trainer's generators
            random.seed(workers)
            found.append([list(loader) for _ in range(2)])
            assert repr(found[-1][0]) != repr(found[-1][1])
            assert_same(found[-1], found[0])


def test_random_samples_differ_between_epochs_of_persistent_workers() -> None:
    loader = SharedMemoryLoader(Augmented(4), 2, num_workers=1, persistent_workers=True)
    assert len({repr(list(loader)) for _ in range(3)}) == 3


def test_what_samples_draw_does_not_change_the_trainers_generators() -> None:
    drawn = []
    with KeptGenerators():
        for workers in (0, 2):
            torch.manual_seed(7)
            np.random.seed(7)
            random.seed(7)
            list(SharedMemoryLoader(Augmented(4), 2, num_workers=workers))
            drawn.append((float(torch.rand(1)), np.random.randn(), random.gauss(0, 1)))
    assert drawn[0] == drawn[1]
    assert drawn[0][1] == np.random.RandomState(7).randn()


class Drawing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for _ in range(3):
            yield info.id, float(torch.rand(1)), float(np.random.rand()), random.random()


def test_workers_of_an_iterable_dataset_draw_differently_and_again_in_each_epoch() -> None:
    with KeptGenerators():
        torch.manual_seed(7)
        loader = SharedMemoryLoader(Drawing(), None, num_workers=2)
        rows = [row for _ in range(2) for row in loader]
        torch.manual_seed(7)
        again = [row for _ in range(2) for row in SharedMemoryLoader(Drawing(), None, num_workers=2)]
    assert len({row[place] for row in rows for place in (1, 2, 3)}) == 3 * 12
    assert rows[:6] == again[:6]


def children() -> set[str]:
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.mark.parametrize("persistent_workers", [None, True])
def test_workers_are_kept_and_end_with_the_loader(persistent_workers: bool | None) -> None:
    gc.collect()
    before = children()
    loader = SharedMemoryLoader(Numbers(8), 2, num_workers=2, persistent_workers=persistent_workers)
    iterator = iter(loader)
    next(iterator)
    workers = children() - before
    assert len(workers) == 2
    del iterator
    assert len(list(loader)) == 4
    assert children() - before == workers
    del loader
    assert children() == before


def test_workers_that_are_not_kept_end_with_their_iterator_and_several_may_run_at_once() -> None:
    gc.collect()
    before = children()
    loader = SharedMemoryLoader(Numbers(8), 2, num_workers=1, persistent_workers=False)
    for one, other in zip(loader, loader, strict=True):
        assert_same(one, other)
        assert len(children() - before) == 2
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert children() == before


def test_lightning_records_nothing_of_what_changes_in_use() -> None:
    # It would set the same workers on the loaders that it makes from this one.
    with _replace_dunder_methods(DataLoader, "dataset"):
        loader = SharedMemoryLoader(Numbers(8), 2, num_workers=1)
        assert len(list(loader)) == 4
        loader.load_state_dict(loader.state_dict())
        assert len(list(loader)) == 4
        pickle.dumps(loader)
    recorded = [args[0] for args, _ in loader.__dict__.get("__pl_attrs_record", ())]
    assert not [name for name in recorded if name.startswith("_") and name != "_IterableDataset_len_called"]


def test_a_loader_can_be_pickled_also_while_it_is_in_use() -> None:
    loader = SharedMemoryLoader(Numbers(8), 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    assert_same(list(pickle.loads(pickle.dumps(loader))), list(loader))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_that_gives_more_than_it_said_is_reported(workers: int) -> None:
    class Lying(Parts):
        def __len__(self) -> int:
            return 3

    loader = SharedMemoryLoader(Lying(4), None, num_workers=workers)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="Lying has a length of 3, but gives more: batch 4"):
        assert len(list(loader)) == 4


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_pinned_memory_without_an_accelerator_is_reported() -> None:
    with pytest.warns(UserWarning, match="pin_memory=True has no effect"):
        assert len(list(SharedMemoryLoader(Numbers(8), 2, pin_memory=True))) == 4


def test_workers_need_not_be_forked() -> None:
    loader = SharedMemoryLoader(Nested(8), 2, num_workers=1, multiprocessing_context=helpers._context)
    assert_same(list(loader), list(DataLoader(Nested(8), 2)))


def test_a_number_of_workers_that_is_set_holds_from_the_next_iteration() -> None:
    loader = SharedMemoryLoader(Numbers(8), 2, num_workers=1)
    for number in (2, 1, 0):
        list(loader)
        loader.num_workers = number
        assert len(list(loader)) == 4
        assert len(loader._stream.pids if loader._stream is not None else []) == number
    with pytest.raises(ValueError, match="num_workers='auto' must be an integer of at least 0"):
        loader.num_workers = "auto"  # type: ignore[assignment]


def test_an_iterator_whose_loader_was_closed_says_so() -> None:
    loader = SharedMemoryLoader(Numbers(20), batch_size=2, num_workers=1)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(RuntimeError, match="its loader was closed; begin a new one"):
        next(batches)
    assert len(list(loader)) == 10
    loader.close()
